"""A run tells once of what its figures warn of: on stderr, as an event, in the report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_jobs import online_config
from tiny_rewards import constant

from psigrad.language.recipes import online
from psigrad.records.read import load
from psigrad.records.report.verdict import apply_rules
from psigrad.records.run_folder import RunFolder
from psigrad.runs.journal import Journal, WarningReporter


def events(folder, kind="warning"):
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_rewards_that_do_not_differ_are_told_once(job, tmp_path, capsys):
    config = online_config(job, tmp_path / "run", max_steps=8)
    done = online.run(replace(config, reward=(constant,), run=replace(config.run, report=True)))
    told = capsys.readouterr().err
    assert told.count("Rewards do not differ") == 1 and "psigrad: warning from step 1 on:" in told
    assert [e["rule"] for e in events(done.folder)].count("flat_reward") == 1
    assert "Rewards do not differ" in done.report.read_text()


def test_negative_control_a_sound_run_is_quiet(tmp_path, capsys):
    with RunFolder.open(tmp_path / "run", {"recipe": "sft"}) as folder:
        journal = Journal(folder, reporter=WarningReporter(folder))
        for step in range(1, 60):
            journal.metrics(step, {"reward": step / 60, "reward_std": 0.3, "frac_reward_zero_std": 0.1, "grad_norm": 1.0})
    assert capsys.readouterr().err == "" and events(tmp_path / "run") == []


@pytest.mark.parametrize("before", [3, 5])
def test_a_run_that_goes_on_is_told_of_nothing_twice(before, tmp_path, capsys):
    flat = {"reward": 1.0, "reward_std": 0.0}
    for steps in (range(1, before + 1), range(before + 1, 12)):
        with RunFolder.open(tmp_path / "run", {"recipe": "sft"}) as folder:
            journal = Journal(folder, reporter=WarningReporter(folder))
            for step in steps:
                journal.metrics(step, flat)
    assert len(events(tmp_path / "run")) == 1, "five rows in a row, some of them from before the stop"


@pytest.mark.parametrize("leaps", [3, 4])
def test_a_leap_of_the_gradient_is_told_when_it_comes_again_and_again(leaps, tmp_path, capsys):
    at = (30, 90, 150, 210)[:leaps]
    with RunFolder.open(tmp_path / "run", {"recipe": "sft"}) as folder:
        journal = Journal(folder, reporter=WarningReporter(folder))
        for step in range(1, 260):
            journal.metrics(step, {"reward": 0.5, "reward_std": 0.3, "grad_norm": 30.0 if step in at else 1.0})
    told = [(event["rule"], event["step"]) for event in events(tmp_path / "run")]
    assert told == ([("grad_norm", 210)] if leaps == 4 else []) and ("spike" in capsys.readouterr().err) == (leaps == 4)
    run = load(tmp_path / "run")
    assert [alert.rule for alert in apply_rules(run).alerts()] == ["grad_norm"] * leaps, "the report has every time"


@pytest.mark.parametrize("count", [0, 2])
def test_completions_are_printed_every_logging_steps_if_asked(count, job, tmp_path, capsys):
    config = online_config(job, tmp_path / "run", max_steps=3)
    done = online.run(replace(config, reward=(constant,), show_completions=count, run=replace(config.run, logging_steps=2)))
    lines = [line for line in capsys.readouterr().err.splitlines() if " → " in line and "reward" in line]
    assert [line.split()[2] for line in lines] == [step for step in ("1", "3") for _ in range(count)]
    texts = [
        " ".join(json.loads(line)["completion"].split()) for line in (done.folder / "rollouts.jsonl").read_text().splitlines()
    ]
    assert all(any(text[:120] in line for text in texts) for line in lines)
