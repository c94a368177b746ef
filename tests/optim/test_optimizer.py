"""The optimiser step: schedule, clipping, float32 masters, and steps that must not happen."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from lone_runs import OneOf
from torch import nn

from psigrad.config import Optim
from psigrad.errors import UserError
from psigrad.optim import MAX_NONFINITE, NonFiniteError, Optimizer, add_up, learning_rate
from psigrad.optim import optimizer as loop
from psigrad.optim.gradients import embedding, sums_for
from psigrad.optim.low_memory import dither
from psigrad.optim.optimizer import check_gradients
from psigrad.optim.rules import adamw_kernels


def test_the_schedule_at_hand_worked_points():
    linear = Optim(learning_rate=1.0, warmup_steps=3, lr_scheduler_type="linear")
    assert [learning_rate(linear, s, 7) for s in range(8)] == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = Optim(learning_rate=2.0, lr_scheduler_type="cosine")
    assert [round(learning_rate(cosine, s, 4), 12) for s in range(5)] == [
        2.0,
        round(1 + math.cos(math.pi / 4), 12),
        1.0,
        round(1 - math.cos(math.pi / 4), 12),
        0.0,
    ]
    constant = Optim(learning_rate=3.0, lr_scheduler_type="constant")
    assert {learning_rate(constant, s, 4) for s in range(9)} == {3.0}


def layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(dtype)


def loss(module: nn.Module, scale: float = 1.0):
    x = torch.linspace(-1, 1, 8).view(2, 4).to(next(module.parameters()).dtype)
    return lambda: scale * (module(x) ** 2).sum()


def test_a_step_is_torchs_adamw_after_torchs_clipping():
    ours, theirs = layer(), layer()
    optim = Optim(learning_rate=0.1, weight_decay=0.3, max_grad_norm=0.5, adam_beta2=0.95)
    optimizer = Optimizer(dict(ours.named_parameters()), optim)
    peer = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.3}, {"params": [theirs.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    for rate in (0.1, 0.05):
        norm = optimizer.step([loss(ours)], rate)
        peer.zero_grad()
        loss(theirs)().backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in peer.param_groups:
            group["lr"] = rate
        peer.step()
        assert norm == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6) and torch.allclose(ours.bias, theirs.bias, atol=1e-6)


def test_micro_batches_add_up():
    whole, parts = layer(), layer()
    optim = Optim(learning_rate=0.1)
    Optimizer(dict(whole.named_parameters()), optim).step([loss(whole)], 0.1)
    Optimizer(dict(parts.named_parameters()), optim).step([loss(parts, 0.25), loss(parts, 0.75)], 0.1)
    assert torch.allclose(whole.weight, parts.weight, atol=1e-7)


def test_the_losses_of_a_step_are_made_where_gradients_are_written_in_place():
    module, seen = layer(), []

    def watched():
        seen.append(sums_for(module.weight))
        return loss(module)()

    optimizer = Optimizer(dict(module.named_parameters()), Optim())
    before = optimizer.sums
    optimizer.step([watched], 0.1)
    assert seen[0] is before and sums_for(module.weight) is None


def test_a_sum_stays_where_it_is_from_step_to_step_unless_autograd_made_its_own():
    table, ids = nn.Parameter(torch.randn(50, 4)), torch.tensor([3, 7, 7])
    optimizer = Optimizer({"table": table}, Optim())

    def written():
        return embedding(table, ids, None, sums_for(table)).sum()

    optimizer.step([written], 0.1)
    place = optimizer.sums.tensors[table].data_ptr()
    optimizer.step([written], 0.1)
    assert table.grad is optimizer.sums.tensors[table] and table.grad.data_ptr() == place
    optimizer.step([lambda: nn.functional.embedding(ids, table).sum(), written], 0.1)
    assert optimizer.sums.tensors == {} and bool(table.grad.any())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_stops_the_run_in_the_end(bad):
    module = layer()
    optimizer = Optimizer(dict(module.named_parameters()), Optim(learning_rate=0.1))
    optimizer.step([loss(module)], 0.1)
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    moments = {key: x.clone() for key, x in optimizer.state_dict().items()}
    for count in range(1, MAX_NONFINITE + 1):
        assert optimizer.step([loss(module), loss(module, bad)], 0.1) is None
        assert all(torch.equal(p, weights[n]) for n, p in module.named_parameters())
        assert all(torch.equal(x, moments[key]) for key, x in optimizer.state_dict().items())
        if count < MAX_NONFINITE:
            check_gradients(optimizer.nonfinite, 7)
    with pytest.raises(NonFiniteError, match="not finite for 3 steps in a row, up to step 7"):
        check_gradients(optimizer.nonfinite, 7)
    assert optimizer.step([loss(module)], 0.1) is not None
    check_gradients(optimizer.nonfinite, 8)


def test_bfloat16_weights_accumulate_updates_too_small_for_them():
    """At 1e-4 each step is far below bfloat16's spacing near 1; float32 masters add 200 of them up, and the plain way loses
    all.
    """
    start = torch.ones(8, 8)
    kept = nn.Parameter(start.bfloat16())
    optimizer = Optimizer({"w": kept}, Optim(learning_rate=1e-4, max_grad_norm=0))
    lost = nn.Parameter(start.bfloat16())
    plain = torch.optim.AdamW([lost], lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        optimizer.step([lambda: kept.float().sum()], 1e-4)
        plain.zero_grad()
        lost.float().sum().backward()
        plain.step()
    assert torch.allclose(optimizer.masters["w"], torch.full((8, 8), 0.98), atol=1e-4)
    assert float(kept.detach().float().mean()) == pytest.approx(0.98, abs=1e-4)  # bfloat16 has 0.9766 and 0.9805
    assert torch.equal(lost.detach(), start.bfloat16())


def _error_of_many_passes(passes: int, monkeypatch, wide: bool = True) -> float:
    """Of the gradient of Σ t·Wx over 1,024 rows in bfloat16, relative to its exact value: tᵀx, whatever the weights are."""
    if not wide:
        monkeypatch.setattr(Optimizer, "float32_sums", lambda self: contextlib.nullcontext())
    generator = torch.Generator().manual_seed(0)
    x, t = (torch.randn(1024, n, generator=generator).bfloat16() for n in (64, 32))
    model = nn.Linear(64, 32, bias=False).bfloat16()
    optimizer = Optimizer(dict(model.named_parameters()), Optim())
    shares = [(lambda i=i: (model(x[i::passes]).float() * t[i::passes]).sum()) for i in range(passes)]
    add_up([optimizer], shares)
    exact = t.double().t() @ x.double()
    total = optimizer.masters["weight"].grad
    total = model.weight.grad if total is None else total
    return float((total.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("passes", [1, 64, 1024])
def test_many_passes_in_bfloat16_add_up_as_exactly_as_one(passes, monkeypatch):
    """A product rounded to bfloat16 is 2⁻⁹/√3 = 0.11 % off at most on average, or a little more where several are added."""
    assert _error_of_many_passes(passes, monkeypatch) < 0.002


def test_negative_control_a_sum_in_bfloat16_loses_percents(monkeypatch):
    assert _error_of_many_passes(1024, monkeypatch, wide=False) > 0.02


ONES = torch.ones(3, 8).bfloat16()


def test_bfloat16_weights_step_from_the_wide_sum_as_from_the_narrow_one():
    """Two passes, of which the second adds nothing, step weights and masters as the first alone does, to bfloat16's rounding."""
    steps = []
    for passes in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
        optimizer = Optimizer(dict(model.named_parameters()), Optim())
        losses = [lambda m=model: m(ONES).float().square().sum(), lambda m=model: 0 * m(ONES).float().sum()]
        for _ in range(3):
            assert optimizer.step(losses[:passes], 0.01)
        for name, p in model.named_parameters():
            assert torch.equal(p.flatten(), dither(optimizer.masters[name].detach().flatten())) and p.dtype == torch.bfloat16
        steps.append(torch.cat([m.detach().flatten() for m in optimizer.masters.values()]))
    assert float((steps[0] - steps[1]).abs().max()) < 1e-6


