"""Every entry of the speedrun keeps the rules, and gives the same bits twice."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from psigrad.errors import UserError
from psigrad.language.data.templates import CHATML
from psigrad.language.models import tiny
from psigrad.language.recipes import online
from psigrad.records.row_lines import read_steps

FOLDER = Path(__file__).parents[2] / "benchmarks" / "speedrun"
speedrun = SimpleNamespace(**runpy.run_path(str(FOLDER / "speedrun.py")))
ENTRIES = sorted((FOLDER / "entries").glob("*.yaml"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny model, and two rows of each task to train on and held out."""
    folder = tmp_path_factory.mktemp("speedrun")
    files = speedrun.prepare(folder, 2, 2)
    chats = [[json.loads(line)["prompt"] for line in file.read_text().splitlines()] for file in files]
    assert all([turn["role"] for turn in chat] == ["user", "assistant"] * 2 + ["user"] for chat in chats[0])
    asked = [{chat[-1]["content"] for chat in part} for part in chats]
    shown = {turn["content"] for chat in chats[0] for turn in chat[:-1]}
    assert len(asked[0]) == len(asked[1]) == 10 and not asked[0] & asked[1] and not shown & (asked[0] | asked[1])
    tokenizer = tiny.tokenizer([chat[-1]["content"] for chat in chats[0]], 280)
    tokenizer.chat_template = CHATML
    tiny.model("llama", len(tokenizer), hidden=32, layers=1, heads=2, max_length=2048).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder, files


def replayed(entry, small, output, seed=3, steps=2):
    """The figures of the steps and of an evaluation after them, times left out."""
    folder, files = small
    config = speedrun.settings(entry, files, str(folder / "model"), output, seed)
    config = replace(
        config,
        run=replace(config.run, max_steps=steps, threads=1),
        sampling=replace(config.sampling, max_completion_length=4),
        evaluation=replace(config.evaluation, eval_prompts=2, eval_steps=steps),
        prompts_per_step=4,
        num_generations=2,
    )
    made = online.run(config)
    rows = list(read_steps(made.folder / "metrics.jsonl"))
    for row in rows:
        for key in [key for key in row if "time" in key or "per_second" in key]:
            del row[key]
    rollouts = [json.loads(line) for line in (made.folder / "rollouts.jsonl").read_text().splitlines()]
    return rows, [(r["completion"], r.get("logp")) for r in rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.stem)
def test_an_entry_gives_the_same_bits_twice(entry, small, tmp_path):
    first = replayed(entry, small, tmp_path / "first")
    assert first == replayed(entry, small, tmp_path / "second") and len(first[1]) > 8
    assert first != replayed(entry, small, tmp_path / "other", seed=4), "negative control"


def test_an_evaluation_writes_the_figure_that_the_goal_is_set_for(small, tmp_path):
    rows, _ = replayed(ENTRIES[0], small, tmp_path, steps=1)
    assert [row["step"] for row in rows if speedrun.METRIC in row] == [0, 1]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.stem)
def test_an_entry_sets_nothing_that_the_rules_fix(entry, tmp_path):
    speedrun.settings(entry, (tmp_path, tmp_path), "model", tmp_path, 0)
    for wrong in ("data: {dataset: mine.jsonl}", "evaluation: {eval_steps: 1}", "model: {path: other}", "reward: [exact]"):
        (tmp_path / "wrong.yaml").write_text(f"algorithm: grpo\n{wrong}\n")
        with pytest.raises(UserError, match=r"wrong\.yaml sets \w+, which the rules fix"):
            speedrun.settings(tmp_path / "wrong.yaml", (tmp_path, tmp_path), "model", tmp_path, 0)


def test_time_is_that_of_training_until_the_goal_and_the_board_is_in_its_order(tmp_path):
    steps = [{"step": step, "step_time": 10.0, "time/sample": 1.0} for step in (1, 2, 3)]
    evaluations = [{"step": step, "step_time": 500.0} for step in (0, 2, 3)]
    (tmp_path / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*steps, *evaluations]))
    reached = [{"step": 0, speedrun.METRIC: 0.1}, {"step": 2, speedrun.METRIC: 0.5}, {"step": 3, speedrun.METRIC: 0.9}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in reached))
    assert speedrun.until_goal(tmp_path) == 20.0 and speedrun.until_goal(tmp_path, 0.95) is None
    measured = {"slow": [120.0] * 5, "lost": [1.0] * 4 + [None], "new": [1.0] * 4, "fast": [50.0, 60.0, 60.0, 60.0, 70.0]}
    lines = [{"entry": name, "machine": "m", "seconds": dict(enumerate(seconds))} for name, seconds in measured.items()]
    order = [row.split(" | ")[0] for row in speedrun.table(lines).splitlines()[2:]]
    assert order == ["| fast", "| slow", "| lost", "| new"]
    assert "missed on 1 of 5 seeds" in speedrun.table(lines) and "4 of 5 seeds are measured" in speedrun.table(lines)
    assert "| 1.0 [0.9, 1.1], 5 seeds |" in speedrun.table(lines), "Student: 60 ± 2.776 · 7.07 / √5 s"


def test_an_entry_goes_on_seed_by_seed(tmp_path, monkeypatch):
    """A stopped seed is trained on by the next command; one that stands in the results is not, wherever its run lies."""
    trained = []

    def train(config):
        trained.append(seed := config.run.seed)
        if seed == 2 and trained.count(2) == 1:
            raise KeyboardInterrupt
        folder = Path(config.run.output_dir)
        folder.mkdir(parents=True)
        (folder / "timings.jsonl").write_text(json.dumps({"step": 1, "step_time": 10.0 * (1 + seed), "time/sample": 1.0}) + "\n")
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, speedrun.METRIC: 0.4 - seed / 10}) + "\n")

    monkeypatch.setattr(online, "run", train)
    monkeypatch.setitem(speedrun.run.__globals__, "prepare", lambda folder: (folder / "a", folder / "b"))
    results = tmp_path / "results.jsonl"

    def seconds(seeds, folder="runs"):
        speedrun.run(ENTRIES[0], seeds, tmp_path / folder, results, "model")
        return [line["seconds"] for line in speedrun.read(results)]

    with pytest.raises(KeyboardInterrupt):
        seconds([0, 1, 2])
    assert trained == [0, 1, 2] and speedrun.read(results)[0]["seconds"] == {"0": 10.0, "1": 20.0}
    assert seconds([1, 2], "another disk") == [{"0": 10.0, "1": 20.0, "2": None}] and trained == [0, 1, 2, 2]


def test_training_stops_at_the_first_evaluation_at_the_goal():
    for mean, stops in ((0.24, False), (0.25, True)):
        control = SimpleNamespace(should_training_stop=False)
        speedrun.AtGoal().on_evaluate(None, None, control, {speedrun.METRIC: mean})
        assert control.should_training_stop is stops
