"""Layers with state in a packed row: each sequence begins anew, and a prompt's state is computed once, with its gradient."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cached import sample
from hybrid_models import FUSED, HYBRID, MORE, network, packed

from psigrad.kernels.kernels import kernels
from psigrad.kernels.state_kernels import Trees
from psigrad.language.models.attention import PackedLayout
from psigrad.language.models.hf_state import DeltaRule, Mamba2
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups, Rows
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

EVERY = [*HYBRID, *(pytest.param(name, marks=pytest.mark.slow) for name in [*MORE, *(f"{name}, packed" for name in FUSED[1:])])]
EVERY += ["qwen3_5_text, packed"]
STARTS = [[2, 5], [9, 1, 4], [1]]


@pytest.fixture(scope="module")
def models(tokenizer):
    """(psigrad's, transformers' own by eager attention) of a family; made once."""
    kept = {}

    def made(name):
        if name not in kept:
            hf = network(name.removesuffix(", packed"))
            own = copy.deepcopy(hf).eval()
            own.set_attn_implementation("eager")
            kept[name] = (packed if name.endswith(", packed") else prepare)(hf, tokenizer), own
            fuses = name in FUSED and not isinstance(kernels(), str)
            assert (kept[name][0].decoder is not None) == fuses, kept[name][0].why_unfused
        return kept[name]

    return made


def alone(own, prompt, ids):
    """log π of each token by transformers' own modules, from one sequence."""
    logits = own(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def one_by_one(own, groups):
    flat = [(p, c) for p, cs in zip(groups.prompts, groups.completions, strict=True) for c in cs]
    return torch.cat([alone(own, p[:begin], c) for (p, c), begin in zip(flat, groups.begin(), strict=True)])


def flat(logp, groups):
    return torch.cat([row[: len(c)] for row, c in zip(logp, itertools.chain(*groups.completions), strict=True)])


def gradients(loss, parameters):
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]


