"""Sampler and trainer give a token the same log-prob, to the last bit."""

from __future__ import annotations

import pytest
import torch
from cached import sample
from fused_models import CONFIGS, HYBRIDS, adapted, made, some_groups
from kernel_choices import cut_head, multiply_bfloat16, own_products

from psigrad.language.models.fused.caches import PackedWeights
from psigrad.language.models.language_model import prepare
from psigrad.language.models.lora import Lora
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import NextTurn, Request, SamplingParams

pytestmark = pytest.mark.needs("compiler")
PROMPTS = some_groups().prompts


@pytest.fixture(autouse=True)
def _own_products(monkeypatch):
    """Training multiplies by our kernels, as it does on AMD's processors; where MKL is faster the bits are its own."""
    multiply_bfloat16(monkeypatch, fast=True), own_products(monkeypatch)


def unlike(model, temperature=1.0, members=5, tokens=40) -> tuple[int, float]:
    """Of how many tokens the log-probs differ, and by how much at most."""
    requests = [Request(tuple(p), tuple(range(members * i, members * (i + 1)))) for i, p in enumerate(PROMPTS)]
    drawn = sample(EmbeddedSampler(model), requests, SamplingParams(max_tokens=tokens, temperature=temperature), None)
    groups = Groups(PROMPTS, [[c.ids for c in group] for group in drawn])
    trained = model.evaluate(groups, temperature=temperature).logp.detach()
    gaps = [
        (row[: len(c.ids)] - torch.tensor(c.logprobs)).abs()
        for row, c in zip(trained, (c for group in drawn for c in group), strict=True)
    ]
    gap = torch.cat(gaps)
    assert len(gap) > 2 * members * len(PROMPTS)
    return int((gap != 0).sum()), float(gap.max())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CONFIGS, "qwen3-moe", "gpt-oss", "lora"])
def test_no_bit_differs(name, kind, tokenizer):
    """Heads of 8 to 64, windows, biases, head norms, experts, sinks, adapters; at another temperature than 1."""
    configs = {**CONFIGS, **HYBRIDS}
    model = adapted(CONFIGS["qwen2"], tokenizer, kind) if name == "lora" else made(configs[name], tokenizer, kind)
    assert unlike(model, 0.7) == (0, 0.0)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("members", [1, 2])
def test_nor_with_few_sequences(members, kind, tokenizer):
    """Of which the last is alone at the end."""
    assert unlike(made(CONFIGS["qwen3"], tokenizer, kind), members=members, tokens=30) == (0, 0.0)


@pytest.mark.parametrize("rank", [3, 4])
def test_nor_of_what_adapters_add(rank, tokenizer):
    """Whose sums are of huge numbers that cancel, so that they tell in which order, and bfloat16 ones in which pairs, they are
    made: of an odd rank no pair may be of two adapters.
    """
    hf = made(CONFIGS["qwen3"], tokenizer, torch.bfloat16).network
    model = prepare(hf, tokenizer, lora=Lora(rank))
    torch.manual_seed(0)

    def huge(*shape: int) -> torch.Tensor:
        return (torch.randn(shape).sign() * torch.tensor([1.0, 2.0**14])[torch.randint(0, 2, shape)]).bfloat16()

    with torch.no_grad():
        for name, p in hf.named_parameters():
            if "lora_A" in name:
                p.copy_(torch.eye(*p.shape))
            elif "lora_B" in name:
                p.copy_(huge(*p.shape))
            elif "base_layer" in name:
                p.zero_()
    plain = model.decoder.layers[0].current_weights(adapted=True)
    for group in range(4):
        factors = plain.factors(group)
        x = huge(256, factors.low[0].shape[1])
        out = [x.new_empty(256, sum(m.shape[0] for m in factors.matrices)) for _ in range(2)]
        plain.apply(group, x, out[0])
        factors.pack(plain.native.products).multiply(x, out[1], None, plain.native.products)
        assert torch.equal(*out) and out[0].abs().max() > 2.0**20, group


def test_nor_in_an_episode_of_two_turns(tokenizer):
    """Whose second turn goes on from what the cache holds: a token of the environment's, and then the policy's."""
    model = made(CONFIGS["qwen3"], tokenizer)
    params, prompts = SamplingParams(max_tokens=12), [tuple(p) for p in PROMPTS for _ in range(3)]
    dialogue, heard = EmbeddedSampler(model).dialogue(prompts, params), (7,)
    first = dict(dialogue.turns({i: NextTurn((), i) for i in range(len(prompts))}))
    second = dict(dialogue.turns({i: NextTurn(heard, 100 + i) for i in first}))
    assert dialogue.prefilled == sum(map(len, PROMPTS))  # nothing was computed anew
    for i, prompt in enumerate(prompts):
        whole = model.evaluate(Groups([prompt], [[(*first[i].ids, *heard, *second[i].ids)]])).logp[0].detach()
        begin = len(first[i].ids) + len(heard)
        assert whole[: len(first[i].ids)].tolist() == list(first[i].logprobs)
        assert whole[begin : begin + len(second[i].ids)].tolist() == list(second[i].logprobs)


def test_nor_under_a_vocabulary_of_several_stretches_and_tiles(tokenizer, monkeypatch):
    cut_head(monkeypatch, 4096)
    model = made(CONFIGS["qwen3"], tokenizer)
    wide = torch.nn.Embedding(3000, 40)
    torch.nn.init.normal_(wide.weight, std=0.3)
    hf = model.network
    hf.config.vocab_size = 3000
    hf.model.embed_tokens = wide
    hf.lm_head = torch.nn.Linear(40, 3000, bias=False)
    torch.nn.init.normal_(hf.lm_head.weight, std=0.3)
    model.decoder.parameters = list(hf.model.parameters())
    assert unlike(model) == (0, 0.0)


def test_negative_control_without_packed_matrices_the_last_bits_differ(tokenizer, monkeypatch):
    """As of a model whose matrices would take too much memory."""
    monkeypatch.setattr(PackedWeights.__init__, "__defaults__", (100, True))
    count, most = unlike(made(CONFIGS["qwen3"], tokenizer), members=4)
    assert count and most < 1e-5
