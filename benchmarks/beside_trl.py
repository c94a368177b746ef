"""psigrad and TRL side by side: an equal loss and gradient on one fixed batch, then alternating steps, medians and ratios.

Each side runs in separate processes, with the same weights, prompts, batch shape and precision.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from timed import timed_run, timing
from timed.inputs import build
from timed.timing import OURS, Maker, WorkerProcess, align, costs, medians, rates
from timed.workload import Parent, Workload, serve
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from psigrad.errors import UserError
from psigrad.language.models.experts import add_balance_loss
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.objective import Batch, Loss, terminal
from psigrad.optim import Optimizer, add_up
from psigrad_extras.preflight.plan.hardware import Machine

# The largest allowed relative difference of loss and gradient norm. TRL's bfloat16 is autocast over float32 weights, psigrad's
# weights are in bfloat16.
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
# The methods for which TRL has a trainer.
PEERS = ("grpo", "rloo", "dpo", "reward", "sft")
# The arguments to Python that start each side's process: CHECKS to compute loss and gradient, STEPS to take steps.
_TRL = str(Path(__file__).with_name("trl_worker.py"))
CHECKS = {"ours": (__file__,), "trl": (_TRL, "check")}
# With `apart`, the number of steps that one side takes in a row.
BLOCK = 4
STEPS = {"ours": OURS, "trl": (_TRL, "steps")}


def beside(
    work: Workload,
    dtype: str,
    threads: int,
    *,
    make: Maker = build,
    device: str = "cpu",
    keep: Callable[[dict[str, Any]], None] | None = None,
    foretell: Callable[[Path, Machine], dict[str, Any]] = lambda folder, rate: {},
    packages: str = "",
    apart: bool = False,
) -> dict[str, Any]:
    """Compare psigrad with TRL on a workload: check that their results are equal, then let their steps alternate, so that other
    load on the machine slows down both.

    `keep` gets each pair of steps (see `pair`) at once, with the result of `foretell(folder, machine)`. Only TRL's process can
    import from the folder `packages`. With `apart`, for little memory, a few steps of one side are followed by as many of the
    other.

    Raises `UserError` if TRL is not installed or has no trainer for the method, or if loss or gradient differ.
    """
    if work.kind not in PEERS:
        raise UserError(f"TRL 1.16 has no trainer for {work.kind}, so it cannot be compared with psigrad.")
    if find_spec("trl") is None:
        raise UserError("TRL is not installed, so it cannot be compared with psigrad; pip install trl==1.16.0.")
    with tempfile.TemporaryDirectory() as folder:
        make(work, Path(folder))
        before = rates(dtype, threads, device)
        foretold = foretell(Path(folder), before)
        start = partial(_sides, folder=Path(folder), dtype=dtype, threads=threads, device=device, packages=packages)
        checks: dict[str, dict[str, float]] = {}
        for who, program in CHECKS.items():
            with start({who: program}) as sides:
                checks[who] = sides[who].hear()
        agree(work, dtype, checks)
        # time new processes, so that first step and peak memory do not contain the check
        steps: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        first: dict[str, float] = {}
        for taken, first in _rounds(work, start, apart):
            for who, step in taken.items():
                steps[who].append(step)
            if keep is not None:
                least = timing.floor(work, Path(folder), taken["ours"]["tokens"], dtype, before)
                keep(pair(work, taken, first, least) | foretold)
        found = {who: medians(work, taken) for who, taken in steps.items()}
        found["ours"] |= timing.efficiency(work, Path(folder), found["ours"], dtype, before, rates(dtype, threads, device))
    return {**timing.head(work, dtype, threads, device), "check": checks, "to_first_step": first, **found, **ratios(work, steps)}


def pair(
    work: Workload, last: Mapping[str, dict[str, Any]], first: Mapping[str, float], floor: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of one step of each side: cost (see `costs`), seconds, tokens, peak in MiB, seconds to the end of the
    first step, and psigrad's phases with their floor.
    """
    found: dict[str, Any] = {"phases": last["ours"]["phases"], "floor": dict(floor)}
    for who, step in last.items():
        found |= {who: costs(work, [step])[0], f"{who}_mb": step["peak_mb"], f"{who}_first": first[who]}
        found |= {f"{who}_seconds": step["seconds"], f"{who}_tokens": step["tokens"]}
    return found


Steps = dict[str, dict[str, Any]]
Start = Callable[[Mapping[str, Sequence[str]]], contextlib.AbstractContextManager[dict[str, WorkerProcess]]]