def apart(a, b):
    """The largest difference of any parameter's gradient, as a share of the whole gradient's norm."""
    whole = torch.cat([g.flatten() for g in b]).norm()
    return max(float((x - y).norm() / whole) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole prompts", "from within prompts"])
@pytest.mark.parametrize("name", EVERY)
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(name, starts, models, groups):
    (model, own), groups = models(name), replace(groups, starts=starts)
    assert not model.why_padded, model.why_padded
    ours, theirs = flat(model.evaluate(groups).logp, groups), one_by_one(own, groups)
    assert float((ours - theirs).detach().abs().max()) < 1e-5
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    found = [
        gradients((logp * weights).sum(), list(network.parameters())) for logp, network in ((ours, model.network), (theirs, own))
    ]
    assert apart(*found) < 1e-5
    padded = flat(model.evaluate(groups, packed=False).logp, groups)
    assert float((padded - theirs).detach().abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm3", "granitemoehybrid (hybrid)"])
def test_rows_and_splits_into_micro_batches_change_nothing(name, models, groups):
    model, own = models(name)
    rows = [[*p, *c] for p, cs in zip(groups.prompts, groups.completions, strict=True) for c in cs]
    found = model.evaluate(Rows(rows, [[False, *[True] * (len(ids) - 1)] for ids in rows])).logp
    for ids, logp in zip(rows, found, strict=True):
        assert torch.allclose(logp[1 : len(ids)], alone(own, ids[:1], ids[1:]), atol=1e-5, rtol=0)
    parameters = list(model.network.parameters())
    whole = gradients(model.evaluate(groups).logp.sum(), parameters)
    parts = [torch.zeros_like(p) for p in parameters]
    for g, (prompt, completions) in enumerate(zip(groups.prompts, groups.completions, strict=True)):
        for split in [completions] if g == 0 else [[c] for c in completions]:
            more = gradients(model.evaluate(Groups([prompt], [split])).logp.sum(), parameters)
            parts = [a + b for a, b in zip(parts, more, strict=True)]
    assert apart(parts, whole) < 1e-5


@pytest.mark.parametrize("name", EVERY)
def test_what_is_sampled_has_the_log_probs_of_its_sequence_alone(name, models, groups):
    """Twelve sequences in eight slots: they leave at different times, and others take their slots."""
    model, own = models(name)
    requests = [Request(tuple(p), tuple(range(4 * i, 4 * i + 4))) for i, p in enumerate(groups.prompts)]
    params = SamplingParams(max_tokens=12, stop_token_ids=tuple(range(20, 60)))
    drawn = sample(EmbeddedSampler(model, max_batch=8), requests, params, None)
    found = Groups(groups.prompts, [[c.ids for c in group] for group in drawn])
    assert len({len(c.ids) for group in drawn for c in group}) > 3
    told = torch.cat([torch.tensor(c.logprobs) for group in drawn for c in group])
    with torch.no_grad():
        assert float((told - one_by_one(own, found)).abs().max()) < 1e-5


def test_completions_of_a_prompt_have_probabilities_that_sum_to_one(tokenizer):
    """All 216 completions of three tokens of six; the gradient of an expected reward is the score function's, Σ π R ∇log π."""
    hf = network("qwen3_5_text", vocabulary=6)
    own = copy.deepcopy(hf).eval()
    model = prepare(hf, tokenizer)
    every = [list(ids) for ids in itertools.product(range(6), repeat=3)]
    groups, rewards = Groups([[2, 5, 4, 1]], [every]), torch.randn(216, generator=torch.Generator().manual_seed(2))
    logp = model.evaluate(groups).logp.sum(1)
    assert abs(float(logp.exp().sum().detach()) - 1) < 1e-5
    ours = gradients((logp.exp().detach() * rewards * logp).sum(), list(model.network.parameters()))
    chances = torch.stack([alone(own, [2, 5, 4, 1], ids).sum().exp() for ids in every])
    assert apart(ours, gradients((chances * rewards).sum(), list(own.parameters()))) < 1e-5


@pytest.mark.needs("compiler")
def test_a_prompt_runs_once_for_its_completions(models, groups, monkeypatch):
    model, seen = models("qwen3_5_text, packed")[0], Counter()
    scan, scan_trees = DeltaRule.scan, DeltaRule.scan_trees
    monkeypatch.setattr(DeltaRule, "scan", lambda *given: seen.update([tuple(given[1][0].shape[:2])]) or scan(*given))
    model.evaluate(groups)
    layers = model.network.config.layer_types.count("linear_attention")
    tokens = sum(map(len, groups.prompts)) + sum(len(c) - 1 for group in groups.completions for c in group)
    assert not seen, "a kernel scans"
    count = lambda *given: seen.update([int(given[2].segments[:, 1].sum())]) or scan_trees(*given)  # noqa: E731
    monkeypatch.setattr(DeltaRule, "scan_trees", count)
    model.evaluate(groups)
    assert seen == {tokens: layers}
    monkeypatch.setattr(DeltaRule, "scan_trees", lambda self, given, trees: None)
    seen.clear()
    model.evaluate(groups)
    assert seen == {(3, 9): layers, (6, 11): layers}  # the longest of three prompts, and of six completions but its last token


def test_the_delta_rule_by_hand():
    """One head of width 1, so that queries and keys are 1: S ← S/2 + β (v - S/2) is 2, then 0.5 · 1 + 0.5 · 4."""
    rule, one = DeltaRule(None), torch.ones(1, 1, 1)
    given = (one, one, torch.tensor([[[4.0]]]), torch.tensor([[0.5]]).log(), torch.tensor([[0.5]]))
    out, state = rule.step(given, torch.zeros(1, 1, 1, 1))
    assert float(out) == pytest.approx(2.0, abs=1e-5) and float(rule.step(given, state)[0]) == pytest.approx(2.5, abs=1e-5)


def test_mamba2_by_hand():
    """A = -ln 2 and steps of 1: S ← S/2 + x·B is 6, then 9; C = 2."""
    rule, one = Mamba2(None, torch.tensor([-0.6931472]), 4), torch.ones(1, 1)
    given = (torch.tensor([[[2.0]]]), one, torch.tensor([[[3.0]]]), torch.tensor([[[2.0]]]))
    out, state = rule.step(given, torch.zeros(1, 1, 1, 1))
    assert float(out) == 12.0 and float(rule.step(given, state)[0]) == pytest.approx(18.0)


def _without_reset(self):
    """One sequence after the other, as if the row were one text."""
    rows = torch.arange(self.rows)
    return rows, rows, [((1, self.rows), None)]


def _with_neighbours(self, taps):
    rows = torch.cat([torch.full((taps - 1,), -1), torch.arange(self.rows)])
    return rows, torch.arange(self.rows), rows.unfold(0, taps, 1).contiguous()


@pytest.mark.parametrize(
    ("name", "part", "wrong"),
    [
        ("qwen3_5_text", "segments", property(_without_reset)),
        ("granitemoehybrid (hybrid)", "segments", property(_without_reset)),
        ("qwen3_5_text", "_windows", _with_neighbours),
        ("lfm2", "_windows", _with_neighbours),
    ],
)
def test_negative_control_a_leak_is_noticed_before_training(name, part, wrong, tokenizer, monkeypatch):
    monkeypatch.setattr(PackedLayout, part, wrong)
    assert "outputs differ by" in prepare(network(name), tokenizer).why_padded


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("_trees", lambda self, every: Trees(torch.tensor([[0, self.rows, -1, 0]]), torch.tensor([0, 1]), 1)),
        ("_windows", lambda self, taps, own=PackedLayout._windows: (*own(self, taps)[:2], _with_neighbours(self, taps)[2])),
    ],
)
@pytest.mark.needs("compiler")
def test_negative_control_kernels_that_leak_are_left_off(part, wrong, tokenizer, monkeypatch):
    assert prepare(network("qwen3_5_text"), tokenizer).decoder is not None
    assert "run in PyTorch" not in packed(network("qwen3_5_text"), tokenizer).slow_reason
    monkeypatch.setattr(PackedLayout, part, wrong)
    model = prepare(network("qwen3_5_text"), tokenizer)
    assert not model.why_padded and "fused forward pass differs from the model's own: in float32" in model.slow_reason
    assert "its recurrent layers run in PyTorch (in float32 its outputs differ" in model.slow_reason
