"""Write the figures and the picture of docs/evidence.md from the records: python -m evidence.page."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import resumable
from evidence import tasks

from psigrad.errors import UserError
from psigrad.intervals import Interval, over_seeds, paired_difference, pass_at_k

sys.path.append(str(Path(__file__).parents[2] / "docs" / "make"))
from filled import fill

ROOT = Path(__file__).parents[2]
Record = dict[str, Any]
Pair = tuple[Record, Record, Record]
"""The records of one task and seed: before training, after psigrad's run, after TRL's."""
BEFORE, PSIGRAD, TRL = range(3)
FILE, PAGE = ROOT / "benchmarks" / "results" / "evidence.jsonl", ROOT / "docs" / "evidence.md"
LIBRARIES = ("psigrad", "trl")
PAIRS = len(tasks.SEEDS) * tasks.TASKS
MISSING = "not run yet"


def pass_at(record: Record, k: int) -> float:
    """Return pass@k of a record's completions."""
    return fmean(pass_at_k(tasks.DRAWS, count, k) for count in record["counts"])


SCORES: dict[str, Callable[[Record], float]] = {
    "pass@1": lambda record: pass_at(record, 1),
    "pass@8": lambda record: pass_at(record, 8),
    "everyday items": lambda record: fmean(map(int, record["everyday"])),
    "wall-clock time": lambda record: -math.log(record["seconds"]),
    "peak memory": lambda record: -math.log(record["peak_mb"]),
}
"""A score is a share, or the negative logarithm of a cost."""
CLAIMS = (
    ("GRPO with psigrad raises accuracy on held-out prompts.", "pass@1", BEFORE, 0.0),
    ("psigrad learns at least as much as TRL from the same number of samples.", "pass@1", TRL, -0.05),
    ("After training, more prompts are solved at least once in eight tries.", "pass@8", BEFORE, 0.0),
    ("Everyday knowledge is kept.", "everyday items", BEFORE, -0.05),
    ("psigrad takes less time.", "wall-clock time", TRL, 0.0),
    ("psigrad takes less memory.", "peak memory", TRL, 0.0),
)
"""Claim, score, base and bound: it holds if the 95 % interval of psigrad's score less that of the base lies above the bound."""


def read() -> list[Record]:
    """Return the records. Raise `UserError` if some were made with other settings."""
    found = resumable.read(FILE)
    if any(one["digest"] != tasks.DIGEST for one in found):
        raise UserError(f"{FILE} has records of other tasks or settings; move it away to start again.")
    return found


def find(records: Sequence[Record], **key: Any) -> Any:
    """Return the record with this key, or None."""
    return next((one for one in records if key.items() <= {name: one.get(name) for name in key}.items()), None)


def chosen(records: Sequence[Record]) -> list[tuple[str, bool]]:
    """Return the chosen tasks, each with True if it starts from the model after SFT; none while the pilot is incomplete."""
    pilots = {(sft, task): find(records, kind="pilot", task=task, sft=sft) for sft in (False, True) for task in tasks.CANDIDATES}
    if not all(pilots[False, task] for task in tasks.CANDIDATES):
        return []
    inside = [key for key, one in pilots.items() if one and tasks.LOW <= pass_at(one, tasks.DRAWS) <= tasks.HIGH]
    return [(task, sft) for sft, task in inside[: tasks.TASKS]]


def pairs(records: Sequence[Record]) -> dict[tuple[str, int], Pair | None]:
    """Return the pair of each chosen task and seed, None if it is incomplete. Raise `UserError` if its runs are unequal."""
    found: dict[tuple[str, int], Pair | None] = {}
    for task, seed in ((task, seed) for seed in tasks.SEEDS for task, _ in chosen(records)):
        runs = [find(records, kind="run", task=task, seed=seed, library=library) for library in LIBRARIES]
        found[task, seed] = (find(records, kind="start", task=task), *runs) if all(runs) else None
        for name in ("questions", "samples", "threads"):
            if all(runs) and runs[0][name] != runs[1][name]:
                raise UserError(f"The runs of {task}, seed {seed}, differ in {name}, so they cannot be compared.")
    return found


def around(found: Interval, cost: bool = False) -> str:
    """Return a difference of shares in points, or a ratio of costs, with its interval."""
    mean, low, high = (f"{math.exp(x):.2f}" if cost else f"{100 * x:+.1f}".replace("-", "−") for x in found)
    return f"{mean} [{low}, {high}]"


def difference(pair: Pair) -> Interval:
    """Return pass@1 of psigrad less that of TRL, with the interval over held-out prompts."""
    _, ours, theirs = ([count / tasks.DRAWS for count in one["counts"]] for one in pair)
    return paired_difference(theirs, ours)


def claim_rows(records: Sequence[Record], done: Sequence[Pair]) -> Iterator[str]:
    """Yield the table of claims."""
    yield "| claim | verdict | psigrad, or both | TRL 1.16 | figure | bound |\n|---|---|---|---|---|---|"
    report = find(records, kind="referee")
    state = MISSING if not report else "**does not hold**" if report["parts"] else "**holds**"
    rule = "two steps in float32, compared by [`psigrad referee`](referee.md) | all tensors equal"
    cell = "" if not report else report["report"][-1].strip() if report["parts"] else "all tensors are equal"
    yield f"| Both compute the same steps. | {state} | {cell} | | {rule} |"
    for says, name, base, bound in CLAIMS:
        score, cost = SCORES[name], name not in ("pass@1", "pass@8", "everyday items")
        state, cells = f"{MISSING} ({len(done)} of {PAIRS} pairs)", ["", ""]
        if len(done) == PAIRS:
            found = [over_seeds(score(pair[side]) - score(pair[base]) for pair in done) for side in (PSIGRAD, TRL)]
            state = "**holds**" if found[0].low > bound else "**does not hold**" if found[0].high < bound else "**undecided**"
            cells = [around(found[0], cost), around(found[1]) if base == BEFORE else ""]
        shares = f"change in {name}, in points" if base == BEFORE else f"psigrad's {name} minus TRL's, in points"
        meaning = f"TRL's {name} divided by psigrad's" if cost else shares
        least = 1 if cost else f"{100 * bound:.0f}".replace("-", "−")
        yield f"| {says} | {state} | {' | '.join(cells)} | {meaning} | {least} |"


