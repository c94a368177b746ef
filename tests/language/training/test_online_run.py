"""A lag between sampling and training: whose weights a step's completions come from, what corrects for them, that it learns."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from in_memory import advance, log_of, make, with_sampler
from tiny_jobs import make_job, online_config

from psigrad.errors import UserError
from psigrad.language.recipes import online
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Collected, Sampler, SamplingParams, State
from psigrad.language.training.online import online_rl
from psigrad.objective.parts.ratio import truncated_importance
from psigrad.processes.parallel.world import ALONE


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return make_job(tmp_path_factory.mktemp("job"))


def begins_with_a_letter(completions, **columns):
    """The optimum is 1; a random byte-level model gets about 0.1."""
    return [float(text[:1].isascii() and text[:1].islower()) for text in completions]


def corrected(run):
    return replace(run, algorithm=replace(run.algorithm, correction=truncated_importance()))


def versions(run, steps: int) -> list[set[int]]:
    """Those of the completions that each step trains on."""
    state, found = State(algorithm=run.algorithm.initial_state()), []
    for _ in range(steps):
        before = len(log_of(run).lines)
        state = advance(run, state)
        found.append({line["version"] for line in log_of(run).lines[before:]})
    return found


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_step_trains_on_the_weights_of_lag_steps_ago(tokenizer, lag):
    run = corrected(make(tokenizer, lag=lag, steps=6))
    assert versions(run, 6) == [{max(0, step - lag)} for step in range(6)]
    ages = [row.get("sampling/staleness") for row in log_of(run).rows]
    assert ages == ([None] * 6 if lag == 0 else [float(min(step, lag)) for step in range(6)])


class Beside(Sampler):
    """An engine on another device, with one version of the weights: a copy that `snapshot` renews."""

    overlaps = True

    def __init__(self, model):
        self.model, self.twin = model, model.frozen_copy()
        self.dotted_name, self.training, self.beside = EmbeddedSampler(self.twin), False, []

    def snapshot(self):
        pairs = zip(self.twin.network.parameters(), self.model.network.parameters(), strict=True)
        with torch.no_grad():
            for own, new in pairs:
                own.copy_(new)
        return self

    def steps(self, requests, params, cache=None):
        time.sleep(0.05)
        self.beside.append(self.training)
        time.sleep(0.3)  # the step ends before it does
        yield from self.dotted_name.steps(requests, params)


@pytest.mark.parametrize("waits", [True, False])
def test_an_engine_on_another_device_samples_while_the_run_trains_on_what_it_wrote_before(tokenizer, waits, monkeypatch):
    """With a lag of 1 the rows are those of a run that samples between its steps. Weights that come too early are seen."""
    alone = corrected(make(tokenizer, lag=1, steps=5))
    assert versions(alone, 5) == [{max(0, step - 1)} for step in range(5)]
    run = corrected(make(tokenizer, lag=1, steps=5))
    run, sampler = with_sampler(run, beside := Beside(run.model)), beside
    learn = online_rl.learn

    def watched(*given):
        sampler.training = True
        time.sleep(0.2)
        try:
            return learn(*given)
        finally:
            sampler.training = False

    monkeypatch.setattr(online_rl, "learn", watched)
    if not waits:
        monkeypatch.setattr(Beside, "central", True)
    with online.executor_of(run.config, Beside if waits else sampler, ALONE) as threads:
        assert threads is not None
        run = replace(run, executor=threads)
        try:
            versions(run, 5)
        except UserError:
            assert not waits
    rows = [[line["completion"] for line in log_of(one).lines] for one in (alone, run)]
    assert (rows[0] == rows[1]) is waits and (not waits or sampler.beside == [False, True, True, True, True])


def test_completions_are_drawn_by_the_weights_that_their_version_names(tokenizer):
    """Sampled with a lag of one, step 2's completions are those that the untouched model writes for the same places."""
    run = corrected(make(tokenizer, lag=1, steps=3))
    fresh = corrected(make(tokenizer, lag=0, steps=3))
    frozen = replace(fresh, config=replace(fresh.config, optim=replace(fresh.config.optim, learning_rate=0.0)))
    versions(run, 2)
    versions(frozen, 2)
    second = [[line["completion"] for line in log_of(r).lines if line["step"] == 2] for r in (run, frozen)]
    assert second[0] == second[1]
    learnt = corrected(make(tokenizer, lag=0, steps=3))
    versions(learnt, 2)
    moved = [line["completion"] for line in log_of(learnt).lines if line["step"] == 2]
    assert moved != second[0], "negative control: without a lag the second step is sampled from other weights"


