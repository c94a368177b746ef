"""The speedrun: SmolLM2-135M-Instruct learns five tasks of reasoning-gym on two cores; README.md has the rules and the board.

python benchmarks/speedrun/speedrun.py run ENTRY [--seeds 0 1 2 3 4]   trains, or goes on; a line of results.jsonl
python benchmarks/speedrun/speedrun.py board                            writes the board into README.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psigrad.compat.foreign_names import load
from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.intervals import mean_interval
from psigrad.language.data import tasks
from psigrad.language.recipes import online
from psigrad.records.row_lines import read_steps
from psigrad.runs.callbacks import Callback, Control
from psigrad.runs.machine import provenance
from psigrad_extras import sums

HERE = Path(__file__).parent
RESULTS, BOARD = HERE / "results.jsonl", HERE / "README.md"
TASKS: dict[str, dict[str, Any]] = {
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 40},
    "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 25},
    "letter_counting": {"min_words": 3, "max_words": 5},
    "word_sorting": {"min_words": 3, "max_words": 3, "min_word_length": 3, "max_word_length": 5},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
}
SHOTS = 2  # worked examples before each question: without them SmolLM2 answers in prose, and one in a hundred is right
TRAINED, HELD_OUT = 400, 40  # rows of each task
METRIC, GOAL = "eval/reasoning_gym/mean", 0.25  # over all held-out prompts; it begins at 0.12
EVERY = 10  # steps from one evaluation to the next
SEEDS = 5  # at least
FIXED = ("model", "data", "evaluation", "reward", "placement")
"""Settings that are the board's, and no entry's."""


def prepare(folder: Path, trained: int = TRAINED, held_out: int = HELD_OUT) -> tuple[Path, Path]:
    """Rows to train on and held out, the tasks in turn; no prompt is in both."""
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        rows = [asked(tasks.distinct(name, SHOTS + trained + held_out, seed=1, **own)) for name, own in TASKS.items()]
        for file, part in zip(files, (slice(held_out, None), slice(held_out)), strict=True):
            turns = [row for turn in zip(*(own[part] for own in rows), strict=True) for row in turn]
            file.write_text("".join(json.dumps(row) + "\n" for row in turns))
    return files


def asked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows behind the first `SHOTS`, each asked in a chat that begins with these and their answers."""
    turns = [
        {"role": role, "content": row[column]}
        for row in rows[:SHOTS]
        for role, column in (("user", "prompt"), ("assistant", "answer"))
    ]
    return [{**row, "prompt": [*turns, {"role": "user", "content": row["prompt"]}]} for row in rows[SHOTS:]]


def settings(entry: Path, files: tuple[Path, Path], model: str, output: Path, seed: int) -> OnlineConfig:
    """The entry's settings with the board's. Raises `UserError` for a setting that is none of the entry's."""
    asked, plain = load(OnlineConfig, entry), OnlineConfig(algorithm=load(OnlineConfig, entry).algorithm)
    for name in FIXED:
        mine, free = getattr(asked, name), getattr(plain, name)
        if name == "model":  # an adapter, and the precision, are an entry's choice
            free = replace(free, dtype=mine.dtype, lora_rank=mine.lora_rank, lora_alpha=mine.lora_alpha)
        if mine != free:
            raise UserError(f"{entry.name} sets {name}, which the rules fix; remove it.")
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
        control.should_training_stop = control.should_training_stop or metrics.get(METRIC, 0.0) >= GOAL


def until_goal(folder: Path, goal: float = GOAL) -> float | None:
    """Seconds of training, without evaluations, before the first evaluation at the goal; None where none was."""
    times = {row["step"]: row["step_time"] for row in read_steps(folder / "timings.jsonl") if "time/sample" in row}
    for row in read_steps(folder / "metrics.jsonl"):
        if row.get(METRIC, 0.0) >= goal:
            return float(sum(seconds for step, seconds in times.items() if step <= row["step"]))
    return None


def run(entry: Path, seeds: Sequence[int], folder: Path, results: Path = RESULTS, model: str = "") -> None:
    """Train the entry with each of the seeds, and write the seconds until the goal into its line, null where it was not reached.

    A seed that was stopped goes on from its checkpoint. One that stands in the line is not trained again, on whatever day it was.
    """
    mine = {"entry": entry.name, "machine": provenance("cpu")["processor"]}
    lines = read(results)
    line = next((one for one in lines if mine.items() <= one.items()), {**mine, "seconds": {}})
    model, files = model or str(sums.smollm2(folder / "model")), prepare(folder / "data")
    for seed in (seed for seed in seeds if str(seed) not in line["seconds"]):
        output = folder / entry.stem / str(seed)
        online.run(settings(entry, files, model, output, seed))
        line["seconds"][str(seed)] = until_goal(output)
        kept = [one for one in lines if not mine.items() <= one.items()]
        results.write_text("".join(json.dumps(one) + "\n" for one in [*kept, line]))


def read(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The lines that were measured."""
    return [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The board: entries by their mean, and unranked below them what missed the goal once or lacks seeds."""
    rows = []
    for line in lines:
        seconds, of, place = (
            [value for value in line["seconds"].values() if value is not None],
            len(line["seconds"]),
            float("inf"),
        )
        if len(seconds) < of:
            time = f"missed on {of - len(seconds)} of {of} seeds"
        elif of < SEEDS:
            time = f"{of} of {SEEDS} seeds are measured"
        else:
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
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(SEEDS)))
    parser.add_argument("--folder", type=Path, default=Path("runs/speedrun"))
    given = parser.parse_args()
    if given.what == "run":
        run(given.entry, given.seeds, given.folder)
    before, rest = BOARD.read_text().split("<!-- board -->\n")[0], BOARD.read_text().split("<!-- end -->")[1]
    BOARD.write_text(f"{before}<!-- board -->\n{table(read())}\n<!-- end -->{rest}")


if __name__ == "__main__":
    main()
