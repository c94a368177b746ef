"""A head whose gradient is never stored learns what one learns whose gradient is."""

from __future__ import annotations

import math

import pytest
import torch
from fused_models import some_groups, tied_or_not
from kernel_choices import cut_head
from torch import nn

from psigrad.config import Optim
from psigrad.language.models import logprobs
from psigrad.optim import Optimizer, gradients, step_together
from psigrad.optim.gradients import Sums, embedding, in_place, sums_for

# Clipped to a tenth of what the first gradient is, so that a norm that lacks the head's share shows.
OPTIM = Optim(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0)


@pytest.fixture(autouse=True)
def small_blocks(tokenizer, monkeypatch):
    """Tiles and blocks so small that there are several, and room for uses of more tokens than these vocabularies have."""
    cut_head(monkeypatch, 16 * len(tokenizer))
    monkeypatch.setattr(gradients, "BLOCK_ELEMENTS", 7 * 40)
    monkeypatch.setattr(gradients, "HELD", 100.0)


def losses_of(model, scale: float = 1.0):
    """Two micro-batches."""

    def loss(seed: int):
        logp = model.evaluate(some_groups()).logp
        return scale * (logp * torch.randn(logp.shape, generator=torch.Generator().manual_seed(seed))).sum()

    return [lambda: loss(1), lambda: loss(2)]


def trained(model, recompute: bool, steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The gradient norms of some steps, and weights and moments after them."""
    optimizer = Optimizer(model.trainable(), OPTIM, recompute=recompute)
    norms = [optimizer.step(losses_of(model), OPTIM.learning_rate) for _ in range(steps)]
    found = {name: p.detach().clone() for name, p in model.trainable().items()} | optimizer.state_dict()
    return norms, found


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / a[name].norm().clamp(min=1e-12)) for name in a)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_norms_weights_and_moments_are_those_of_a_stored_gradient(tied, tokenizer):
    norms, stored = trained(tied_or_not(tied, tokenizer), recompute=False)
    again, recomputed = trained(tied_or_not(tied, tokenizer), recompute=True)
    assert again == pytest.approx(norms, rel=1e-5) and min(norms) > OPTIM.max_grad_norm
    assert apart(stored, recomputed) < 1e-4


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("lost", [logprobs._HeadUse, gradients._Rows])
def test_negative_control_every_use_counts(lost, tokenizer, monkeypatch):
    norms, stored = trained(tied_or_not(True, tokenizer), recompute=False)
    monkeypatch.setattr(lost, "add_to", lambda self, out, rows: None)
    again, recomputed = trained(tied_or_not(True, tokenizer), recompute=True)
    assert apart(stored, recomputed) > 1e-2 and again != pytest.approx(norms, rel=1e-3)


@pytest.mark.needs("compiler")
def test_no_gradient_of_the_head_is_ever_stored(tokenizer, monkeypatch):
    model, blocks = tied_or_not(True, tokenizer), []
    weight = model.network.get_input_embeddings().weight
    optimizer = Optimizer(model.trainable(), OPTIM, recompute=True)
    given = Sums.blocks

    def watched(sums, asked):
        for rows, block in given(sums, asked):
            assert weight.grad is None and asked is weight
            blocks.append(rows)
            yield rows, block

    monkeypatch.setattr(Sums, "blocks", watched)
    optimizer.step(losses_of(model), 0.1)
    height = 7 * 40 // model.network.config.hidden_size
    assert weight.grad is None and len(blocks) == 2 * math.ceil(len(weight) / height) > 4, "for the norm and for the step"
    assert not optimizer.sums.uses, "what it needed is let go"


def test_uses_that_hold_more_than_a_gradient_are_stored_instead(tokenizer, monkeypatch):
    model = tied_or_not(True, tokenizer)
    weight, defers, asked = model.network.get_input_embeddings().weight, Sums.defers, []

    def watched(sums, weight, use):
        asked.append((defers(sums, weight, use), weight.grad is None))
        return asked[-1][0]

    monkeypatch.setattr(Sums, "defers", watched)
    norms, stored = trained(tied_or_not(True, tokenizer), recompute=False, steps=2)
    size = sum(map(len, some_groups().prompts)) + 100
    monkeypatch.setattr(gradients, "HELD", 1.5 * size / len(weight))  # the second use finds no room
    asked.clear()
    again, recomputed = trained(model, recompute=True, steps=2)
    assert asked[0] == (True, True) and (False, False) in asked
    assert again == pytest.approx(norms, rel=1e-5) and apart(stored, recomputed) < 1e-4


def test_where_autograd_stored_a_gradient_the_rest_is_added_to_it(tokenizer):
    """transformers' own embedding gives a whole gradient: nothing is won by another beside it."""
    norms, stored = trained(tied_or_not(True, tokenizer), recompute=False)
    model = tied_or_not(True, tokenizer)
    model.decoder = None
    again, recomputed = trained(model, recompute=True)
    assert again == pytest.approx(norms, rel=1e-4) and apart(stored, recomputed) < 1e-3
    assert model.network.get_input_embeddings().weight.grad is not None


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_forgotten(tokenizer):
    model = tied_or_not(True, tokenizer)
    optimizer = Optimizer(model.trainable(), OPTIM, recompute=True)
    before = {name: p.detach().clone() for name, p in model.trainable().items()}
    assert optimizer.step(losses_of(model, math.nan), 0.1) is None
    assert all(torch.equal(p, before[name]) for name, p in model.trainable().items())
    assert math.isfinite(optimizer.step(losses_of(model), 0.1))


def test_each_optimiser_gets_the_gradients_of_its_own_weights():
    one, two = (nn.Parameter(torch.randn(30, 4)) for _ in range(2))
    optimizers = [Optimizer({"w": p}, OPTIM, recompute=True) for p in (one, two)]
    ids = torch.tensor([3, 7])
    lookup = [lambda p=p, k=k: k * embedding(p, ids, None, sums_for(p)).sum() for k, p in ((1.0, one), (3.0, two))]
    norms = step_together([(o, 0.1) for o in optimizers], lookup)
    assert norms == pytest.approx([math.sqrt(8.0), 3 * math.sqrt(8.0)])


def test_sums_of_a_trial_leave_no_trace():
    table = nn.Parameter(torch.randn(30, 4))
    optimizer = Optimizer({"w": table}, OPTIM, recompute=True)
    with in_place(optimizer.sums):
        embedding(table, torch.tensor([1]), None, sums_for(table)).sum().backward()
    assert optimizer.sums.uses
    optimizer.clear()
    assert not optimizer.sums.uses and table.grad is None