def test_completions_of_another_version_stop_the_run(tokenizer):
    run = corrected(make(tokenizer, lag=1, steps=4))
    state = advance(run, State(algorithm=run.algorithm.initial_state()))
    (held,) = state.pending
    late = [replace(t, version=t.version + 1) for t in held.result().trajectories]
    with pytest.raises(RuntimeError, match="with lag 1 got completions that were sampled after steps"):
        advance(run, replace(state, pending=(replace(held.result(), trajectories=late),)))


def test_what_was_sampled_ahead_is_kept_to_the_last_digit(tokenizer):
    run = corrected(make(tokenizer, lag=1, steps=4))
    state = advance(run, State(algorithm=run.algorithm.initial_state()))
    held = state.pending[0].result()
    again = Collected.from_json(held.to_json())
    assert again == held and any(t.completion.logprobs for t in held.trajectories)
    assert json.loads(held.to_json())["cursor"] == held.cursor


def test_the_end_of_a_run_samples_no_more_than_it_trains_on(tokenizer):
    run = corrected(make(tokenizer, lag=3, steps=3))
    state = State(algorithm=run.algorithm.initial_state())
    for left in (2, 1, 0):
        state = advance(run, state)
        assert len(state.pending) == left


def test_a_lag_takes_truncated_weights_and_refuses_to_go_without(job, tmp_path):
    config = replace(online_config(job, tmp_path / "run", max_steps=2), lag=1)
    online.run(config)
    told = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "correction" and "truncated" in str(event) for event in told)
    bare = {"preset": "grpo", "correction": None}
    with pytest.raises(UserError, match="lag is 1, but the algorithm does not correct"):
        online.run(replace(config, algorithm=bare, run=replace(config.run, output_dir=str(tmp_path / "other"))))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_method_learns_at_lag_four(tokenizer, seed):
    made = make(tokenizer, function=begins_with_a_letter, seed=seed, steps=60, prompts_per_step=8, num_generations=8, lag=4)
    # half of the vocabulary ends a completion
    run = replace(corrected(made), params=SamplingParams(max_tokens=6, stop_token_ids=tuple(range(132, 264))))
    state = State(algorithm=run.algorithm.initial_state())
    for _ in range(60):
        state = advance(run, state)
    rewards = [row["reward"] for row in log_of(run).rows]
    assert sum(rewards[:5]) / 5 < 0.4 and sum(rewards[-10:]) / 10 > 0.9


def test_the_correction_weighs_older_completions_by_how_likely_they_are_now(tokenizer):
    """Weight = min(pi_now / pi_sampler, 2) of each token, 1 only where nothing has moved."""
    run = corrected(make(tokenizer, lag=2, steps=4))
    versions(run, 4)
    means = [row["sampling/importance_sampling_ratio/mean"] for row in log_of(run).rows]
    assert means[0] == pytest.approx(1.0, abs=1e-5) and abs(means[2] - 1) > 1e-4
    assert all(torch.isfinite(torch.tensor(means)))


@pytest.mark.parametrize(
    ("iterations", "minibatches", "single"), [(1, 1, True), (2, 1, False), (1, 2, False), (3, 2, False), (2, 2, False)]
)
def test_one_pass_is_one_optimiser_step_for_each_collection(tokenizer, iterations, minibatches, single):
    assert make(tokenizer, num_iterations=iterations, num_minibatches=minibatches).single_pass is single


def test_updates_are_counted_with_the_critics(tokenizer):
    run = make(tokenizer)
    assert run.updates() == 0
    advance(run, State(algorithm=run.algorithm.initial_state()))
    assert run.updates() == run.optimizer.updates == 1
