"""Under LoRA the policy and its reference are one object: which of the two is meant must not be guessed from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_rewards
import torch
from tiny_jobs import make_job, misreport, online_config

from psigrad.config import Model, OnlineConfig
from psigrad.errors import UserError
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.recipes import online
from psigrad.language.rollout.types import Completion, SamplingParams, Trajectory
from psigrad.language.training.loss_sums import LossSums
from psigrad.language.training.online.annotators.old_log_probs import OldLogProbs, compute_log_probs
from psigrad.language.training.online.annotators.reference import reference_log_probs
from psigrad.language.training.online.batching import to_batch
from psigrad.objective import PolicyOutputs, Prepared
from psigrad.processes.parallel.world import ALONE


def test_the_old_log_probs_are_the_policys_and_the_references_are_without_the_adapter():
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2), tokenizer, lora=Lora(rank=2, alpha=16.0))
    with torch.no_grad():
        for name, parameter in model.network.named_parameters():
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
    assert torch.equal(compute_log_probs(model, batch, 1000, 1.0), policy)
    assert torch.equal(reference_log_probs(model, batch, 1000, 1.0), base)


@pytest.mark.parametrize(
    ("exact", "single", "step", "again"),
    [(True, False, 0, False), (False, True, 0, False), (False, False, 0, True), (True, True, 1, True)],
    ids=["an exact sampler", "one pass", "an inexact sampler and several passes", "older weights"],
)
def test_the_samplers_log_probs_are_the_old_ones_only_where_they_are_the_policys(exact, single, step, again):
    """The sampler says log p = 0 of each token: those stay, or are the model's own log_softmax."""
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2), tokenizer)
    group = [
        Trajectory(0, k, (5, 6), Completion((7, 8), (0.0, 0.0), (0.0, 0.0), "stop", k), 0, reward=float(k)) for k in range(2)
    ]
    settings = OnlineConfig(micro_batch_tokens=1000)
    run = SimpleNamespace(model=model, config=settings, params=SamplingParams(1, temperature=0.5), world=ALONE, critic=None,
                          exact_sampling=exact, single_pass=single)  # fmt: skip
    with torch.no_grad():
        logits = model.network(torch.tensor([[5, 6, 7, 8]])).logits[0, 1:3]
    own = (logits / 0.5).log_softmax(-1)[torch.arange(2), torch.tensor([7, 8])].expand(2, 2)
    gap = float(own.abs().mean())  # the sampler's are 0

    def gap_of(first_pass):
        """The gap that is measured before the first optimiser step, and with its pass."""
        annotator = OldLogProbs()
        found = annotator.columns(run, to_batch([group]), step, None)
        if first_pass:
            prepared = Prepared(
                found, torch.zeros(2, 2), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool), {}, {}
            )
            annotator.add_terms(run, prepared, PolicyOutputs(own), torch.arange(2), sums := LossSums())
            sums.end_step(None)
        return annotator.gap.mean, found

    before, found = gap_of(first_pass=False)
    torch.testing.assert_close(found.logp_old, own if again else torch.zeros(2, 2), rtol=0, atol=2e-5)
    assert before == pytest.approx(gap if again and step == 0 else 0.0, abs=2e-5), "older weights may differ"
    assert gap_of(first_pass=True)[0] == pytest.approx(0.0 if step else gap, abs=2e-5), (
        "the first pass measures the sampler's own"
    )
    run.config = replace(settings, model=Model(lora_dropout=0.5))  # then they differ by what is dropped, which is no fault
    for first_pass in (False, True):
        found = gap_of(first_pass)[0]
        assert found == pytest.approx(0.0 if step else gap, abs=2e-5), "one completion is compared without the dropout"


@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize(
    ("dtype", "iterations"), [pytest.param("bfloat16", 1, marks=pytest.mark.slow), ("bfloat16", 2), ("float32", 2)]
)
def test_a_sampler_that_is_off_stops_the_run_also_where_log_probs_are_computed_again(
    tmp_path, monkeypatch, shift, dtype, iterations
):
    """bfloat16 with several passes: the old log-probs are the trainer's own, and the gap is that of the sampler's even so. In
    float32 they are the sampler's, and the first optimiser step, which computes all of them anew, holds the two together.
    """
    misreport(monkeypatch, shift)
    job = make_job(tmp_path)
    config = replace(online_config(job, tmp_path / "run", max_steps=1), num_iterations=iterations, num_minibatches=1)
    config = replace(config, model=Model(path=str(job / "base"), dtype=dtype), keep_activations_gb=0.0)
    if shift:
        with pytest.raises(UserError, match=r"sampler and trainer differ by 0\.5"):
            online.run(config)
    else:
        online.run(config)


def test_in_a_single_pass_the_ratio_is_1_whatever_the_sampler_says(tmp_path, monkeypatch):
    """π_old is the policy that is trained, so a sampler whose log-probs are off by 0.3 leaves every weight as it was."""
    job, found = make_job(tmp_path), {}
    for shift in (0.0, 0.3):
        misreport(monkeypatch, shift)
        config = replace(online_config(job, tmp_path / f"run{shift}", max_steps=1), num_iterations=1, num_minibatches=1)
        result = online.run(replace(config, max_logp_difference=1.0, reward=(f"{tiny_rewards.__file__}:of_text",)))
        found[shift] = (Path(result.model) / "model.safetensors").read_bytes()
    assert found[0.0] == found[0.3] != (job / "base" / "model.safetensors").read_bytes()
