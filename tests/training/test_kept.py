"""Training on what sampling kept, through a whole run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from in_memory import make
from safetensors.torch import load_file
from tiny_jobs import episodes_config, online_config

from psigrad.models import tiny
from psigrad.models.kept import Kept
from psigrad.recipes import online
from psigrad.training import loop


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture
def found(monkeypatch):
    """Whether each forward pass with gradient found its activations."""
    seen, find = [], Kept.find

    def watched(self, *given):
        known = find(self, *given)
        seen.append(known is not None)
        return known

    monkeypatch.setattr(Kept, "find", watched)
    return seen


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_run_learns_the_same_with_and_without(job, tmp_path, found, minibatches):
    config = online_config(job, tmp_path / "kept", max_steps=3)
    online.run(replace(config, num_minibatches=minibatches))
    assert any(found)
    assert all(found) == (minibatches == 1), "behind the first optimiser step nothing may be reused"
    count = len(found)
    plain = online_config(job, tmp_path / "plain", max_steps=3)
    online.run(replace(plain, num_minibatches=minibatches, keep_activations_gb=0.0))
    assert len(found) == count
    kept, other, before = weights(tmp_path / "kept"), weights(tmp_path / "plain"), load_file(job / "base" / "model.safetensors")
    moved = sum(float((other[name] - before[name]).norm() ** 2) for name in other) ** 0.5
    apart = sum(float((other[name] - kept[name]).norm() ** 2) for name in other) ** 0.5
    assert moved > 0.1 and apart < 1e-3 * moved


def test_every_now_and_then_all_is_computed_again(job, tmp_path, found, monkeypatch):
    monkeypatch.setattr(loop, "CHECK_EVERY", 2)
    online.run(replace(online_config(job, tmp_path / "run", max_steps=4), num_minibatches=1, micro_batch_tokens=4096))
    assert found == [True, True], "steps 1 and 3 of 0 to 3"


def test_episodes_of_several_turns_keep_nothing(job, tmp_path, found):
    online.run(episodes_config(job, tmp_path / "run", max_steps=2))
    assert found == []


def test_who_recomputes_activations_keeps_none():
    run = make(tiny.tokenizer(["say a: b"], 270))
    recomputing = replace(run, config=replace(run.config, model=replace(run.config.model, gradient_checkpointing=True)))
    for job, keeps in ((run, True), (recomputing, False)):
        with loop._keeping(job, 1):
            assert (job.model.kept is not None) == keeps
