"""Families whose attention or head differs from Llama's run packed, with the numbers that transformers' own modules give."""

from __future__ import annotations

import copy

import pytest
import torch
from cached import sample
from fused_models import some_groups
from transformers import AutoConfig, AutoModelForCausalLM

from psigrad.language.models import hf_attention, language_model
from psigrad.language.models.attention import SDPA, modified_attention
from psigrad.language.models.backbone import Pretrained
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
# What tells each of them apart is made strong: scores that the caps bend, factors other than 1, windows inside the texts.
FAMILIES = {
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "sliding_window": 6, "query_pre_attn_scalar": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "granite": {"attention_multiplier": 0.5, "residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 0.25},
    "cohere": {"logit_scale": 3.0},
}


def some_model(name, tokenizer):
    """(ours, transformers' own by eager attention)"""
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=len(tokenizer), **SIZES, **FAMILIES[name]))
    for p in hf.parameters():
        torch.nn.init.normal_(p, std=0.3 if p.dim() > 1 else 1.0)
    own = copy.deepcopy(hf)
    own.set_attn_implementation("eager")
    return prepare(hf, tokenizer), own.eval()


def logps_of(own, groups):
    """One row at a time, as plain as can be."""
    found = []
    for prompt, completions in zip(groups.prompts, groups.completions, strict=True):
        for ids in completions:
            logits = own(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.long)])
    return torch.cat(found)


def flat(logp, groups):
    rows = [ids for group in groups.completions for ids in group]
    return torch.cat([row[: len(ids)] for row, ids in zip(logp, rows, strict=True)])


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_it_gives_the_log_probs_and_gradients_of_its_own_modules(name, tokenizer):
    model, own = some_model(name, tokenizer)
    assert not model.why_padded, model.why_padded
    groups = some_groups()
    ours, theirs = flat(model.evaluate(groups).logp, groups), logps_of(own, groups)
    assert torch.allclose(ours, theirs, atol=1e-4, rtol=0)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    whole = torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None]).norm()
    for (name, a), b in zip(model.network.named_parameters(), own.parameters(), strict=True):
        if b.grad is not None:
            assert float((a.grad - b.grad).norm()) < 1e-4 * float(b.grad.norm()) + 1e-5 * float(whole), name
    padded = flat(model.evaluate(groups, packed=False).logp, groups)
    assert torch.allclose(padded, theirs, atol=1e-4, rtol=0), "the padded oracle, which has transformers' masks"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_sampled_has_the_log_probs_that_training_gives_it(name, tokenizer):
    model, own = some_model(name, tokenizer)
    prompts = some_groups().prompts
    requests = [Request(tuple(p), (2 * i, 2 * i + 1)) for i, p in enumerate(prompts)]
    drawn = sample(EmbeddedSampler(model), requests, SamplingParams(max_tokens=12), None)
    groups = Groups(prompts, [[c.ids for c in group] for group in drawn])
    said = torch.cat([torch.tensor(c.logprobs) for group in drawn for c in group])
    with torch.no_grad():
        assert torch.allclose(said, logps_of(own, groups), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "owner", "part", "wrong"),
    [
        ("gemma2", hf_attention, "modified_attention", lambda *q, softcap, sinks, **given: SDPA(*q, enable_gqa=True, **given)),
        ("gemma2", language_model, "SoftcappedHead", lambda head, cap: head),
        (
            "gpt_oss",
            hf_attention,
            "modified_attention",
            lambda *q, softcap, sinks, **given: modified_attention(*q, sinks=sinks - 1, **given),
        ),
        ("granite", Pretrained, "logit_factor", 1.0),
        ("cohere", Pretrained, "logit_factor", 2.9),
    ],
)
def test_negative_control_the_probe_notices_what_is_left_out(name, owner, part, wrong, tokenizer, monkeypatch):
    monkeypatch.setattr(owner, part, wrong)
    assert "outputs differ by" in some_model(name, tokenizer)[0].why_padded


def test_padding_that_sees_nothing_is_a_number():
    x = torch.randn(1, 2, 3, 4)
    mask = torch.tensor([[False, False, False], [True, False, False], [True, True, False]])
    assert modified_attention(x, x, x, attn_mask=mask, scale=1.0, softcap=5.0).isfinite().all()


def test_a_sink_takes_its_share_by_hand():
    """One key with score 0 beside a sink of ln 3: a quarter of the value."""
    q, v = torch.zeros(1, 1, 1, 2), torch.tensor([[[[4.0, 8.0]]]])
    assert torch.allclose(modified_attention(q, q, v, scale=1.0, sinks=torch.tensor([3.0]).log()), torch.tensor([1.0, 2.0]))
