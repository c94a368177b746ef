"""What the fused decoder leaves out at its two ends: rows of equal tokens before the first layer, and behind the last those that
nobody asked for.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from fused_models import CONFIGS, FORMS, HYBRIDS, adapted, made
from transformers import AutoModelForSequenceClassification

from psigrad.kernels.kernels import Kernels
from psigrad.language.models import scalar_model
from psigrad.language.models.packing import Groups, Rows, RowSelection, pack

pytestmark = pytest.mark.needs("compiler")

ALL = torch.arange(60)
WANTED = {
    "one": [17],
    "the first of all": [0],
    "some, in another order and twice": [40, 3, 3, 25, 59, 3],
    "all": ALL.tolist(),
    "none": [],
}


def inputs(kinds: int):
    """60 tokens of so many kinds, packed: two prompts with completions."""
    ids = (torch.randperm(60, generator=torch.Generator().manual_seed(4)) % kinds + 2).tolist()
    return pack(Groups([ids[:9], ids[9:20]], [[[*ids[20:30], 0], [*ids[30:31], 0]], [[*ids[31:60], 0]]]))


def run(model, forward, wanted):
    """(hidden states, gradient of a weighted sum of them) of the tokens wanted, None for all."""
    hidden = model.forward(forward.input_ids, forward.position_ids, forward.layout, target_rows=wanted)
    return hidden, lambda weights: torch.autograd.grad(
        (hidden.double() * weights).sum(), list(model.trainable().values()), allow_unused=True
    )


def whole(model, forward, wanted):
    """The same by transformers' modules, which compute all and take equal tokens for different ones."""
    decoder, model.decoder = model.decoder, None
    try:
        hidden = model.forward(forward.input_ids, forward.position_ids, forward.layout)[0].index_select(0, wanted)
    finally:
        model.decoder = decoder
    return hidden, lambda weights: torch.autograd.grad(
        (hidden.double() * weights).sum(), list(model.trainable().values()), allow_unused=True
    )


def unlike(ours, theirs) -> float:
    """The largest distance of two gradients, parameter by parameter, in parts of the whole."""
    size = torch.cat([g.flatten() for g in theirs if g is not None]).norm() + 1e-12
    return max(
        float((torch.zeros_like(b) if a is None else a).sub(b).norm() / size)
        for a, b in zip(ours, theirs, strict=True)
        if b is not None
    )


@pytest.mark.parametrize("kinds", [5, pytest.param(60, marks=pytest.mark.slow)], ids=["equal tokens", "all unlike"])
@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("name", [*CONFIGS, "granite 4", "gemma3", "gemma4 of shared keys", "lora", "one layer"])
def test_hidden_states_and_gradients_are_those_of_a_decoder_that_computes_all(name, wanted, kinds, tokenizer):
    config = copy.deepcopy({**CONFIGS, **FORMS, **HYBRIDS}[{"lora": "qwen2", "one layer": "llama"}.get(name, name)])
    config.num_hidden_layers = 1 if name == "one layer" else config.num_hidden_layers
    model = adapted(config, tokenizer) if name == "lora" else made(config, tokenizer)
    forward, rows = inputs(kinds), torch.tensor(wanted, dtype=torch.long)
    (ours, our_gradient), (theirs, their_gradient) = run(model, forward, rows), whole(model, forward, rows)
    assert ours.shape == theirs.shape == (len(wanted), model.network.config.hidden_size)
    assert torch.allclose(ours, theirs, atol=3e-5, rtol=0)
    with torch.no_grad():
        assert torch.equal(run(model, forward, rows)[0], ours)
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)).double()
    assert unlike(our_gradient(weights), their_gradient(weights)) < 1e-5


