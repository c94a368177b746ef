"""The packed forward against plain transformers: one row alone, no padding, no packing, is the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_choices import cut_head
from transformers import MistralConfig, MistralForCausalLM, StableLmConfig, StableLmForCausalLM

from psigrad.language.models import packing, tiny
from psigrad.language.models.language_model import Lora, prepare
from psigrad.language.models.packing import Groups, Rows


def alone(hf, prompt, completion) -> torch.Tensor:
    """log pi of each completion token from one transformers call on this row only."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = hf(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def oracle(hf, groups: Groups, width: int) -> torch.Tensor:
    flat = [(p, c) for p, cs in zip(groups.prompts, groups.completions, strict=True) for c in cs]
    rows = [alone(hf, p[:begin], c) for (p, c), begin in zip(flat, groups.begin(), strict=True)]
    return torch.stack([torch.nn.functional.pad(r, (0, width - len(r))) for r in rows])


def relative(a, b) -> float:
    return float(sum(((x - y) ** 2).sum() for x, y in zip(a, b, strict=True)).sqrt() / sum((y**2).sum() for y in b).sqrt())


@pytest.mark.parametrize("packed", [None, False])
def test_log_probs_equal_transformers_on_each_row_alone(model, groups, packed):
    assert not model.why_padded
    logp = model.evaluate(groups, packed=packed).logp
    assert torch.allclose(logp, oracle(model.network, groups, 12), atol=1e-5, rtol=0)


def test_the_gradient_equals_transformers_on_each_row_alone(model, groups):
    weights = torch.randn(6, 12, generator=torch.Generator().manual_seed(1))
    parameters = list(model.trainable().values())
    ours = torch.autograd.grad((model.evaluate(groups).logp * weights).sum(), parameters)
    theirs = torch.autograd.grad((oracle(model.network, groups, 12) * weights).sum(), parameters)
    assert relative(ours, theirs) < 1e-5


STARTS = [[2, 5], [9, 1, 4], [1]]


@pytest.mark.parametrize("packed", [True, False])
def test_completions_that_go_on_from_within_a_prompt_equal_each_row_alone(model, groups, packed):
    branches = replace(groups, starts=STARTS)
    parameters = list(model.trainable().values())
    ours, theirs = model.evaluate(branches, packed=packed).logp, oracle(model.network, branches, 12)
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)
    weights = torch.randn(6, 12, generator=torch.Generator().manual_seed(1))
    found = [torch.autograd.grad((logp * weights).sum(), parameters) for logp in (ours, theirs)]
    assert relative(*found) < 1e-5
    # the control: behind the whole prompts they are others
    assert float((model.evaluate(groups).logp - theirs).detach().abs().max()) > 1e-2


def test_in_float64_packing_changes_neither_value_nor_gradient(tokenizer, groups):
    # GPT-2 alone stays in float64: the RMSNorm and rotary code of the others casts to float32
    model = prepare(tiny.model("gpt2", len(tokenizer)).double(), tokenizer)
    parameters = list(model.trainable().values())
    ours, theirs = model.evaluate(groups).logp, oracle(model.network, groups, 12)
    assert float((ours - theirs).detach().abs().max()) < 1e-12
    assert relative(torch.autograd.grad(ours.sum(), parameters), torch.autograd.grad(theirs.sum(), parameters)) < 1e-12


def test_negative_control_a_layout_that_mixes_prefixes_up_is_noticed(qwen3, groups):
    inputs = packing.pack(groups)
    right = qwen3.forward(inputs.input_ids, inputs.position_ids, inputs.layout)
    pieces = inputs.layout.pieces
    wrong_layout = replace(inputs.layout, pieces=pieces._replace(prefix=pieces.prefix[::-1].copy()))
    wrong = qwen3.forward(inputs.input_ids, inputs.position_ids, wrong_layout)
    assert float((right - wrong).detach().abs().max()) > 1e-2


def test_a_shared_prompt_is_computed_once_and_no_position_is_padding(qwen3, groups):
    seen = []
    hook = qwen3.network.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(out.shape[:-1].numel())
    )
    qwen3.evaluate(groups)
    hook.remove()
    completions = [c for cs in groups.completions for c in cs]
    assert seen == [sum(map(len, groups.prompts)) + sum(len(c) - 1 for c in completions)]


def test_rows_with_masks_equal_transformers(model):
    rows = Rows(
        [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]], [[False, True, False, True, True], [False, True], [False, False, True]]
    )
    logp = model.evaluate(rows).logp
    for n, (ids, mask) in enumerate(zip(rows.rows, rows.masks, strict=True)):
        expected = torch.cat([torch.zeros(1), alone(model.network, ids[:1], ids[1:])]) * torch.tensor(mask)
        assert torch.allclose(logp[n, : len(ids)], expected, atol=1e-5, rtol=0)
    assert logp.shape == (3, 5)


@pytest.mark.parametrize(
    ("mask", "said"),
    [([True, True, True], "Row 1 trains on its first token"), ([False, True, True, True], "Row 1 has 3 tokens and a mask of 4")],
)
def test_a_mask_that_does_not_fit_its_row_is_refused(mask, said):
    with pytest.raises(ValueError, match=said):
        Rows([[1, 2], [3, 4, 5]], [[False, True], mask])


