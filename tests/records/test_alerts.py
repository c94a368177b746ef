"""Every warning is raised by its example and names its entry; on a solved task it is not printed."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from run_folders import append, figures, make_run

from psigrad import cli
from psigrad.config import OnlineConfig, shortcuts
from psigrad.config.fields import settings_of
from psigrad.control.settings import ControlConfig
from psigrad.language.rewards.builtin import NAMES
from psigrad.objective.catalog import METHODS
from psigrad.objective.policy_gradient import PolicyGradient
from psigrad.records.read import load
from psigrad.records.report.verdict import verdict
from psigrad.records.warnings import BY_NAME, RULES, Watch, texts
from psigrad.runs.journal import WarningReporter

ROOT = Path(__file__).parents[2]
QUICK = ("flat_reward", "not_finite", "unscored")
SMALL = ("--threads", "1", "--no-progress", "--no-report", "--output-dir", "run")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    from tiny_jobs import make_job

    return make_job(tmp_path_factory.mktemp("job"))


def test_every_rule_has_its_entry_and_something_that_gives_it():
    runs = json.loads((ROOT / "docs/images/debugging/debugging.json").read_text())
    drawn = set().union(*(run["alerts"] for run in runs.values()))
    assert list(texts()) == [rule.name for rule in RULES] and not set(texts()) & set(METHODS)
    for name, entry in texts().items():
        assert set(entry) - {"example", "files"} == {"title", "says", "why", "do"} and all(
            map(str.strip, map(str, entry.values()))
        )
        assert "example" in entry or name in drawn or (name == "silent" and "kill -STOP" in entry["why"])


def unknown_names(advice: str) -> set[str]:
    """The names in backticks that are neither a setting, nor a shortcut of one, a method or a reward."""
    leaves = {name.rpartition(".")[2] for cls in (OnlineConfig, ControlConfig) for name in settings_of(cls)}
    known = {
        *leaves,
        *shortcuts.shortcuts_of(OnlineConfig),
        *METHODS,
        *NAMES,
        *(f"algorithm.{part.name}" for part in fields(PolicyGradient)),
    }
    return {name for name in re.findall(r"`([a-z_.]+)`", advice) if name not in known and not name.endswith((".txt", ".jsonl"))}


def test_what_an_entry_advises_exists():
    assert not {name: unknown for name, entry in texts().items() if (unknown := unknown_names(entry["do"]))}
    assert unknown_names("set `keep` or `learning_rat`, not `beta` or `dr_grpo`") == {"keep", "learning_rat"}, "negative control"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in texts() if "example" in texts()[n]]
)
def test_the_example_raises_the_alert_and_the_line_names_its_entry(name, job, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in job.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for file, text in texts()[name].get("files", {}).items():
        (tmp_path / file).write_text(text)
    words = shlex.split(texts()[name]["example"])
    assert cli.main([*words, *SMALL]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.endswith(f" More: psigrad explain {name}.")]
    assert len(said) == 1 and texts()[name]["title"] in said[0], said
    kinds = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["rule"] for event in kinds if event["kind"] == "warning"].count(name) == 1


def test_explain_prints_an_alert(capsys):
    assert cli.main(["explain", "dead_groups"]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("In more than 80 %")
        and "Do:  Use rows" in said
        and "A command that triggers this warning: psigrad grpo --model base" in said
    )
    assert said.endswith("same.py:\n  def same(completions, **columns):\n      return [0.5] * len(completions)\n")
    assert cli.main(["explain", "dead-groups"]) == 0 and capsys.readouterr().out == said
    assert cli.main(["explain", "longer"]) == 0
    assert "A command that triggers" not in capsys.readouterr().out


def test_negative_control_a_name_that_is_none_is_refused(capsys):
    assert cli.main(["explain", "dead_group"]) == 2


# ---- a task that is solved


def rows(first: float, last: float, held_out: bool = True):
    """A hundred rows whose score goes from first to last, and whose groups die and entropy goes in the second half."""
    found = []
    for step in range(101):
        score = first + (last - first) * min(1.0, step / 30)
        if held_out and step % 10 == 0:
            found.append(
                {"step": step, "eval/exact/mean": score, "eval/exact/low": score - 0.02, "eval/exact/high": score + 0.02}
            )
        late = {"entropy": 0.001, "frac_reward_zero_std": 0.95} if step > 50 else {}
        found.append(figures(step, reward=score) | late)
    return found


def told(folder, given, capsys):
    """The verdict's line of a run with these rows, and the rules that the terminal told of."""
    run = make_run(folder / "runs" / "one", 0, rollouts=0)
    append(run / "metrics.jsonl", *given)
    said = []

    class Folder:
        path = folder / "none"

        def event(self, kind, **more):
            said.append(more["rule"])

    announcer = WarningReporter(Folder())
    for row in given:
        announcer.update(row["step"], row)
    printed = capsys.readouterr().err
    assert printed.count("warning from step") == len(said)
    return str(verdict(load(run))), said


