"""LoRA in the fused decoder against peft's own modules."""

from __future__ import annotations

import peft
import pytest
import torch
from fused_models import CONFIGS, FORMS, HYBRIDS, adapted, assert_log_probs_and_gradients_are_transformers, made, some_groups
from kernel_choices import multiply_bfloat16

from psigrad.language.models.fused.decoder import Decoder
from psigrad.language.models.fused.families import Unsupported
from psigrad.language.models.language_model import Lora, prepare

pytestmark = pytest.mark.needs("compiler")


PLACES = ("q_proj", "o_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((name, ("q_proj", "o_proj") if "moe" in name else ("all-linear",)) for name in [*CONFIGS, *FORMS, *HYBRIDS]),
        *((name, PLACES) for name in [*CONFIGS, "granite 4", "olmo3"]),
    ],
)
def test_lora_gives_the_log_probs_and_gradients_of_peft(name, targets, tokenizer):
    model = adapted({**CONFIGS, **FORMS, **HYBRIDS}[name], tokenizer, target_modules=targets)
    assert model.decoder is not None, model.why_unfused
    assert all("lora_" in name for name in model.trainable())
    assert_log_probs_and_gradients_are_transformers(model, some_groups())


def test_a_lora_model_without_its_adapter_is_the_one_it_started_from(tokenizer):
    model, base = adapted(CONFIGS["qwen3"], tokenizer), made(CONFIGS["qwen3"], tokenizer)
    before = model.evaluate(some_groups()).logp.detach()
    with model.without_adapter(), torch.no_grad():
        assert torch.equal(model.evaluate(some_groups()).logp, base.evaluate(some_groups()).logp)
    assert float((before - base.evaluate(some_groups()).logp.detach()).abs().max()) > 0.1
    assert torch.equal(before, model.evaluate(some_groups()).logp)


def test_lora_under_activation_checkpointing_gives_the_same_gradient_bit_for_bit(tokenizer):
    gradients = []
    for recompute in (False, True):
        model = adapted(CONFIGS["qwen3"], tokenizer)
        model.decoder.recompute = recompute
        model.evaluate(some_groups()).logp.sum().backward()
        gradients.append([p.grad for p in model.trainable().values()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_only_what_changed_is_cast_again(tokenizer, monkeypatch):
    multiply_bfloat16(monkeypatch, fast=False)
    model = adapted(CONFIGS["qwen3"], tokenizer, torch.bfloat16)
    weights = model.decoder.layers[0].weights
    with torch.no_grad():
        next(iter(model.trainable().values())).mul_(2)
        before = weights.now().copy()
        model.network.model.layers[0].self_attn.k_proj.base_layer.weight.mul_(2)
    changed = [a is not b for a, b in zip(before, weights.now(), strict=True)]
    assert changed.index(True) == 1 and sum(changed) == 1


def test_the_probe_sees_what_fresh_adapters_would_do(tokenizer, monkeypatch):
    monkeypatch.setattr("psigrad.language.models.fused.layer.LoraDelta.add", lambda self, y, x: None)
    model = prepare(made(CONFIGS["qwen3"], tokenizer).network, tokenizer, lora=Lora(3))
    assert model.decoder is None and "outputs differ by" in model.why_unfused
    assert all(not bool(p.any()) for name, p in model.trainable().items() if "lora_B" in name), "as fresh as before"


def test_an_adapter_that_was_merged_is_refused(tokenizer):
    model = adapted(CONFIGS["qwen3"], tokenizer)
    model.adapter.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        model.evaluate(some_groups())


def test_half_precision_weights_do_not_swallow_a_small_adapter(tokenizer, monkeypatch):
    """The control: merged into bfloat16 weights, what is below their rounding would be lost."""
    multiply_bfloat16(monkeypatch, fast=False)
    model = adapted(CONFIGS["qwen3"], tokenizer, torch.bfloat16)
    assert model.decoder is not None, model.why_unfused
    layer = model.decoder.layers[0]
    adapter, weight = layer.adapters[0], layer.weights.given[0].detach()
    with torch.no_grad():
        for p in adapter.weights:
            p.mul_(0.02)
        x = torch.randn(50, weight.shape[1], generator=torch.Generator().manual_seed(0))
        ours = layer.current_weights(True).apply(0, x, torch.empty(50, layer.heads.row))[:, : len(weight)]
        a, b = adapter.weights
        whole = weight.float() + adapter.module.scaling[adapter.name] * b @ a
        exact, base = x @ whole.t(), x @ weight.float().t()
        share = float((exact - base).norm())
        assert float((ours - exact).norm()) < 1e-3 * share
        assert float((x @ whole.bfloat16().float().t() - exact).norm()) > 0.2 * share


def test_adapters_of_experts_are_left_to_peft(tokenizer):
    model = prepare(made(HYBRIDS["qwen3-moe"], tokenizer).network, tokenizer, lora=Lora(2))
    assert model.decoder is None and "experts or routers have adapters" in model.why_unfused


def test_dropout_is_left_to_peft(tokenizer):
    dropped = prepare(made(CONFIGS["qwen3"], tokenizer).network, tokenizer, lora=Lora(2, dropout=0.1))
    assert dropped.decoder is None and "dropout" in dropped.why_unfused


@pytest.mark.parametrize(("settings", "reason"), [({"use_dora": True}, "variant"), ({"lora_bias": True}, "variant")])
def test_variants_of_lora_are_left_to_peft(settings, reason, tokenizer):
    model = made(CONFIGS["llama"], tokenizer)
    peft.get_peft_model(model.network, peft.LoraConfig(target_modules=["q_proj"], **settings))
    with pytest.raises(Unsupported, match=reason):
        Decoder(model.network)
