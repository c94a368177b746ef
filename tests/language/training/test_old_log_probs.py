"""Under LoRA the policy and its reference are one object: which of the two is meant must not be guessed from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_jobs import make_job, online_config

from psigrad.config import Model
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.recipes import online
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Completion, Trajectory
from psigrad.language.training.online.forward import log_probs, reference_log_probs, to_batch


def test_the_old_log_probs_are_the_policys_and_the_references_are_without_the_adapter():
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2), tokenizer, lora=Lora(rank=2, alpha=16.0))
    with torch.no_grad():
        for name, parameter in model.as_transformers().named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    texts = [(7, 8, 9), (10, 11)]
    group = [
        Trajectory(0, k, (5, 6), Completion(ids, (0.0,) * len(ids), (0.0,) * len(ids), "stop", k), 0, reward=1.0)
        for k, ids in enumerate(texts)
    ]
    batch = to_batch([group])
    with torch.no_grad():
        policy = model.evaluate(Groups([(5, 6)], [texts])).logp
        with model.without_adapter():
            base = model.evaluate(Groups([(5, 6)], [texts])).logp
    assert float((policy - base).abs().max()) > 0.01, "negative control: the adapter matters"
    assert torch.equal(log_probs(model, batch, 1000, 1.0), policy)
    assert torch.equal(reference_log_probs(model, batch, 1000, 1.0), base)


@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize("iterations", [1, 2])
def test_a_sampler_that_is_off_stops_the_run_also_where_log_probs_are_computed_again(tmp_path, monkeypatch, shift, iterations):
    """bfloat16 with several passes: the old log-probs are the trainer's own, and the gap is that of the sampler's even so."""
    steps = EmbeddedSampler.steps

    def shifted(self, requests, params, cache=None):
        for step in steps(self, requests, params, cache):
            yield [(i, [replace(c, logprobs=tuple(x + shift for x in c.logprobs)) for c in group]) for i, group in step]

    monkeypatch.setattr(EmbeddedSampler, "steps", shifted)
    job = make_job(tmp_path)
    config = replace(online_config(job, tmp_path / "run", max_steps=1), num_iterations=iterations, num_minibatches=1)
    config = replace(config, model=Model(path=str(job / "base"), dtype="bfloat16"))
    if shift:
        with pytest.raises(UserError, match=r"sampler and trainer disagree by 0\.5"):
            online.run(config)
    else:
        online.run(config)