def test_the_sums_of_several_passes_stay_where_they_are_and_one_pass_steps_as_ever():
    """Also right behind a step of several, which has left them: to the last bit, so that a run that goes on repeats itself."""

    def begun():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
        return model, Optimizer(dict(model.named_parameters()), Optim(), seed=1)

    def losses(model, count):
        return [lambda k=k: model(ONES + k).sum() for k in range(count)]

    model, optimizer = begun()
    sums = []
    for count in (3, 2, 1, 1, 2):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        state = {key: x.clone() for key, x in optimizer.state_dict().items()}
        optimizer.step(losses(model, count), 1e-2)
        sums.append([m.grad for m in optimizer.masters.values()])  # held, so that no other tensor gets its place
        fresh, other = begun()  # has no sums of a step before
        with torch.no_grad():
            for name, p in fresh.named_parameters():
                p.copy_(before[name])
        other.load_state_dict(state)
        other.step(losses(fresh, count), 1e-2)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True)), count
        assert all(torch.equal(x, other.state_dict()[key]) for key, x in optimizer.state_dict().items()), count
    assert [x.data_ptr() for x in sums[0]] == [x.data_ptr() for x in sums[1]], "the second step's are those of the first"
    if adamw_kernels(torch.bfloat16, "cpu"):
        assert sums[2] == sums[3] == [None] * 4, "and those of one pass stand on the weights"
    assert optimizer.has_buffers, "of the last step, which had two passes"