@pytest.mark.parametrize("held_out", [True, False])
def test_a_run_that_solved_its_task_ends_without_warnings(held_out, tmp_path, capsys):
    line, said = told(tmp_path, rows(0.3, 0.97, held_out), capsys)
    assert line.endswith("no warnings; the task is solved, which explains: Dead groups, Entropy collapsed") and said == []


@pytest.mark.parametrize(
    ("first", "last", "why"), [(0.3, 0.6, "it is not solved"), (0.95, 0.97, "it was from the start, so its rows are too easy")]
)
def test_negative_control_else_the_same_figures_are_two_warnings(first, last, why, tmp_path, capsys):
    line, said = told(tmp_path, rows(first, last), capsys)
    assert line.endswith("2 warnings: Dead groups, Entropy collapsed"), why
    assert sorted(said) == ["dead_groups", "entropy"]


def test_what_a_solved_task_does_not_explain_is_still_told(tmp_path, capsys):
    line, said = told(tmp_path, [{**row, "completions/clipped_ratio": 0.9} for row in rows(0.3, 0.97)], capsys)
    assert line.endswith("1 warning: Cut completions; the task is solved, which explains: Dead groups, Entropy collapsed")
    assert said == ["truncated"]


def test_a_run_that_falls_back_from_its_solution_is_told_then(tmp_path, capsys):
    falls = [row | {"reward": 0.5} for row in rows(0.3, 0.97, held_out=False)[80:]]
    line, said = told(tmp_path, [*rows(0.3, 0.97, held_out=False)[:80], *falls], capsys)
    assert line.endswith("2 warnings: Dead groups, Entropy collapsed") and sorted(said) == ["dead_groups", "entropy"]


def test_rewards_above_one_are_no_score():
    watch = Watch()
    for step, reward in enumerate([0.1, 0.95, 0.99, 2.0]):
        watch.update(step, {"reward": reward})
    assert watch.score is None
    for step, reward in enumerate([0.9, 0.95, 1.0]):
        watch.update(step, {"reward": reward})
    assert watch.score == pytest.approx(0.95) and not watch.explains("truncated")


def test_a_step_that_was_skipped_is_no_number():
    """Its gradient was not finite: nothing was stepped, and no norm is written."""
    watch = Watch()
    watch.update(1, {"loss": 2.0, "updates": 1.0, "grad_norm": 1.0})
    watch.update(2, {"loss": 2.0, "updates": 0.0})
    (alert,) = watch.alerts()
    assert (alert.rule, alert.step, alert.ended) == ("not_finite", 2, None)
    watch.update(3, {"loss": 2.0, "updates": 1.0, "grad_norm": 1.0})
    assert [alert.ended for alert in watch.alerts()] == [3]
    idle = Watch()
    idle.update(1, {"updates": 0.0})  # no pair of the step differed, so there was no loss
    assert idle.alerts() == []


@pytest.mark.parametrize(("noise", "most"), [("normal", 0.0), ("t", 0.06)])
def test_noise_of_the_gradients_norm_is_rarely_reported(noise, most):
    """Of 100 runs of 300 rows whose logarithms are normal, or have the tails of Student's t of three degrees of freedom."""
    told = 0
    for seed in range(100):
        drawn = np.random.default_rng(seed)
        watch = Watch()
        for step, value in enumerate(0.4 * (drawn.normal(size=300) if noise == "normal" else drawn.standard_t(3, size=300))):
            watch.update(step, {"grad_norm": math.exp(value)})
        told += len(watch.alerts()) >= BY_NAME["grad_norm"].min_count
    assert told <= 100 * most
    leaps = Watch()
    for step in range(300):
        leaps.update(step, {"grad_norm": 30.0 if step in (60, 130, 200, 270) else 1.0})
    assert len(leaps.alerts()) == 4, "negative control: four leaps are reported"
