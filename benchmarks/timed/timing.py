"""Training steps in a separate process: seconds by phase, tokens per second, peak memory, and the floor of each phase.

The floor is the least time that a phase could take on this machine: its arithmetic at the speed of matrix products, and weights
and caches read at memory bandwidth. The time above the floor could still be saved.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timed.inputs import build
from timed.workload import Workload
from transformers import AutoConfig

import psigrad
from psigrad.errors import UserError
from psigrad.language.models.backbone import DTYPES
from psigrad.language.models.fused.layer import compute_dtype
from psigrad.runs.machine import provenance
from psigrad_extras.preflight.plan.arithmetic import Lengths, StepCost, Work, cost_of
from psigrad_extras.preflight.plan.hardware import Machine, machine
from psigrad_extras.preflight.plan.memory import recomputed_gradients
from psigrad_extras.preflight.plan.predict import CODED
from psigrad_extras.preflight.plan.shape import count_shape

Maker = Callable[[Workload, Path], None]
# The arguments to Python that start psigrad's process.
OURS = (str(Path(__file__).with_name("timed_run.py")),)
PHASES = ("sample", "score", "log-probs", "forward-backward", "optimizer", "rest")


class WorkerProcess:
    """A process in which `program` (see `workload.serve`) takes steps on request. Only this one can import from `packages`."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        threads: int,
        device: str = "cpu",
        program: Sequence[str] = OURS,
        packages: str = "",
    ) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        path = [
            str(Path(psigrad.__file__).parents[1]),
            str(Path(__file__).parents[1]),
            os.environ.get("PYTHONPATH", ""),
            packages,
        ]
        self.process = subprocess.Popen(
            [sys.executable, *program, str(folder), dtype, str(threads), device, str(time.time())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        try:
            self.ready: float = self.hear()["ready"]
        except BaseException:
            self.close()
            raise

    def step(self) -> dict[str, Any]:
        """Take one step, and return its seconds, tokens and phases, and the peak memory so far."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """Return the next answer. Raises `UserError` with the end of the process's messages if it has died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            messages = "\n".join(self.errors.read().strip().splitlines()[-12:])
            raise UserError(f"One side of the benchmark died with exit status {status}: {messages}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.errors.close()


def alone(work: Workload, dtype: str, threads: int, *, make: Maker = build, device: str = "cpu") -> dict[str, Any]:
    """Time psigrad alone."""
    with tempfile.TemporaryDirectory() as folder:
        make(work, Path(folder))
        before = rates(dtype, threads, device)
        side = WorkerProcess(Path(folder), dtype, threads, device)
        try:
            first = side.ready + side.step()["seconds"]
            steps = [side.step() for _ in range(work.steps)]
        finally:
            side.close()
        found = medians(work, steps)
        found |= efficiency(work, Path(folder), found, dtype, before, rates(dtype, threads, device))
    return {**head(work, dtype, threads, device), "to_first_step": {"ours": first}, "ours": found}


def head(work: Workload, dtype: str, threads: int, device: str) -> dict[str, Any]:
    """Return what was timed, on which machine and with which versions."""
    return {"workload": work.name, "dtype": dtype, "threads": threads, **provenance(device)}


def efficiency(work: Workload, folder: Path, found: dict[str, Any], dtype: str, *rates: Machine) -> dict[str, Any]:
    """Return every phase's floor, and model FLOPs utilisation: the step's FLOPs over those that the machine can do in its time.

    The fastest of several measurements of the machine counts, since other programs can only slow it down.
    """
    rate = replace(rates[0], peak=max(r.peak for r in rates), bandwidth=max(r.bandwidth for r in rates))
    flops = cost(work, folder, found["tokens"], dtype).flops
    return {"floor": floor(work, folder, found["tokens"], dtype, rate), "mfu": flops / (found["seconds"] * rate.peak)}


def medians(work: Workload, taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a side's steps (seconds, tokens, phases), and its peak memory in MiB."""
    names = sorted({name for s in taken for name in s["phases"]})
    seconds = statistics.median(s["seconds"] for s in taken)
    tokens = statistics.median(s["tokens"] for s in taken)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "ms_per_token": 1e3 * statistics.median(costs(work, taken)) if work.online else None,
        "phases": {name: statistics.median(s["phases"].get(name, 0.0) for s in taken) for name in names},
        **{name: max(s[name] for s in taken) for name in ("peak_mb", "gpu_peak_mb") if name in taken[0]},
    }


def costs(work: Workload, taken: list[dict[str, Any]]) -> list[float]:
    """Return the seconds per completion token of each step, or offline, where both sides have the same rows, per step."""
    return [s["seconds"] / s["tokens"] if work.online else s["seconds"] for s in taken]


def rates(dtype: str, threads: int, device: str) -> Machine:
    """Return this machine's rates (arithmetic, bandwidth) in the dtype of its matrix products."""
    used = compute_dtype(DTYPES[dtype]) if device == "cpu" else DTYPES[dtype]
    name = next(name for name, kind in DTYPES.items() if kind is used)
    before = torch.get_num_threads()
    try:
        return machine(device, name, threads)
    finally:
        torch.set_num_threads(before)


def floor(work: Workload, folder: Path, tokens: float, dtype: str, rate: Machine) -> dict[str, float]:
    """Return the floor by phase of a step with `tokens` completion tokens (offline: tokens of all rows), on the model in
    `folder`. Return nothing for episodes of several turns, since some of their tokens are read and not sampled.
    """
    if work.turns > 1:
        return {}
    spent = cost(work, folder, tokens, dtype)
    found = {"forward-backward": spent.training / rate.peak}
    if work.online:
        found["sample"] = max(spent.sampling / rate.peak, spent.read / rate.bandwidth)
        if spent.passes:
            found["log-probs"] = spent.passes / rate.peak
    return found


def cost(work: Workload, folder: Path, tokens: float, dtype: str) -> StepCost:
    """Return the FLOPs of a step, and the bytes that decoding reads."""
    shape = count_shape(AutoConfig.from_pretrained(folder / "model"))
    online = work.online
    members = work.generations if online else 1 if work.kind == "sft" else 2
    prompts = 0 if online else work.prompts * work.prompt_tokens  # offline, `tokens` includes the prompts
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
    cached = float(width) * shape.cached * (tokens + work.prompts * work.prompt_tokens)
    saved = (width - CODED.get(work.quantize_base, width)) * shape.layer_matrices
    weights = width * (shape.matrices + shape.head) - round(saved)
    again = (
        work.gradient_checkpointing
        and dtype == "float32"
        and not work.lora_rank
        and recomputed_gradients(done, shape, True, head=True)[0] > 0
    )
    spent = cost_of(
        done, shape, frozen=work.lora_rank > 0, recompute=work.gradient_checkpointing, weight_bytes=weights, cache_bytes=cached
    )
    return spent.with_head_again(done, shape) if again else spent


def table(results: list[dict[str, Any]]) -> str:
    """Return a table of the results: seconds by phase, and their floor."""
    heads = ["workload", "dtype", "step s", *PHASES, "tokens/s", "peak MB", "first step s"]
    lines = [heads]
    for r in results:
        ours = r["ours"]
        phases = [f"{ours['phases'].get(name, 0.0):.3f}" for name in PHASES]
        figures = [f"{ours['tokens_per_second']:.0f}", f"{ours['peak_mb']:.0f}", f"{r['to_first_step']['ours']:.1f}"]
        lines.append([r["workload"], r["dtype"], f"{ours['seconds']:.3f}", *phases, *figures])
        least = ours["floor"]
        parts = [f"{least[name]:.3f}" if name in least else "" for name in PHASES]
        lines.append(["", "floor", f"{sum(least.values()):.3f}", *parts, f"{ours['mfu']:.0%} MFU", "", ""])
    return align(lines)


def align(lines: list[list[str]]) -> str:
    """Return the cells in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
