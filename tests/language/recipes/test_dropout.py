"""Dropout on an adapter: the completions did come from the policy, however far the dropout moves it in the update."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_jobs import online_config

from psigrad.errors import UserError
from psigrad.language.recipes import online
from psigrad.language.training.online.annotators import old_log_probs

pytestmark = pytest.mark.usefixtures("rewards_here")


def config_of(job, output):
    made = online_config(job, output, max_steps=6)
    made = replace(made, model=replace(made.model, lora_rank=4, lora_dropout=0.5), optim=replace(made.optim, learning_rate=0.1))
    return replace(made, evaluation=replace(made.evaluation, eval_prompts=0), num_minibatches=1)


def test_dropout_at_a_high_learning_rate_is_no_disagreement_of_sampler_and_trainer(job, tmp_path):
    online.run(config_of(job, tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row[key] for row in rows for key in row if key == "sampling/sampling_logp_difference/mean"]
    assert gaps and max(gaps) < 1e-4, "it is still measured, without the dropout"


def test_negative_control_other_log_probs_are_still_noticed(job, tmp_path, monkeypatch):
    right = old_log_probs.compute_log_probs
    monkeypatch.setattr(old_log_probs, "compute_log_probs", lambda *given, **also: right(*given, **also) - 0.1)
    with pytest.raises(UserError, match="were not sampled from the policy"):
        online.run(config_of(job, tmp_path / "run"))
