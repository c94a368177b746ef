"""The settings of what looks at a run from outside: its plan, its speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psigrad.config.sections import Count, CountOrZero, PositiveOrZero


@dataclass(frozen=True)
class PlanConfig:
    """What only a plan is told; the rest are the settings of the method that is planned."""

    memory: str = ""
    """Memory to fit, as 24GB; empty: this machine's."""
    prompt_length: CountOrZero = 0
    """Mean tokens of a prompt; 0: the dataset's, or a guess."""
    completion_length: CountOrZero = 0
    """Mean tokens of a completion; 0: the dataset's, or the longest that may be sampled."""
    tflops: PositiveOrZero = 0.0
    """Speed of matrix products in TFLOP/s; 0: measured here."""
    gpu: str = ""
    """A GPU by name, as h100: its memory, its speed and its bandwidth, without having it here."""
    devices: CountOrZero = 0
    """Show how to divide this many such devices between training and sampling; 0: the plan of the settings as they are."""
    network: PositiveOrZero = 50.0
    """With devices: speed of the network between them in GB/s (50 is 400 Gb/s)."""
    json: bool = False
    """Print one JSON object in place of the table."""


@dataclass(frozen=True)
class BenchConfig:
    """Training steps of a model, timed by phase, with the peak memory and the time from process start to the end of the first
    step.
    """

    model: str = ""
    """Folder or hub name of a model, or a folder with a configuration alone, whose weights are then random."""
    kind: Literal["grpo", "rloo", "ppo", "dpo", "reward", "sft"] = "grpo"
    """The method. ppo has a critic of its own; TRL 1.16 has no such trainer to be measured beside."""
    prompts: Count = 8
    """Prompts, pairs or rows per step."""
    generations: Count = 8
    """Completions per prompt."""
    prompt_tokens: Count = 32
    """Length of prompts."""
    completion_tokens: Count = 64
    """Longest completion."""
    beta: PositiveOrZero = 0.0
    """Weight of the KL to a reference."""
    iterations: Count = 1
    """Passes over each batch."""
    lora_rank: CountOrZero = 0
    """Rank of LoRA adapters on all linear layers, which alone are trained; 0: all weights are."""
    gradient_checkpointing: bool = False
    """Recompute in the backward pass what takes memory."""
    attention: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
    """psigrad's attention over packed sequences on a GPU."""
    cuda_graphs: bool = True
    """Record psigrad's decoding steps on a GPU."""
    steps: Count = 3
    """Steps that are timed, after a first one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision."""
    threads: CountOrZero = 0
    """CPU threads; 0: OMP_NUM_THREADS where it is set, else one per core."""
    device: str = "cpu"
    """cpu or cuda."""
    beside: Literal["", "trl"] = ""
    """trl: take steps in turn with TRL, where it is installed and this is a source checkout."""
    json: str = ""
    """File that the JSON line is added to."""
