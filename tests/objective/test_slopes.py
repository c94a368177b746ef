"""The closed-form gradients against autograd through the loss itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from edge_batches import batch, gradient, rows

from psigrad.config.algorithms import resolve
from psigrad.control.methods import presets as control_catalog
from psigrad.objective import Batch, PolicyOutputs, Totals
from psigrad.objective.catalog import PPO
from psigrad.objective.parts.aggregate import clip_covariance, fixed_length, sequence_mean, token_mean
from psigrad.objective.parts.critic import bonus, value_loss
from psigrad.objective.parts.ratio import KL
from psigrad.objective.parts.surrogate import clip, dual_clip, unclipped
from psigrad.objective.slopes import has_slopes, slopes

N, T = 5, 7
METHODS = {
    "reinforce": control_catalog.REINFORCE,
    "a2c": replace(control_catalog.A2C, entropy=bonus(0.3)),
    "ppo": replace(resolve("ppo"), kl=None, entropy=bonus(0.02), critic=value_loss(0.7)),
    "ppo with a clipped critic": replace(resolve("ppo"), kl=None, critic=value_loss(0.5, clip=0.1)),
    "clip higher": replace(resolve("ppo"), kl=None, surrogate=clip(0.1, 0.4), aggregate=sequence_mean),
    "clip at everything": replace(resolve("ppo"), kl=None, surrogate=clip(1.0, 0.0), aggregate=fixed_length(3)),
    "steps left out": replace(resolve("clip_cov"), keep=(clip_covariance(0.4, -9.0, 9.0),)),
    "unclipped": replace(resolve({"preset": "grpo", "surrogate": "unclipped", "kl": None}), aggregate=token_mean),
}


def made(algorithm, seed=0, *, mask=None):
    """A prepared batch, and what the model says of it now: some ratios far outside the clip, one beyond exp(20)."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return scale * torch.randn(N, T, generator=g, dtype=torch.float64)

    batch = Batch(
        mask=torch.ones(N, T, dtype=torch.bool) if mask is None else mask,
        reward=normal(),
        logp_old=normal() - 2,
        group=torch.zeros(N, dtype=torch.int64),
        value=normal(),
        last_value=torch.randn(N, generator=g, dtype=torch.float64),
    )
    prepared = algorithm.prepare(batch, algorithm.initial_state())
    logp = batch.logp_old + normal(0.3)
    logp[0, 0] += 25
    advantage = prepared.advantage.clone()
    advantage[1, 1] = 0.0
    return replace(prepared, advantage=advantage), PolicyOutputs(logp, normal() ** 2, batch.value + normal(0.2))


def by_autograd(algorithm, prepared, evaluation, totals):
    leaves = PolicyOutputs(*(x.detach().requires_grad_() for x in (evaluation.logp, evaluation.entropy, evaluation.value)))
    loss = algorithm.loss(prepared, leaves, totals, algorithm.initial_state()).value
    inputs = [leaves.logp, leaves.entropy, leaves.value]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(inputs, found, strict=True)]


@pytest.mark.parametrize("name", METHODS)
def test_every_slope_equals_autograd(name):
    algorithm = METHODS[name]
    assert has_slopes(algorithm)
    prepared, evaluation = made(algorithm)
    totals = algorithm.totals(prepared)
    known = slopes(algorithm, prepared, totals)
    d_logp, d_entropy, d_value = by_autograd(algorithm, prepared, evaluation, totals)
    assert float(d_logp.abs().max()) > 0
    assert torch.allclose(known.logp(evaluation.logp), d_logp, rtol=1e-12, atol=1e-14)
    assert torch.allclose(torch.full_like(d_entropy, known.entropy), d_entropy, rtol=1e-12, atol=0)
    if algorithm.critic is not None:
        assert torch.allclose(known.value(evaluation.value), d_value, rtol=1e-12, atol=1e-14)


def test_negative_control_another_clip_has_other_slopes():
    prepared, evaluation = made(METHODS["ppo"])
    totals = METHODS["ppo"].totals(prepared)
    other = replace(METHODS["ppo"], surrogate=clip(0.05, 0.05))
    d_logp, _, _ = by_autograd(METHODS["ppo"], prepared, evaluation, totals)
    assert not torch.allclose(slopes(other, prepared, totals).logp(evaluation.logp), d_logp)