@pytest.mark.parametrize("wrong", ["input_rows", "output_rows"])
def test_negative_control_rows_of_other_tokens_are_noticed(wrong, tokenizer, monkeypatch):
    model, forward, rows = made(CONFIGS["qwen3"], tokenizer), inputs(5), torch.tensor([3, 40])
    theirs, their_gradient = whole(model, forward, rows)
    methods = {
        "input_rows": ("sum_input_grads", lambda self, dx, count: dx[:count]),
        "output_rows": ("scatter_output_grads", lambda self, dx, tokens: dx.new_zeros(60, dx.shape[1])),
    }
    name, instead = methods[wrong]
    plain = getattr(RowSelection, name)
    monkeypatch.setattr(
        RowSelection, name, lambda self, dx, n: instead(self, dx, n) if getattr(self, wrong) is not None else plain(self, dx, n)
    )
    _, our_gradient = run(model, forward, rows)
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)).double()
    assert unlike(our_gradient(weights), their_gradient(weights)) > 1e-2


def test_a_sum_over_many_equal_tokens_is_rounded_once():
    kinds = torch.arange(6000) % 3
    dx = torch.rand(6000, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    exact = torch.stack([dx[kinds == k].double().sum(0) for k in range(3)])
    ours = RowSelection(input_rows=kinds).sum_input_grads(dx, 3)
    assert ours.dtype == torch.bfloat16
    assert torch.allclose(ours.double(), exact, rtol=2**-8)
    one_by_one = sum(dx[kinds == 0].unbind())
    assert not torch.allclose(one_by_one.double(), exact[0], rtol=0.3), "a sum in half precision stops growing"


@pytest.fixture
def rows_of(monkeypatch):
    """How many rows each call of a kernel was given."""
    seen = SimpleNamespace(norm=[], gated=[])
    norm, gated = Kernels.rms_norm, Kernels.gated
    monkeypatch.setattr(Kernels, "rms_norm", lambda self, x, *more: seen.norm.append(len(x)) or norm(self, x, *more))
    monkeypatch.setattr(Kernels, "gated", lambda self, x, gelu: seen.gated.append(len(x)) or gated(self, x, gelu))
    return seen


@torch.no_grad()
@pytest.mark.parametrize(("kinds", "first"), [(5, 5), (30, 30), (31, 60), (60, 60)])
def test_as_few_rows_are_computed_as_differ_or_are_wanted(kinds, first, rows_of, tokenizer):
    model, forward = made(CONFIGS["qwen3"], tokenizer), inputs(kinds)
    for wanted, last in ((torch.tensor([40, 3, 3]), 2), (ALL, 60), (None, 60)):
        rows_of.norm.clear(), rows_of.gated.clear()
        run(model, forward, wanted)
        assert rows_of.norm == [first, 60, 60, last, last], "two norms of two layers and the last one"
        assert rows_of.gated == [60, last]


@torch.no_grad()
def test_a_reward_model_computes_the_last_token_of_each_text_alone(rows_of, tokenizer):
    config = copy.deepcopy(CONFIGS["qwen3"])
    config.vocab_size, config.num_labels = len(tokenizer), 1
    torch.manual_seed(0)
    model = scalar_model.prepare(AutoModelForSequenceClassification.from_config(config), tokenizer)
    groups = Groups([[5, 6, 7], [8]], [[[9, 10], [], [11]], [[12, 13, 14]]])
    rows_of.gated.clear()
    ours = model.scores(groups)
    assert rows_of.gated == [3 + 2 + 0 + 1 + 1 + 3, 4]
    alone = [
        model.scores(Groups([[*p, *c]], [[[]]]))
        for p, texts in zip(groups.prompts, groups.completions, strict=True)
        for c in texts
    ]
    assert torch.allclose(ours, torch.cat(alone), atol=1e-5)
    assert torch.allclose(ours, model.scores(groups, packed=False), atol=1e-5)


@torch.no_grad()
def test_rows_train_on_some_of_their_tokens_and_the_last_layer_computes_no_others(rows_of, tokenizer):
    model = made(CONFIGS["llama"], tokenizer)
    rows_of.gated.clear()
    model.evaluate(Rows([[5, 6, 7, 8], [9, 10, 11]], [[False, False, True, True], [False, False, True]]))
    assert rows_of.gated == [5, 3]
