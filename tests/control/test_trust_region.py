"""TRPO's step against explicit matrices, and the promises that it makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from control_worlds import Chain, Target

from psigrad.control import builder
from psigrad.objective import trust_region


def spd(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, n, generator=generator, dtype=torch.double)
    return a @ a.T + 0.1 * torch.eye(n, dtype=torch.double)


def test_conjugate_gradients_solve_a_system_in_as_many_steps_as_it_has_rows():
    matrix, b = spd(8), torch.arange(8, dtype=torch.double)
    torch.testing.assert_close(trust_region.conjugate_gradients(lambda v: matrix @ v, b, 8), torch.linalg.solve(matrix, b))
    early = trust_region.conjugate_gradients(lambda v: matrix @ v, b, 2)
    assert not torch.allclose(early, torch.linalg.solve(matrix, b))
    # yet better than nothing, in the norm that the method minimises
    error = early - torch.linalg.solve(matrix, b)
    start = torch.linalg.solve(matrix, b)
    assert error @ matrix @ error < start @ matrix @ start


def test_the_step_on_a_quadratic_is_the_closed_form():
    """max gᵀs subject to ½ sᵀFs ≤ δ has s = √(2δ / gᵀF⁻¹g)·F⁻¹g."""
    matrix, g = spd(5, 1), torch.randn(5, dtype=torch.double)

    def measure(shift):
        return float(g @ shift), 0.999 * float(shift @ matrix @ shift / 2)  # the bound itself is met up to rounding

    taken = trust_region.step(g, lambda v: matrix @ v, measure, max_kl=0.01, cg_steps=10)
    natural = torch.linalg.solve(matrix, g)
    torch.testing.assert_close(taken.shift, (0.02 / (g @ natural)) ** 0.5 * natural, rtol=1e-6, atol=1e-9)
    assert taken.tries == 1 and taken.kl == pytest.approx(0.00999)


def test_the_line_search_shrinks_until_both_promises_hold_or_gives_up():
    matrix, g = torch.eye(3, dtype=torch.double), torch.ones(3, dtype=torch.double)
    full = trust_region.step(g, lambda v: matrix @ v, lambda s: (1.0, 0.0), max_kl=0.5).shift
    third = trust_region.step(g, lambda v: matrix @ v, lambda s: (1.0, 9.0 if s.norm() > 0.7 * full.norm() else 0.1), max_kl=0.5)
    torch.testing.assert_close(third.shift, 0.8**2 * full)
    never = trust_region.step(g, lambda v: matrix @ v, lambda s: (-1.0, 0.0), max_kl=0.5, tries=4)
    assert never.tries == 4 and not never.shift.any()
    flat = trust_region.step(0 * g, lambda v: matrix @ v, lambda s: (1.0, 0.0), max_kl=0.5)
    assert flat.tries == 0 and not flat.shift.any()


@pytest.mark.parametrize("env", [Chain, Target], ids=["discrete", "continuous"])
def test_the_fisher_product_is_the_expected_outer_product_of_scores(env):
    made = builder.build(builder.settings("trpo", env, {"tuned": False, "n_envs": 2, "net_arch": (3,), "n_steps": 8}))
    network = made.network
    network.towers.double()
    network.towers._viewed = None
    observation = torch.randn(6, made.collector.envs.size, dtype=torch.double)
    out = network.plain(observation)
    kl = network.distribution.kl(out.policy.detach(), out.rest.detach(), out.policy, out.rest).mean()
    product = trust_region.fisher_product(kl, network.flat, 0.0)
    n = len(network.flat)
    ours = torch.stack([product(v) for v in torch.eye(n, dtype=torch.double)])
    explicit = torch.zeros(n, n, dtype=torch.double)
    if env is Chain:  # Σ_a π(a|s)·∇log π ∇log πᵀ
        cases = [(torch.full((6,), a), torch.softmax(out.policy, -1)[:, a]) for a in range(2)]
    else:  # Gauss-Hermite quadrature is exact for the products of a normal's scores
        nodes, weights = np.polynomial.hermite_e.hermegauss(8)
        std = out.rest.exp().detach()
        cases = [
            ((out.policy.detach() + x * std), torch.full((6,), w / np.sqrt(2 * np.pi), dtype=torch.double))
            for x, w in zip(nodes, weights, strict=True)
        ]
    for actions, weight in cases:
        logp = network.distribution.log_prob(out.policy, out.rest, actions)
        for i in range(6):
            (score,) = torch.autograd.grad(logp[i], network.flat, retain_graph=True)
            explicit += float(weight[i]) / 6 * torch.outer(score, score)
    torch.testing.assert_close(ours, explicit, rtol=1e-6, atol=1e-9)


def test_every_step_of_training_keeps_its_promises():
    given = {"tuned": False, "n_envs": 4, "n_steps": 32, "learning_rate": 1e-2, "total_timesteps": 8_000, "gamma": 0.9}
    made = builder.build(builder.settings("trpo", Chain, given))
    made.restart()
    accepted = 0
    while made.timesteps < 8_000:
        figures = made.iterate()
        assert figures["policy/approxkl_avg"] <= 0.01 and figures["trpo/improvement"] >= 0
        accepted += figures["trpo/accepted"]
    assert accepted > 10  # at the optimum there is nothing left to improve
    np.testing.assert_array_equal(made.network.act(np.eye(4, dtype=np.float32)[:3]), [1, 1, 1])


@pytest.mark.parametrize("damping", [0.0, 0.25])
def test_a_step_is_taken_by_the_settings(damping, monkeypatch):
    """The Fisher matrix has the damping on its diagonal, F·v + 0.25 v; the critic is fitted in so many passes of minibatches."""
    given = {"tuned": False, "n_envs": 2, "n_steps": 16, "batch_size": 16, "total_timesteps": 100, "network.critic": "separate"}
    given |= {"max_kl": 0.02, "cg_max_steps": 3, "cg_damping": damping, "n_critic_updates": 4}
    given |= {"line_search_shrinking_factor": 0.7, "line_search_max_iter": 5}
    made = builder.build(builder.settings("trpo", Chain, given))
    made.restart()
    asked, updates, fisher = [], [], trust_region.fisher_product

    def step(gradient, product, measure, **named):
        v = torch.ones_like(gradient)
        asked.append((product(v) - undamped[0](v), named))
        return trust_region.TrustRegionStep(torch.zeros_like(gradient), 0.0, 0.0, 1)

    undamped = []

    def products(kl, start, damping):
        undamped.append(fisher(kl, start, 0.0))
        return fisher(kl, start, damping)

    monkeypatch.setattr(trust_region, "step", step)
    monkeypatch.setattr(trust_region, "fisher_product", products)
    monkeypatch.setattr(made, "apply_gradient", lambda gradient, rate: updates.append(rate))
    made.iterate()
    ((more, named),) = asked
    torch.testing.assert_close(more, torch.full_like(more, damping), rtol=0, atol=1e-6)
    assert named == {"max_kl": 0.02, "cg_steps": 3, "shrink": 0.7, "tries": 5}
    assert len(updates) == 4 * 2, "32 steps are two minibatches"
    assert made.moves == 1, "the policy's step, which no optimiser took"


def test_the_critics_error_is_the_mean_of_the_last_pass(monkeypatch):
    """Values that stay where they are, as no step is taken: half the mean squared distance from the returns, in minibatches."""
    given = {"tuned": False, "n_envs": 2, "n_steps": 16, "batch_size": 16, "total_timesteps": 100, "network.critic": "separate"}
    made = builder.build(builder.settings("trpo", Chain, given | {"n_critic_updates": 3}))
    made.restart()
    seen, prepare = [], type(made.algorithm).prepare
    monkeypatch.setattr(type(made.algorithm), "prepare", lambda *given, **how: seen.append(prepare(*given, **how)) or seen[-1])
    monkeypatch.setattr(made, "apply_gradient", lambda gradient, rate: None)
    figures = made.iterate()
    steps = seen[0].steps()
    value, returns = steps.batch.value, steps.returns
    error = float(made.algorithm.critic(value, value, returns).mean()) * made.algorithm.critic.coefficient
    assert figures["value_loss"] == pytest.approx(error, rel=1e-5) and error > 0.01
