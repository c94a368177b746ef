"""Training on what sampling kept, through a whole run."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tiny_jobs import episodes_config, misreport, online_config

from psigrad.errors import UserError
from psigrad.language.models import free_memory
from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.recipes import online
from psigrad.language.training.online.annotators import old_log_probs
from psigrad.processes.parallel.world import ALONE
from psigrad.records.read import load
from psigrad.records.report.facts import facts
from psigrad.runs import session


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture
def found(monkeypatch):
    """Whether each forward pass with gradient found its activations."""
    seen, find = [], ActivationCache.find

    def watched(self, *given):
        known = find(self, *given)
        seen.append(known is not None)
        return known

    monkeypatch.setattr(ActivationCache, "find", watched)
    return seen


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_run_learns_the_same_with_and_without(job, tmp_path, found, minibatches):
    # not seed 0, whose first minibatch has no signal: Adam's first steps make much of the rounding of a KL of 0
    config = online_config(job, tmp_path / "kept", max_steps=3, seed=1)
    online.run(replace(config, num_minibatches=minibatches))
    assert any(found)
    assert all(found) == (minibatches == 1), "behind the first optimiser step nothing may be reused"
    count = len(found)
    plain = online_config(job, tmp_path / "plain", max_steps=3, seed=1)
    online.run(replace(plain, num_minibatches=minibatches, keep_activations_gb=0.0))
    assert len(found) == count
    kept, other, before = weights(tmp_path / "kept"), weights(tmp_path / "plain"), load_file(job / "base" / "model.safetensors")
    moved = sum(float((other[name] - before[name]).norm() ** 2) for name in other) ** 0.5
    apart = sum(float((other[name] - kept[name]).norm() ** 2) for name in other) ** 0.5
    assert moved > 0.1 and apart < 1e-3 * moved


@pytest.mark.needs("compiler")
def test_the_share_of_activations_is_chosen_once_and_stays_when_a_run_resumes(job, tmp_path, monkeypatch):
    def run(folder, free, steps, **given):
        monkeypatch.setattr(free_memory, "available_memory", lambda: free)
        config = online_config(job, tmp_path / folder, max_steps=steps, save_steps=1, extend=True)
        online.run(replace(config, num_minibatches=1, **given))
        (saved,) = (tmp_path / folder / "checkpoints").glob(f"step-*{steps}")
        settings = [json.loads((tmp_path / folder / "config.json").read_text())]
        settings.append(json.loads((saved / "manifest.json").read_text())["settings"])
        return {one["keep_activations_gb"] for one in settings}

    assert run("chosen", 8 * 10**9, 1) == {1.9}, "its own weights take a little"
    assert run("chosen", 80 * 10**9, 3) == {1.9}
    assert run("given", 80 * 10**9, 3, keep_activations_gb=1.9) == {1.9}
    assert "keep_activations_gb" not in (tmp_path / "chosen" / "events.jsonl").read_text()
    assert run("other", 80 * 10**9, 1) == {19.9}
    ours, others = weights(tmp_path / "chosen"), weights(tmp_path / "given")
    assert all(torch.equal(ours[name], others[name]) for name in ours)


@pytest.mark.parametrize("mine", [1.9, 2.0], ids=["as rank 0 measured", "a little more"])
def test_a_process_takes_the_number_of_rank_0_whatever_it_measured_itself(job, tmp_path, monkeypatch, mine):
    """Memory changes between two measurements; the same settings on all processes are checked after the model was loaded."""

    class Rank0(type(ALONE)):
        def broadcast(self, value):
            return 1.9 if isinstance(value, float) else value

    used = []

    def stop(config, *given):
        used.append(config.keep_activations_gb)
        raise UserError("enough")

    monkeypatch.setattr(online, "open_job", stop)
    monkeypatch.setattr(session, "join_world", lambda **given: nullcontext(Rank0()))
    monkeypatch.setattr(free_memory, "available_memory", lambda: int(mine * 4e9) + (1 << 27))
    with pytest.raises(UserError, match="enough"):
        online.run(online_config(job, tmp_path / "run"))
    assert used == [1.9]


@pytest.mark.needs("compiler")
def test_where_more_is_computed_than_kept_a_run_tells_once_what_would_keep_it(job, tmp_path, found, capsys):
    config = replace(online_config(job, tmp_path / "little", max_steps=3), num_minibatches=1)
    online.run(replace(config, keep_activations_gb=1e-5))
    events = list(map(json.loads, (tmp_path / "little" / "events.jsonl").read_text().splitlines()))
    why = [event["why"] for event in events if event["kind"] == "forward_again"]
    assert len(why) == 1 and capsys.readouterr().err.count(why[0]) == 1 and not any(found)
    assert "keep_activations_gb is 1e-05. --keep-activations-gb 0.1 keeps them." in why[0]
    assert dict(facts(load(tmp_path / "little")))["Slower"].endswith(why[0])
    rows = map(json.loads, (tmp_path / "little" / "rollouts.jsonl").read_text().splitlines())
    written = sum(len(row["completion_ids"]) for row in rows if row["step"] == 1)
    tokens = int(re.search(r"activations of (\d+) tokens take", why[0])[1])
    assert 0 < tokens - written <= 4 * 12, "the four prompts, each once"
    found.clear()
    online.run(replace(config, run=replace(config.run, output_dir=str(tmp_path / "enough")), keep_activations_gb=0.1))
    assert found and all(found)
    assert "forward_again" not in (tmp_path / "enough" / "events.jsonl").read_text()


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("minibatches", [1, 2])
def test_some_completions_run_forward_again_now_and_then_others_each_time(job, tmp_path, monkeypatch, minibatches):
    monkeypatch.setattr(old_log_probs, "COMPARED", 4)
    monkeypatch.setattr(old_log_probs, "COMPARE_EVERY", 2)
    seen, log_probs = [], old_log_probs.compute_log_probs

    def watched(model, batch, *rest, cache=None, row_mask=None, world=ALONE):
        again = log_probs(model, batch, *rest, cache=cache, row_mask=row_mask, world=world)
        if row_mask is not None:
            assert cache is None, "else they would be the sampler's own"
            seen.extend(row_mask.nonzero()[:, 0].tolist())
        return again

    monkeypatch.setattr(old_log_probs, "compute_log_probs", watched)
    online.run(replace(online_config(job, tmp_path / "run", max_steps=8), num_minibatches=minibatches))
    assert sorted(seen) == list(range(16)), "a quarter of the completions each time, all of them in four times"
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = {row["step"]: row.get("sampling/sampling_logp_difference/max") for row in written if "loss" in row}
    assert [step for step, gap in gaps.items() if gap is not None] == [1, 3, 5, 7]
    gaps = [gap for gap in gaps.values() if gap is not None]
    # 0 where sampler and trainer agree to the last bit; that they are compared at all the next test shows
    assert max(gaps) < 1e-5


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("step", [1, 5])
def test_a_sampler_that_says_other_log_probs_stops_the_run_at_once(job, tmp_path, monkeypatch, found, step):
    misreport(monkeypatch, 0.01, after=step)  # the first call is an evaluation's
    with pytest.raises(UserError, match=f"At step {step} the log-probs of sampler and trainer differ by 0.01"):
        online.run(replace(online_config(job, tmp_path / "run", max_steps=5), num_minibatches=1))
    assert found, "it was the kept activations that were trained on"


def test_episodes_of_several_turns_keep_nothing(job, tmp_path, found):
    online.run(episodes_config(job, tmp_path / "run", max_steps=2))
    assert found == []
