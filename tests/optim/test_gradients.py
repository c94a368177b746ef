"""Gradients written into their sums against those that autograd adds up."""

from __future__ import annotations

import threading

import pytest
import torch
from fused_models import CONFIGS, made, some_groups, tied_or_not
from kernel_choices import cut_head
from torch import nn
from torch.nn import functional as F

from psigrad.language.models import tiny
from psigrad.language.models.logprobs import token_stats
from psigrad.language.models.stats import TokenStatsRequest
from psigrad.optim import gradients
from psigrad.optim.gradients import Sums, embedding, in_place


def sums(module: nn.Module, run) -> dict[str, torch.Tensor]:
    for p in module.parameters():
        p.grad = None
    run()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.fixture(scope="session")
def tokenizer():
    return tiny.tokenizer(["hello world 123"] * 5, 280)


@pytest.fixture
def tied(tokenizer, monkeypatch):
    """A model whose embedding is its head, with chunks so small that the head's gradient is in closed form."""
    cut_head(monkeypatch, 16 * len(tokenizer))
    return tied_or_not(True, tokenizer)


def test_a_tied_embedding_gets_the_same_sum_of_several_losses(tied):
    def backward():
        for _ in range(2):
            logp = tied.evaluate(some_groups()).logp
            weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
            (logp * weights).sum().backward()

    by_autograd = sums(tied.network, backward)
    with in_place():
        by_hand = sums(tied.network, backward)
    assert by_hand.keys() == by_autograd.keys()
    for name, theirs in by_autograd.items():
        assert float((by_hand[name] - theirs).norm()) <= 1e-6 * float(theirs.norm()), name


@pytest.mark.needs("compiler")
def test_negative_control_what_is_written_is_needed(tied, monkeypatch):
    def backward():
        tied.evaluate(some_groups()).logp.sum().backward()

    by_autograd = sums(tied.network, backward)["model.embed_tokens.weight"]
    waste = torch.zeros_like(by_autograd)
    monkeypatch.setattr(Sums, "of", lambda own, weight: waste)
    with in_place():
        found = sums(tied.network, backward)
    assert "model.embed_tokens.weight" not in found
    assert float((waste - by_autograd).norm()) < 1e-5 * float(by_autograd.norm())


@pytest.mark.parametrize("padding", [None, 3])
def test_rows_that_are_looked_up_get_what_autograd_gives_them(padding):
    generator = torch.Generator().manual_seed(0)
    table = nn.Parameter(torch.randn(50, 8, generator=generator))
    ids = torch.tensor([[3, 7, 7, 49], [0, 3, 7, 1]])
    dy = torch.randn(2, 4, 8, generator=generator)
    F.embedding(ids, table, padding).backward(dy)
    theirs, table.grad = table.grad, None
    with in_place():
        rows = embedding(table, ids, padding, gradients.sums_for(table))
        assert torch.equal(rows, table[ids])
        rows.backward(dy)
    assert torch.allclose(table.grad, theirs, atol=1e-6)
    assert padding is None or not table.grad[padding].any()


def test_outside_nothing_is_written(tied):
    table = tied.network.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(tied.evaluate(some_groups()).logp.sum(), [table])
    assert gradient.any() and table.grad is None


def test_what_does_not_learn_or_is_no_leaf_is_left_to_autograd():
    table = nn.Parameter(torch.randn(50, 8))
    with in_place():
        assert isinstance(gradients.sums_for(table), Sums)
        for other in (table * 2, table.detach(), nn.Parameter(table.detach().bfloat16())):
            assert gradients.sums_for(other) is None
        with torch.no_grad():
            assert gradients.sums_for(table) is None
    assert gradients.sums_for(table) is None


def test_a_half_precision_heads_gradient_is_summed_in_float32(monkeypatch):
    """In bfloat16 a sum of chunks would lose the small ones, so that gradient is not written in place."""
    cut_head(monkeypatch, 4 * 30)
    torch.manual_seed(0)
    head = nn.Linear(8, 30, bias=False).bfloat16()
    hidden, ids = torch.randn(64, 8).bfloat16(), torch.randint(0, 30, (64,))

    def gradient():
        head.weight.grad = None
        token_stats(hidden, ids, head, 30, TokenStatsRequest()).logp.sum().backward()
        return head.weight.grad

    outside = gradient()
    with in_place():
        assert torch.equal(gradient(), outside)


@pytest.mark.parametrize("entropy", [False, True], ids=["tiles", "chunks"])
def test_a_half_precision_heads_gradient_is_that_of_the_whole(entropy, monkeypatch):
    """It is Σ (e_a − π) hᵀ, of 2,048 states in 512 pieces, to 0.5 %: a product rounded to bfloat16 is 0.2 % off, and a sum of
    512 in bfloat16 several percents.
    """
    cut_head(monkeypatch, 4 * 30, rows=4, chunk=4 * 30)
    torch.manual_seed(0)
    head = nn.Linear(8, 30, bias=False).bfloat16()
    hidden, ids = (torch.randn(2048, 8) + 1).bfloat16(), torch.randint(0, 3, (2048,))
    with torch.no_grad():
        pi = (hidden.double() @ head.weight.double().t()).softmax(-1)
        exact = (F.one_hot(ids, 30) - pi).t() @ hidden.double()
    with in_place(own := Sums()):
        token_stats(hidden, ids, head, 30, TokenStatsRequest(entropy=entropy)).logp.sum().backward()
    found = own.float32.get(head.weight, head.weight.grad)
    assert float((found.double() - exact).norm() / exact.norm()) < 0.005
    if entropy:  # negative control: autograd's own sum of the same chunks
        monkeypatch.setattr(gradients, "wide_sums_for", lambda weight: None)
        head.weight.grad = None
        token_stats(hidden, ids, head, 30, TokenStatsRequest(entropy=True)).logp.sum().backward()
        assert float((head.weight.grad.double() - exact).norm() / exact.norm()) > 0.01


def test_a_sum_keeps_its_place_and_begins_at_zero_again(tied):
    def backward():
        tied.evaluate(some_groups()).logp.sum().backward()

    weight, own = tied.network.get_input_embeddings().weight, Sums()
    with in_place(own):
        backward()
        first, place = weight.grad.clone(), weight.grad.data_ptr()
        weight.grad = None
        backward()
    assert weight.grad.data_ptr() == place and weight.grad is own.tensors[weight]
    assert torch.equal(weight.grad, first), "what the step before left there is gone"


def test_a_sum_of_another_type_is_not_used_again():
    table, own = nn.Parameter(torch.randn(5, 2)), Sums()
    own.of(table)
    table.grad = None
    table.data = table.data.double()
    assert own.of(table).dtype == torch.float64 and own.tensors[table] is table.grad


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_backward_pass_in_another_thread_writes_to_the_sums(kind, tied, tokenizer):
    model = tied if kind == "tied" else made(CONFIGS["llama"], tokenizer)
    head, table = model.network.get_output_embeddings().weight, model.network.get_input_embeddings().weight
    own = Sums()
    with in_place(own):
        loss = model.evaluate(some_groups()).logp.sum()
        assert table.grad is None and head.grad is None, "a forward pass is not yet a gradient"
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert set(own.tensors) == {head, table} and all(own.tensors[p] is p.grad and bool(p.grad.any()) for p in own.tensors)


def test_a_weight_has_the_sums_that_own_it():
    mine, yours, nobodys = (nn.Parameter(torch.randn(5, 2)) for _ in range(3))
    first, second = Sums([mine]), Sums([yours])
    with in_place(first, second):
        assert [gradients.sums_for(p) for p in (mine, yours, nobodys)] == [first, second, None]
