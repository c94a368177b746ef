"""The speedrun: SmolLM2-135M-Instruct learns five tasks of reasoning-gym on two cores; README.md has the rules and the board.

python benchmarks/speedrun/speedrun.py run ENTRY [--seeds 0 1 2 3 4]   trains, or goes on; a line of results.jsonl
python benchmarks/speedrun/speedrun.py board                            writes the board into README.md
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psigrad.config import OnlineConfig
from psigrad.config.load import load
from psigrad.errors import UserError
from psigrad.intervals import mean_interval
from psigrad.language.data import tasks
from psigrad.language.recipes import online
from psigrad.records.row_lines import read_steps
from psigrad.runs.callbacks import Callback, Control
from psigrad_extras import sums

HERE = Path(__file__).parent
RESULTS, BOARD = HERE / "results.jsonl", HERE / "README.md"
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "gcd": {"max_numbers": 2, "max_value": 60},
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    "number_sorting": {"min_numbers": 3, "max_numbers": 3, "max_value": 99, "min_value": 0, "max_decimals": 0},
    "letter_counting": {"min_words": 3, "max_words": 5},
}
TRAINED, HELD_OUT = 400, 40  # rows of each task
GOAL = 0.5  # mean held-out score over all tasks
EVERY = 10  # steps from one evaluation to the next
FIXED = ("model", "data", "evaluation", "reward", "placement")
"""Settings that are the board's, and no entry's."""


def prepare(folder: Path, trained: int = TRAINED, held_out: int = HELD_OUT) -> tuple[Path, Path]:
    """Rows to train on and held out, the tasks in turn; no prompt is in both."""
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        rows = [tasks.distinct(name, trained + held_out, seed=1, **settings) for name, settings in TASKS.items()]
        for file, part in zip(files, (slice(held_out, None), slice(held_out)), strict=True):
            turns = [row for turn in zip(*(own[part] for own in rows), strict=True) for row in turn]
            file.write_text("".join(json.dumps(row) + "\n" for row in turns))
    return files


def settings(entry: Path, files: tuple[Path, Path], model: str, output: Path, seed: int) -> OnlineConfig:
    """The entry's settings with the board's. Raises `UserError` for a setting that is none of the entry's."""
    asked, plain = load(OnlineConfig, entry), OnlineConfig(algorithm=load(OnlineConfig, entry).algorithm)
    for name in FIXED:
        mine, free = getattr(asked, name), getattr(plain, name)
        if name == "model":  # an adapter, and the precision, are an entry's choice
            free = replace(free, dtype=mine.dtype, lora_rank=mine.lora_rank, lora_alpha=mine.lora_alpha)
        if mine != free:
            raise UserError(f"{entry.name} sets {name}, which the rules fix; leave it out.")
    data = replace(asked.data, dataset=str(files[0]), eval_dataset=str(files[1]))
    evaluation = replace(asked.evaluation, eval_steps=EVERY, eval_prompts=HELD_OUT * len(TASKS))
    run = replace(
        asked.run,
        output_dir=str(output),
        seed=seed,
        threads=2,
        progress=False,
        report=False,
        callbacks=(*asked.run.callbacks, AtGoal),
    )
    own = replace(asked.model, path=model)
    return replace(asked, model=own, data=data, evaluation=evaluation, run=run, reward=("reasoning_gym",))


class AtGoal(Callback):
    """Ends a run at its first evaluation at the goal: the rest would be for nothing."""

    def on_evaluate(self, args: Any, state: Any, control: Control, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Look at the figure."""
        control.should_training_stop = control.should_training_stop or metrics.get("eval/reward/mean", 0.0) >= GOAL


def until_goal(folder: Path, goal: float = GOAL) -> float | None:
    """Seconds of training, without evaluations, before the first evaluation at the goal; None where none was."""
    times = {row["step"]: row["step_time"] for row in read_steps(folder / "timings.jsonl") if "time/sample" in row}
    for row in read_steps(folder / "metrics.jsonl"):
        if row.get("eval/reward/mean", 0.0) >= goal:
            return float(sum(seconds for step, seconds in times.items() if step <= row["step"]))
    return None


def run(entry: Path, seeds: Sequence[int], folder: Path, model: str = "") -> Iterator[dict[str, Any]]:
    """The line of an entry after each of the seeds: the seconds of every seed that is done, None where the goal was not reached.

    A seed that was stopped goes on from its checkpoint, and one that is done is not trained again.
    """
    model, files = model or str(sums.smollm2(folder / "model")), prepare(folder / "data")
    for seed in seeds:
        online.run(settings(entry, files, model, folder / entry.stem / str(seed), seed))
        ended = sorted((folder / entry.stem).glob("*/model"), key=lambda place: int(place.parent.name))
        found = {place.parent.name: until_goal(place.parent) for place in ended}
        machine = f"{platform.machine()} {platform.processor()}".strip()
        yield {"entry": entry.name, "machine": machine, "seconds": list(found.values())}


def note(line: dict[str, Any], results: Path = RESULTS) -> None:
    """Put the line into the results, in place of the entry's line from this machine."""
    lines = [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []
    kept = [other for other in lines if (other["entry"], other["machine"]) != (line["entry"], line["machine"])]
    results.write_text("".join(json.dumps(one) + "\n" for one in [*kept, line]))


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The board: an entry that missed the goal once is unranked, the others by their mean."""
    rows = []
    for line in lines:
        seconds, place = [value for value in line["seconds"] if value is not None], float("inf")
        missed, of = len(line["seconds"]) - len(seconds), len(line["seconds"])
        time = f"missed on {missed} of {of} seeds"
        if not missed:
            place, (low, high) = sum(seconds) / of, mean_interval(seconds)
            time = f"{place / 60:.1f} [{low / 60:.1f}, {high / 60:.1f}], {of} seeds"
        rows.append((place, f"| {line['entry']} | {time} | {line['machine']} |"))
    head = ["| entry | minutes to the goal, 95 % interval | machine |", "|---|---|---|"]
    return "\n".join(head + [text for _, text in sorted(rows)]) if rows else "No entry has been measured yet."


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["run", "board"])
    parser.add_argument("entry", nargs="?", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--folder", type=Path, default=Path("runs/speedrun"))
    given = parser.parse_args()
    if given.what == "run":
        for line in run(given.entry, given.seeds, given.folder):
            note(line)
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    before, rest = BOARD.read_text().split("<!-- board -->\n")[0], BOARD.read_text().split("<!-- end -->")[1]
    BOARD.write_text(f"{before}<!-- board -->\n{table(lines)}\n<!-- end -->{rest}")


if __name__ == "__main__":
    main()