def better_lines(done: Sequence[Pair]) -> Iterator[str]:
    """Yield a line for each score with the number of pairs in which TRL was better."""
    for name, score in SCORES.items():
        count = sum(score(pair[TRL]) > score(pair[PSIGRAD]) for pair in done)
        clear = sum(difference(pair).high < 0 for pair in done)
        note = f" (in {clear} of these the whole interval favours TRL)" if name == "pass@1" else ""
        yield f"- {name}: {count} of {len(done)} pairs{note}" if done else f"- {name}: {MISSING}"


def pair_rows(found: dict[tuple[str, int], Pair | None]) -> Iterator[str]:
    """Yield the table of pairs."""
    shown = "before, psigrad, TRL"
    columns = f"pass@8 in %: {shown} | everyday items in %: {shown}"
    yield f"| task, seed | pass@1 in %: {shown} | pass@1: psigrad − TRL, points | {columns} | TRL's time / psigrad's | \
peak MiB: psigrad, TRL |"
    yield "|---" * 7 + ("|" if found else f"|\n| | {MISSING} |" + " |" * 5)
    for (task, seed), pair in found.items():
        if pair is None:
            yield f"| {task}, {seed} | {MISSING} |" + " |" * 5
            continue
        shares = ["{:.1f}, {:.1f}, {:.1f}".format(*(100 * SCORES[name](one) for one in pair)) for name in list(SCORES)[:3]]
        ratio = f"{pair[TRL]['seconds'] / pair[PSIGRAD]['seconds']:.1f}"
        peaks = f"{pair[PSIGRAD]['peak_mb']:,}, {pair[TRL]['peak_mb']:,}"
        yield f"| {' | '.join([f'{task}, {seed}', shares[0], around(difference(pair)), *shares[1:], ratio, peaks])} |"


def text(records: Sequence[Record], page: str) -> str:
    """Return the page with the figures of these records."""
    found = pairs(records)
    done = [pair for pair in found.values() if pair]
    runs = [run for pair in done for run in pair[1:]]
    machines = " and ".join(sorted({f"{run['processor']} (threads: {run['threads']})" for run in runs}))
    machine = f"Processor: {machines or MISSING}."
    if runs:
        loads = [value for run in runs for value in run["load"]]
        machine += f" Load average: {min(loads)} to {max(loads)}."
    if len(done) == PAIRS:
        ratio = over_seeds(math.log(pair[TRL]["cpu_seconds"] / pair[PSIGRAD]["cpu_seconds"]) for pair in done)
        machine += f" TRL's processor time divided by psigrad's: {around(ratio, cost=True)}."
    parts = {
        "claims": claim_rows(records, done), "better": better_lines(done), "pairs": pair_rows(found),
        "state": [f"{len(done)} of {PAIRS} pairs are done."],
        "machine": [machine],
        "sizes": [
            f"A run takes {tasks.STEPS} steps. A step has {tasks.PROMPTS} prompts × {tasks.GROUP} completions of at most "
            f"{tasks.TOKENS} tokens. The learning rate is {tasks.RATE:g} and falls linearly to 0.",
            f"The held-out set has {tasks.HELD_OUT} prompts with {tasks.DRAWS} completions each. "
            f"The system prompt is “{tasks.SYSTEM}”",
        ],
    }  # fmt: skip
    return fill(page, **{name: "\n".join(part) for name, part in parts.items()})


def write(records: Sequence[Record]) -> None:
    """Write the figures. Plot each step's mean reward, smoothed over five steps, for each seed (thin) and the mean (bold)."""
    from matplotlib.figure import Figure

    PAGE.write_text(text(records, PAGE.read_text()))
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    names = [task for task, _ in chosen(records)] or [MISSING] * tasks.TASKS
    for axes, name in zip(figure.subplots(1, tasks.TASKS, sharey=True), names, strict=True):
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel("step", fontsize=8)
        for library, shown, colour in (("psigrad", "psigrad", "#0072b2"), ("trl", "TRL 1.16", "#d55e00")):
            runs = [
                one["rewards"] for one in records if one["kind"] == "run" and (one["task"], one["library"]) == (name, library)
            ]
            curves = [[fmean(rewards[max(0, n - 4) : n + 1]) for n in range(len(rewards))] for rewards in runs]
            for curve in curves:
                axes.plot(range(1, 1 + len(curve)), curve, color=colour, linewidth=0.8, alpha=0.35)
            mean = [fmean(values) for values in zip(*curves, strict=True)]
            axes.plot(range(1, 1 + len(mean)), mean, color=colour, linewidth=2, label=shown)
    first = figure.axes[0]
    first.set_ylabel("mean reward", fontsize=8)
    first.legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "docs" / "images" / "evidence.png", dpi=110)


if __name__ == "__main__":
    write(read())
