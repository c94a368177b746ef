"""SIGTERM in every phase of a step: the run saves, leaves with 143, and goes on to the same end."""

from __future__ import annotations

import os
import signal
from functools import cache

import pytest
from cases import slow
from resuming import RECIPES, digest, events_of, run_to_end
from tiny_jobs import forked

from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes.evaluator import Evaluator
from psigrad.language.rewards.reward_pool import PoolScoring
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.optim import Optimizer
from psigrad.records import checkpoint
from psigrad.runs.survival import Stopped

PHASES = {
    "start": (LanguageModel, "trainable", 1),
    "rollout": (EmbeddedSampler, "steps", 4),
    "reward": (PoolScoring, "results", 3),
    "update": (Optimizer, "apply", 3),
    "evaluation": (Evaluator, "__call__", 2),
    "first evaluation": (Evaluator, "__call__", 1),
    "save": (checkpoint, "save", 1),
}


CASES = [
    *(("grpo", phase, signal.SIGTERM) for phase in ("start", "rollout", "update", "save")),
    *(pytest.param("grpo", phase, signal.SIGTERM, marks=pytest.mark.slow) for phase in ("reward", "first evaluation")),
    *slow(("grpo", "evaluation", signal.SIGTERM), ("grpo", "update", signal.SIGHUP)),
    ("sft", "evaluation", signal.SIGTERM),
]


@pytest.fixture(scope="module")
def undisturbed(job, tmp_path_factory):
    """The digests of runs that nobody stopped."""

    @cache
    def of(recipe):
        folder = tmp_path_factory.mktemp("whole") / "run"
        assert run_to_end(*RECIPES[recipe], job, folder) == 0
        return digest(folder)

    return of


@pytest.mark.parametrize(("recipe", "phase", "number"), CASES)
def test_a_signal_is_served_in_every_phase(recipe, phase, number, undisturbed, job, tmp_path):
    run, config = RECIPES[recipe]
    owner, name, count = PHASES[phase]

    def asked_to_stop():
        original, calls = getattr(owner, name), [0]

        def wrapped(*args, **kwargs):
            calls[0] += 1
            if calls[0] == count:
                os.kill(os.getpid(), number)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)
        try:
            run(config(job, tmp_path / "run"))
        except Stopped as stopped:
            os._exit(stopped.exit_status)

    status = forked(asked_to_stop)
    assert os.waitstatus_to_exitcode(status) == 128 + number
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").path is not None or phase == "start"
    assert events_of(tmp_path / "run")[-1] == "stopped"
    assert run_to_end(run, config, job, tmp_path / "run") == 0
    assert digest(tmp_path / "run") == undisturbed(recipe)
