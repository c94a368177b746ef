"""psigrad timed by itself or beside TRL: a process for each, steps in turn, medians and ratios."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.preflight.bench.floor import cost, floor, rates
from psigrad.preflight.bench.inputs import build
from psigrad.preflight.bench.workload import Workload
from psigrad.preflight.plan.hardware import Machine
from psigrad.runs.machine import provenance

# How far loss and gradient norm of the two sides may lie apart, as a share of their size. TRL's bfloat16 is autocast over
# float32 weights, ours has weights in bfloat16.
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
# What TRL has a trainer for.
PEERS = ("grpo", "rloo", "dpo", "reward", "sft")
Maker = Callable[[Workload, Path], None]


class WorkerProcess:
    """The process in which psigrad ("ours") or TRL ("trl") takes steps when it is asked to."""

    def __init__(self, who: str, folder: Path, dtype: str, threads: int, device: str = "cpu") -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        arguments = [
            "-m",
            "psigrad.preflight.bench.worker_process",
            who,
            str(folder),
            dtype,
            str(threads),
            device,
            str(time.time()),
        ]
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        try:
            self.ready: float = self.hear()["ready"]
        except BaseException:
            self.close()
            raise

    def ask(self, what: str) -> dict[str, Any]:
        """The answer to "check" or "step"."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next answer. Raises `UserError` with the end of its messages where the process has died."""
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


def beside(work: Workload, dtype: str, threads: int, *, make: Maker = build, device: str = "cpu") -> dict[str, Any]:
    """psigrad and TRL: equal results first, then steps in turn, so that other load on the machine slows down both.

    Raises `UserError` where TRL is not installed or has no such trainer, or the two compute different losses or gradients on the
    same batch.
    """
    if work.kind not in PEERS:
        raise UserError(f"TRL 1.16 has no trainer for {work.kind}, so nothing can be measured beside it; leave --beside out.")
    if find_spec("trl") is None:
        raise UserError(
            "TRL is not installed, so nothing can be measured beside it; pip install trl==1.16.0, or leave --beside out."
        )
    with tempfile.TemporaryDirectory() as folder:
        make(work, Path(folder))
        before = rates(dtype, threads, device)
        with _sides(Path(folder), dtype, threads, device) as sides:
            checks = {who: side.ask("check") for who, side in sides.items()}
            _agree(work, dtype, checks)
        # new processes are timed, so that a first step or a peak contains nothing of the check
        with _sides(Path(folder), dtype, threads, device) as sides:
            steps: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
            for _ in range(1 + work.steps):
                for who, side in sides.items():
                    time.sleep(0.3)  # OpenMP threads spin for a while after their work
                    steps[who].append(whole_batch(work, who, side))
            # imports, model and first step, as the process itself measured them; the first is not among the others
            first = {who: side.ready + steps[who].pop(0)["seconds"] for who, side in sides.items()}
        found = {who: medians(work, taken) for who, taken in steps.items()}
        found["ours"] |= _efficiency(work, Path(folder), found["ours"], dtype, before, rates(dtype, threads, device))
    return {**_head(work, dtype, threads, device), "check": checks, "to_first_step": first, **found, **ratios(work, steps)}


@contextlib.contextmanager
def _sides(folder: Path, dtype: str, threads: int, device: str) -> Iterator[dict[str, WorkerProcess]]:
    """The processes of both, started one after the other."""
    with contextlib.ExitStack() as stack:
        sides = {}
        for who in ("ours", "trl"):
            sides[who] = WorkerProcess(who, folder, dtype, threads, device)
            stack.callback(sides[who].close)
        yield sides


def alone(work: Workload, dtype: str, threads: int, *, make: Maker = build, device: str = "cpu") -> dict[str, Any]:
    """psigrad by itself."""
    with tempfile.TemporaryDirectory() as folder:
        make(work, Path(folder))
        before = rates(dtype, threads, device)
        side = WorkerProcess("ours", Path(folder), dtype, threads, device)
        try:
            first = side.ready + side.ask("step")["seconds"]
            steps = [side.ask("step") for _ in range(work.steps)]
        finally:
            side.close()
        found = medians(work, steps)
        found |= _efficiency(work, Path(folder), found, dtype, before, rates(dtype, threads, device))
    return {**_head(work, dtype, threads, device), "to_first_step": {"ours": first}, "ours": found}