def test_a_sliding_window_is_kept(tokenizer, groups):
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, sliding_window=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = prepare(MistralForCausalLM(config), tokenizer)
    assert not model.why_padded
    assert torch.allclose(model.evaluate(groups).logp, oracle(model.network, groups, 12), atol=1e-5, rtol=0)
    branches = replace(groups, starts=STARTS)
    assert torch.allclose(model.evaluate(branches).logp, oracle(model.network, branches, 12), atol=1e-5, rtol=0)
    wide = prepare(MistralForCausalLM(MistralConfig(**{**config.to_dict(), "sliding_window": None})), tokenizer)
    wide.network.load_state_dict(model.network.state_dict())
    assert float((wide.evaluate(groups).logp - model.evaluate(groups).logp).detach().abs().max()) > 1e-4


def test_a_model_that_cannot_run_packed_says_why_and_runs_padded(tokenizer, groups):
    config = StableLmConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = prepare(StableLmForCausalLM(config), tokenizer)
    assert "StableLmForCausalLM" in model.why_padded
    assert torch.allclose(model.evaluate(groups).logp, model.evaluate(groups, packed=False).logp)


def test_chunks_of_the_head_change_nothing_and_never_hold_all_logits(qwen3, groups, monkeypatch):
    parameters = list(qwen3.trainable().values())
    targets = sum(len(c) for cs in groups.completions for c in cs)

    def run(elements: int):
        cut_head(monkeypatch, chunk=elements)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
            out = qwen3.evaluate(groups, entropy=True)
        loss = out.logp.sum() + 0.3 * out.entropy.sum()
        return out, torch.autograd.grad(loss, parameters), sizes

    whole, whole_grad, whole_sizes = run(1 << 24)
    parts, parts_grad, parts_sizes = run(5 * qwen3.vocabulary)
    assert torch.allclose(whole.logp, parts.logp, atol=1e-6) and torch.allclose(whole.entropy, parts.entropy, atol=1e-5)
    assert relative(parts_grad, whole_grad) < 1e-5
    assert any(s == (targets, qwen3.vocabulary) for s in whole_sizes)
    assert not any(len(s) == 2 and s[1] == qwen3.vocabulary and s[0] > 5 for s in parts_sizes)


def test_the_exact_kl_of_a_lora_model_is_to_the_head_without_its_adapter(tokenizer, groups):
    base = prepare(tiny.model("qwen3", len(tokenizer), tied=False), tokenizer)
    apart = tiny.model("qwen3", len(tokenizer), tied=False)
    model = prepare(apart, tokenizer, lora=Lora(2, target_modules=("lm_head", "q_proj")))
    with torch.no_grad():
        for p in model.trainable().values():
            p.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
        found, expected = (model.evaluate(groups, kl_to=to).kl for to in (model, base))
    assert torch.allclose(found, expected, atol=1e-5) and float(expected.max()) > 0.01


def test_entropy_and_exact_kl_equal_a_direct_sum_over_the_vocabulary(qwen3, tokenizer, groups):
    other = prepare(tiny.model("qwen3", len(tokenizer), seed=7), tokenizer)
    out = qwen3.evaluate(groups, temperature=0.7, entropy=True, kl_to=other)
    prompt, completion = groups.prompts[1], groups.completions[1][1]
    ids = torch.tensor([[*prompt, *completion]])
    cut = slice(len(prompt) - 1, -1)
    p = torch.softmax(qwen3.network(input_ids=ids).logits[0, cut].double() / 0.7, -1)
    q = torch.softmax(other.network(input_ids=ids).logits[0, cut].double() / 0.7, -1)
    assert torch.allclose(out.entropy[3].double(), -(p * p.log()).sum(-1), atol=1e-5)
    assert torch.allclose(out.kl[3].double(), (p * (p / q).log()).sum(-1), atol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradient(tokenizer, groups):
    def gradient(checkpointing: bool):
        model = prepare(tiny.model("gpt2", len(tokenizer)), tokenizer, gradient_checkpointing=checkpointing)
        return torch.autograd.grad(model.evaluate(groups).logp.sum(), list(model.trainable().values()))

    assert relative(gradient(True), gradient(False)) < 1e-6


def test_bfloat16_agrees_with_the_padded_forward_to_its_own_rounding(tokenizer, groups):
    model = prepare(tiny.model("qwen3", len(tokenizer)).bfloat16(), tokenizer)
    assert not model.why_padded
    packed, padded = model.evaluate(groups).logp, model.evaluate(groups, packed=False).logp
    assert packed.dtype == torch.float32
    assert float((packed - padded).detach().abs().max()) < 0.05


def test_lora_is_its_own_reference_and_only_the_adapter_learns(tokenizer, groups):
    base = prepare(tiny.model("qwen3", len(tokenizer)), tokenizer).evaluate(groups).logp
    torch.manual_seed(0)
    model = prepare(tiny.model("qwen3", len(tokenizer)), tokenizer, lora=Lora(4))
    assert all("lora_" in name for name in model.trainable())
    for name, p in model.trainable().items():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    moved = model.evaluate(groups, kl_to=model)
    assert float((moved.logp - base).detach().abs().max()) > 1e-2
    assert float(moved.kl.detach().max()) > 1e-3
    with model.without_adapter():
        assert torch.equal(model.evaluate(groups).logp, base)