def test_processes_add_up_in_the_same_place_where_one_has_no_gradient():
    busy, idle = (Optimizer(dict(layer(torch.bfloat16).named_parameters()), Optim()) for _ in range(2))
    with busy.float32_sums():
        sum(p.float().sum() for p in busy.parameters.values()).backward()
    for optimizer in (busy, idle):
        optimizer.finish_backward()
        pairs = zip(optimizer.unsharded, optimizer.masters.values(), strict=True)
        assert [x is master for x, master in pairs] == [True, True]
    assert all(x.grad is not None for x in busy.unsharded) and all(x.grad is None for x in idle.unsharded)


@pytest.mark.parametrize("size", [1, 2])
def test_one_pass_in_bfloat16_leaves_its_gradient_on_the_weight_or_where_processes_add_it_up(size):
    """Of two processes with equal gradients the sum is on the masters, twice that of one: each of 3 outputs' weights has 1, 2."""

    class World:
        rank = 0

        def all_reduce(self, x):
            return x.mul_(2)

    World.size = size
    model = nn.Linear(2, 3, bias=False).bfloat16()
    optimizer = Optimizer(dict(model.named_parameters()), Optim(), world=World())
    add_up([optimizer], [lambda: model(torch.tensor([[1.0, 2.0]]).bfloat16()).sum()])
    narrow, wide = model.weight.grad, optimizer.masters["weight"].grad
    expected = size * torch.tensor([[1.0, 2.0]] * 3)
    assert (narrow is None, wide is None) == (size == 2, size == 1)
    torch.testing.assert_close((narrow if wide is None else wide).float(), expected, rtol=0, atol=0)


def test_a_rule_of_whole_matrices_is_refused_where_they_lie_in_shards(monkeypatch):
    """AdamW steps what a process holds of them; a shard is another tensor than the parameter."""
    weights = {"w": torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))}
    for held, optim, said in (
        (lambda p: p, Optim(optimizer="muon"), ""),
        (lambda p: p.detach()[:1], Optim(), ""),
        (lambda p: p.detach()[:1], Optim(optimizer="muon"), "optimizer muon needs whole matrices"),
        (lambda p: p.detach()[:1], Optim(bf16_stochastic_round=True), "bf16_stochastic_round needs whole matrices"),
    ):
        monkeypatch.setattr(loop, "local_parameter", held)
        with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
            Optimizer(weights, optim)


def test_the_norm_of_shards_is_that_of_what_all_processes_hold(monkeypatch):
    """Gradients 3 and 4 here and as much elsewhere: √(2·25). What is not in shards counts once: √(2·25 + 16)."""

    class Two:
        size, rank = 1, 0

        def all_reduce(self, x):
            return 2 * x

    weights = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("sharded", "whole")}
    monkeypatch.setattr(loop, "local_parameter", lambda p: torch.nn.Parameter(p.detach()) if p is weights["sharded"] else p)
    optimizer = Optimizer(weights, Optim(learning_rate=1.0, max_grad_norm=0.0), world=Two())
    optimizer.clear()
    (weights["sharded"] * torch.tensor([3.0, 4.0])).sum().backward()
    assert optimizer.norm() == pytest.approx(50**0.5)
    (weights["whole"] * torch.tensor([0.0, 4.0])).sum().backward()
    assert optimizer.norm() == pytest.approx(66**0.5)


def test_a_head_whose_gradient_is_made_twice_is_that_of_a_process_alone():
    for size, recomputes in ((1, True), (2, False)):
        world = OneOf(size)
        assert (
            Optimizer({"w": torch.nn.Parameter(torch.ones(2))}, Optim(), recompute=True, world=world).sums.recompute is recomputes
        )