def _head(work: Workload, dtype: str, threads: int, device: str) -> dict[str, Any]:
    return {"workload": work.name, "dtype": dtype, "threads": threads, **provenance(device)}


def _efficiency(work: Workload, folder: Path, found: dict[str, Any], dtype: str, *rates: Machine) -> dict[str, Any]:
    """The floor of every phase, and model FLOPs utilisation: the step's arithmetic over what the machine does in its time.

    Of several measurements of the machine the fastest counts, since other programs only slow one down.
    """
    rate = replace(rates[0], peak=max(r.peak for r in rates), bandwidth=max(r.bandwidth for r in rates))
    flops = cost(work, folder, found["tokens"], dtype).flops
    return {"floor": floor(work, folder, found["tokens"], dtype, rate), "mfu": flops / (found["seconds"] * rate.peak)}


def _agree(work: Workload, dtype: str, checks: dict[str, dict[str, float]]) -> None:
    for figure in ("loss", "gradient"):
        a, b = checks["ours"][figure], checks["trl"][figure]
        if abs(a - b) > BOUNDS[dtype] * max(abs(b), 1e-3):
            raise UserError(
                f"{work.name}: the {figure} differs on the same batch, so no ratio means anything: ours {a}, TRL {b}."
            )


def whole_batch(work: Workload, who: str, side: WorkerProcess) -> dict[str, Any]:
    """All passes over one collected batch: one step of ours, as many of TRL's as there are passes."""
    taken = [side.ask("step") for _ in range(work.iterations if who == "trl" else 1)]
    names = {name for s in taken for name in s["phases"]}
    return {
        "seconds": sum(s["seconds"] for s in taken),
        "tokens": sum(s["tokens"] for s in taken),
        "phases": {name: sum(s["phases"].get(name, 0.0) for s in taken) for name in names},
        "peak_mb": max(s["peak_mb"] for s in taken),
    }


def medians(work: Workload, taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over a side's steps: seconds, tokens, phases; and its peak memory in MiB."""
    names = sorted({name for s in taken for name in s["phases"]})
    seconds = statistics.median(s["seconds"] for s in taken)
    tokens = statistics.median(s["tokens"] for s in taken)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "ms_per_token": 1e3 * statistics.median(costs(work, taken)) if work.online else None,
        "phases": {name: statistics.median(s["phases"].get(name, 0.0) for s in taken) for name in names},
        "peak_mb": max(s["peak_mb"] for s in taken),
    }


def costs(work: Workload, taken: list[dict[str, Any]]) -> list[float]:
    """Seconds per completion token of each step, or seconds per step where the rows are the same."""
    return [s["seconds"] / s["tokens"] if work.online else s["seconds"] for s in taken]


def ratios(work: Workload, steps: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """TRL's cost over ours, in time (with the spread of neighbouring steps) and in memory."""
    cost = {who: costs(work, taken) for who, taken in steps.items()}
    each = [b / a for a, b in zip(cost["ours"], cost["trl"], strict=True)]
    peak = {who: max(s["peak_mb"] for s in taken) for who, taken in steps.items()}
    median = statistics.median(cost["trl"]) / statistics.median(cost["ours"])
    return {
        "ratio": {"median": median, "low": min(each), "high": max(each), "steps": len(each)},
        "memory_ratio": peak["trl"] / peak["ours"],
    }


PHASES = ("sample", "score", "log-probs", "forward-backward", "optimizer", "rest")


def table(results: list[dict[str, Any]]) -> str:
    """The results for people: seconds by phase on our side, and beside TRL the ratio."""
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
    text = _aligned(lines)
    compared = [r for r in results if "trl" in r]
    if not compared:
        return text
    lines = [["workload", "dtype", "psigrad s", "TRL s", "ratio", "psigrad MB", "TRL MB", "first step s", "TRL's"]]
    for r in compared:
        ratio = f"{r['ratio']['median']:.2f} [{r['ratio']['low']:.2f}, {r['ratio']['high']:.2f}]"
        row = [r["workload"], r["dtype"], f"{r['ours']['seconds']:.3f}", f"{r['trl']['seconds']:.3f}", ratio]
        row += [f"{r['ours']['peak_mb']:.0f}", f"{r['trl']['peak_mb']:.0f}"]
        lines.append([*row, f"{r['to_first_step']['ours']:.1f}", f"{r['to_first_step']['trl']:.1f}"])
    return text + "\n\n" + _aligned(lines)


def _aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
