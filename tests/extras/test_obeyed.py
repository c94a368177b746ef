"""What a command beside the core takes, it obeys: every one of its settings is read by what acts on it."""

from __future__ import annotations

import pytest
from read_settings import NOT_OBEYED, watching
from speed import measured_once  # noqa: F401 (a fixture)

from psigrad import cli
from psigrad.config.fields import settings_of
from psigrad_extras.grid import GridSettings
from psigrad_extras.preflight.settings import PlanConfig
from studies.settings import BiasSettings

BESIDES = tuple(part for part in NOT_OBEYED if "preflight" not in part)


def unread(cls, *commands: list[str]) -> set[str]:
    with watching(cls, BESIDES) as read:
        assert [cli.main(words) for words in commands] == [0] * len(commands)
    return set(settings_of(cls)) - read


@pytest.mark.usefixtures("measured_once")
def test_every_setting_of_a_plan_is_read(job):
    plan = ["plan", "grpo", "--model", str(job / "base"), "--dataset", str(job / "train.jsonl"), "--eval-prompts", "4",
            "--reward", "exact", "--memory", "24GB", "--tflops", "1", "--max-completion-length", "4"]  # fmt: skip
    more = ["--devices", "2", "--prompt-length", "3"]
    assert unread(PlanConfig, [*plan, "--json"], [*plan, *more]) == set()
    assert unread(PlanConfig, plan) != set(), "negative control"


def test_every_setting_of_a_grid_is_read():
    assert unread(GridSettings, ["grid"]) == set()


@pytest.mark.long
def test_every_setting_of_an_experiment_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert unread(BiasSettings, ["experiment", "bias", "--seeds", "2", "--episodes", "400"]) == set()
