"""The fewest seconds that a step could take on this machine: its arithmetic at the speed of matrix products, and weights and
caches read at the bandwidth of the memory. What a phase takes beyond its floor could still be saved.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from psigrad.language.models.backbone import DTYPES
from psigrad.language.models.fused.layer import compute_dtype
from psigrad.preflight.bench.workload import Workload
from psigrad.preflight.plan.arithmetic import Lengths, StepCost, Work, cost_of
from psigrad.preflight.plan.hardware import Machine, machine
from psigrad.preflight.plan.memory import recomputed_gradients
from psigrad.preflight.plan.shape import counted


def rates(dtype: str, threads: int, device: str) -> Machine:
    """Rates of this machine, in the type that its matrix products use."""
    used = compute_dtype(DTYPES[dtype]) if device == "cpu" else DTYPES[dtype]
    name = next(name for name, kind in DTYPES.items() if kind is used)
    before = torch.get_num_threads()
    try:
        return machine(device, name, threads)
    finally:
        torch.set_num_threads(before)


def floor(work: Workload, folder: Path, tokens: float, dtype: str, rate: Machine) -> dict[str, float]:
    """Seconds by phase of a step on the model under `folder` with `tokens` completion tokens; offline, tokens of all rows."""
    spent = cost(work, folder, tokens, dtype)
    found = {"forward-backward": spent.training / rate.peak}
    if work.online:
        found["sample"] = max(spent.sampling / rate.peak, spent.read / rate.bandwidth)
        if spent.passes:
            found["log-probs"] = spent.passes / rate.peak
    return found


def cost(work: Workload, folder: Path, tokens: float, dtype: str) -> StepCost:
    """The FLOPs of a step, and the bytes that decoding reads."""
    shape = counted(AutoConfig.from_pretrained(folder / "model"))
    online = work.online
    members = work.generations if online else 1 if work.kind == "sft" else 2
    prompts = 0 if online else work.prompts * work.prompt_tokens  # offline they are counted among the tokens
    completion = round((tokens - prompts) / (work.prompts * members))
    longest = work.completion_tokens if online else completion
    done = Work(
        rows=work.prompts,
        members=members,
        trained=members,
        lengths=Lengths(work.prompt_tokens, completion, work.prompt_tokens, longest),
        passes=work.iterations,
        minibatches=1,
        budget=4096,
        samples=online,
        slots=work.prompts * members,
        steps=0,
        dataset=0,
        reference=work.beta > 0,
        critic=work.kind == "ppo",
        keeps=float(online and not work.gradient_checkpointing),
    )
    width = DTYPES[dtype].itemsize
    cached = 2.0 * width * shape.layers * shape.key * (tokens + work.prompts * work.prompt_tokens)
    weights = width * (shape.matrices + shape.head)
    again = work.gradient_checkpointing and dtype == "float32" and recomputed_gradients(done, shape, True, head=True)[0] > 0
    spent = cost_of(done, shape, frozen=False, recompute=work.gradient_checkpointing, weight_bytes=weights, cache_bytes=cached)
    return spent.with_head_again(done, shape) if again else spent