def _rounds(work: Workload, start: Start, apart: bool) -> Iterator[tuple[Steps, dict[str, float]]]:
    """Yield a step of each side, and the seconds that each side took to the end of its first step. First steps are not yielded.
    With `apart`, second steps are not yielded either: psigrad touches half a million new pages in each of its first two steps of
    a 0.6B model, and none later.
    """

    def begin(sides: Mapping[str, WorkerProcess]) -> dict[str, float]:
        # imports, model and first step, measured by the process itself
        return {who: side.ready + whole_batch(work, who, side)["seconds"] for who, side in sides.items()}

    if not apart:
        with start(STEPS) as sides:
            first = begin(sides)
            for _ in range(work.steps):
                yield {who: whole_batch(work, who, side) for who, side in sides.items()}, first
        return
    for done in range(0, work.steps, BLOCK):
        taken: dict[str, list[dict[str, Any]]] = {}
        first = {}
        for who, program in STEPS.items():
            with start({who: program}) as sides:
                first |= begin(sides)
                whole_batch(work, who, sides[who])
                taken[who] = [whole_batch(work, who, sides[who]) for _ in range(min(BLOCK, work.steps - done))]
        for ours, trl in zip(taken["ours"], taken["trl"], strict=True):
            yield {"ours": ours, "trl": trl}, first


@contextlib.contextmanager
def _sides(
    programs: Mapping[str, Sequence[str]], folder: Path, dtype: str, threads: int, device: str, packages: str
) -> Iterator[dict[str, WorkerProcess]]:
    """Start the processes one after the other, and close them at the end."""
    with contextlib.ExitStack() as stack:
        sides = {}
        for who, program in programs.items():
            sides[who] = WorkerProcess(folder, dtype, threads, device, program, packages if who == "trl" else "")
            stack.callback(sides[who].close)
        yield sides


def agree(work: Workload, dtype: str, checks: dict[str, dict[str, float]]) -> None:
    """Raise an error if the losses or the gradients differ."""
    for figure in ("loss", "gradient"):
        a, b = checks["ours"][figure], checks["trl"][figure]
        if abs(a - b) > BOUNDS[dtype] * max(abs(b), 1e-3):
            raise UserError(
                f"{work.name}: the {figure} differs on the same batch, so ratios would be meaningless: psigrad {a}, TRL {b}."
            )


def whole_batch(work: Workload, who: str, side: WorkerProcess) -> dict[str, Any]:
    """Make all passes over one collected batch: one step of psigrad, or one step of TRL per pass. Raises `UserError` if psigrad
    had no gradient to compute, since TRL computes one in any case.
    """
    time.sleep(0.3)  # OpenMP threads keep spinning for a while after their work
    taken = [side.step() for _ in range(work.iterations if who == "trl" else 1)]
    names = {name for s in taken for name in s["phases"]}
    if who == "ours" and work.online and not any(s["phases"].get("forward-backward") for s in taken):
        raise UserError(f"{work.name}: all completions of each group earned the same reward, so psigrad had nothing to train on.")
    return {
        "seconds": sum(s["seconds"] for s in taken),
        "tokens": sum(s["tokens"] for s in taken),
        "phases": {name: sum(s["phases"].get(name, 0.0) for s in taken) for name in names},
        **{name: max(s[name] for s in taken) for name in ("peak_mb", "gpu_peak_mb") if name in taken[0]},
    }