def test_what_is_not_known_is_left_to_autograd():
    ppo = METHODS["ppo"]
    assert not has_slopes(replace(ppo, surrogate=dual_clip()))
    assert not has_slopes(replace(ppo, kl=KL(coefficient=0.1, where="loss")))
    assert not has_slopes(replace(ppo, surrogate=lambda logp, log_ratio, advantage: -log_ratio * advantage))
    assert not has_slopes(resolve("gspo"))
    mask = torch.ones(N, T, dtype=torch.bool)
    mask[2, 5:] = False
    prepared, _ = made(ppo, mask=mask)
    assert slopes(ppo, prepared, ppo.totals(prepared)) is None


def test_a_step_that_a_filter_leaves_out_has_no_slope():
    """Two steps of return 3, of which the first counts: −A/2 = −1.5, and 0."""
    batch = Batch(torch.ones(1, 2, dtype=torch.bool), torch.tensor([[3.0, 0.0]]), torch.zeros(1, 2), torch.zeros(1))
    first = replace(control_catalog.REINFORCE_TOTAL_RETURN, keep=(lambda batch: torch.tensor([[True, False]]),))
    prepared = first.prepare(batch, {})
    assert slopes(first, prepared, first.totals(prepared)).logp(batch.logp_old).tolist() == [[-1.5, 0.0]]
    alone = prepared.steps().select(torch.tensor([1]))
    assert slopes(first, alone, first.totals(prepared)).logp(torch.zeros(1, 1)).tolist() == [[0.0]]


@pytest.mark.parametrize("tokens", [1, 2])
def test_closed_slopes_divide_the_entropy_by_the_steps(tokens):
    method = replace(resolve("reinforce"), kl=None, entropy=bonus(0.5))
    batch = rows([[1]], reward=[[1.0]])
    prepared = method.prepare(batch, method.initial_state())
    assert slopes(method, prepared, Totals(1, tokens, tokens)).entropy == pytest.approx(-0.5 / tokens)


def test_closed_slopes_need_rows_that_are_all_kept():
    method = replace(resolve("reinforce"), kl=None)
    prepared = method.prepare(rows([[1, 1], [1, 1]], reward=[[0.0, 1.0], [0.0, 0.0]]), method.initial_state())
    dropped = replace(prepared, keep=torch.tensor([True, False]))
    assert slopes(method, dropped, Totals(1, 2, 2)) is None
    assert slopes(method, prepared, Totals(2, 4, 4)) is not None
    idle = replace(prepared, needs_gradient=torch.tensor([True, False]))  # all rows count, one has nothing to teach
    assert not idle.is_full and slopes(method, idle, Totals(2, 4, 4)) is not None


@pytest.mark.parametrize("moved", [-0.3, -0.05, 0.05, 0.3])
@pytest.mark.parametrize("target", [-1.0, -0.24, 0.0, 0.24, 1.0])
def test_the_slope_of_a_clipped_critic_is_that_of_autograd(moved, target):
    method = replace(PPO, critic=value_loss(0.5, 0.2), kl=None)
    batch = rows([[1]], reward=[[target]], value=torch.tensor([[0.0]]))
    prepared = method.prepare(batch, method.initial_state())
    totals = method.totals(prepared)
    value = torch.tensor([[moved]], requires_grad=True)
    method.critic_loss(prepared, value, totals).value.backward()
    closed = slopes(method, prepared, totals)
    torch.testing.assert_close(closed.value(value.detach()), value.grad)


@pytest.mark.parametrize("surrogate", [unclipped, clip(0.2, 0.2)])
def test_closed_slopes_agree_with_autograd_beyond_the_bound(surrogate):
    method = replace(resolve("grpo"), kl=None, surrogate=surrogate)
    old = torch.zeros(4, 3, dtype=torch.float64)
    rows = batch([1.0, 0.0, 3.0, -2.0], old, torch.float64)
    logp = torch.tensor([[0.1, 25.0, -30.0]] * 4, dtype=torch.float64)
    prepared = method.prepare(rows, {})
    totals = method.totals(prepared)
    torch.testing.assert_close(slopes(method, prepared, totals).logp(logp), gradient(method, rows, logp))