def ratios(work: Workload, steps: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return TRL's cost divided by psigrad's, in time (with the range over pairs of steps) and in memory."""
    cost = {who: costs(work, taken) for who, taken in steps.items()}
    each = [b / a for a, b in zip(cost["ours"], cost["trl"], strict=True)]
    peak = {who: max(s["peak_mb"] for s in taken) for who, taken in steps.items()}
    median = statistics.median(cost["trl"]) / statistics.median(cost["ours"])
    return {
        "ratio": {"median": median, "low": min(each), "high": max(each), "steps": len(each)},
        "memory_ratio": peak["trl"] / peak["ours"],
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return psigrad's table, and below it the comparison with TRL."""
    text = timing.table(results)
    compared = [r for r in results if "trl" in r]
    if not compared:
        return text
    lines = [["workload", "dtype", "psigrad s", "TRL s", "ratio", "psigrad MB", "TRL MB", "first step s", "TRL's"]]
    for r in compared:
        ratio = f"{r['ratio']['median']:.2f} [{r['ratio']['low']:.2f}, {r['ratio']['high']:.2f}]"
        row = [r["workload"], r["dtype"], f"{r['ours']['seconds']:.3f}", f"{r['trl']['seconds']:.3f}", ratio]
        row += [f"{r['ours']['peak_mb']:.0f}", f"{r['trl']['peak_mb']:.0f}"]
        lines.append([*row, f"{r['to_first_step']['ours']:.1f}", f"{r['to_first_step']['trl']:.1f}"])
    return text + "\n\n" + align(lines)


def check(run: timed_run.TimedRun) -> dict[str, float]:
    """Return psigrad's loss and gradient norm: offline on the first rows, online on the fixed batch, without the KL term and with
    old log-probs that are 0.05 lower.
    """
    if run.task is not None:
        shares = run.task.shares(range(run.work.prompts), 4096)
        return sum_up(
            run.optimizer, [partial(_value, partial(add_balance_loss, run.task.model, share, len(shares))) for share in shares]
        )
    given, model = fixed_batch(run.work), run.model
    assert isinstance(model, LanguageModel)
    prompts = given["prompts"] if not run.work.image else [list(p.ids) for p in run.prompts[: len(given["prompts"])]]
    device = model.device
    mask = pad_sequence([torch.tensor(chosen) for chosen in given["chosen"]], batch_first=True).bool().to(device)
    nothing = torch.zeros(len(mask), device=device)
    algorithm = timed_run.method(run.work.kind, 0.0)

    def loss() -> Loss:
        evaluation = model.evaluate(Groups(prompts, given["completions"]))
        batch = Batch(mask, terminal(nothing, mask), evaluation.logp.detach() - 0.05, nothing)
        prepared = algorithm.prepare(batch, {})
        advantage = torch.tensor(given["advantages"], device=device)[:, None].expand(mask.shape)
        prepared = replace(prepared, advantage=advantage, needs_gradient=torch.ones_like(nothing, dtype=torch.bool))
        return algorithm.loss(prepared, evaluation, algorithm.totals(prepared), {})

    return sum_up(run.optimizer, [partial(_value, partial(add_balance_loss, model, loss, 1))])


def _value(share: Callable[[], Loss]) -> Tensor:
    return share().value


def sum_up(optimizer: Optimizer, losses: Sequence[Callable[[], Tensor]]) -> dict[str, float]:
    """Return the sum of the losses and the norm of its gradient, and clear the gradient."""
    values: list[float] = []

    def noted(loss: Callable[[], Tensor]) -> Tensor:
        value = loss()
        values.append(float(value.detach()))
        return value

    add_up([optimizer], [partial(noted, loss) for loss in losses])
    found = {"loss": sum(values), "gradient": optimizer.norm()}
    optimizer.clear()
    return found


def fixed_batch(work: Workload) -> dict[str, Any]:
    """Return the token ids and advantages on which both sides compute the loss and its gradient before they are timed. With
    several turns, `chosen` is 0 for the environment's tokens in the middle of a completion.
    """
    rng = random.Random(1)
    longest, letters = min(24, work.completion_tokens), min(64, work.vocabulary)

    def completion() -> list[int]:
        return [rng.randrange(2, letters) for _ in range(rng.randint(2, longest))]

    groups = 3
    completions = [[completion() for _ in range(4)] for _ in range(groups)]
    prompts = [[rng.randrange(2, letters) for _ in range(min(12, work.prompt_tokens))] for _ in range(groups)]
    # mostly of one sign, since rounding dominates a loss whose terms cancel; below 0, where the clip lets the gradient through
    advantages = [rng.gauss(-1, 1) for _ in range(4 * groups)]
    parts = [[2 * len(c) // 5, 3 * len(c) // 5] if work.turns > 1 else [len(c), len(c)] for group in completions for c in group]
    lengths = [len(c) for group in completions for c in group]
    chosen = [[int(not a <= t < b) for t in range(n)] for (a, b), n in zip(parts, lengths, strict=True)]
    return {"prompts": prompts, "completions": completions, "chosen": chosen, "advantages": advantages}


def answer(folder: Path, dtype: str, device: str, parent: Parent) -> None:
    """Send psigrad's loss and gradient to the parent."""
    run = timed_run.build(folder, dtype, device)
    parent.ready()
    parent.say(check(run))


if __name__ == "__main__":
    serve(answer, sys.argv[1:])
