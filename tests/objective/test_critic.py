"""The critic's loss and the entropy bonus."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from edge_batches import rows, world

from psigrad.config.algorithms import resolve
from psigrad.objective import PolicyOutputs, Totals
from psigrad.objective.catalog import GRPO
from psigrad.objective.parts.advantage import gae, reward_to_go, whitened
from psigrad.objective.parts.critic import bonus, value_loss


def test_value_loss_by_hand() -> None:
    # R = 1, V_old = 0: V = .5 costs (.5)²/2; with clip .2 the clipped value .2 costs more, .8²/2.
    value, old, returns = (torch.tensor([x]) for x in (0.5, 0.0, 1.0))
    assert value_loss()(value, old, returns).item() == pytest.approx(0.125)
    assert value_loss(clip=0.2)(value, old, returns).item() == pytest.approx(0.32)


@pytest.mark.parametrize(("tokens", "divisor"), [(0, 1), (1, 1), (2, 2)])
def test_the_entropy_bonus_is_a_mean_over_steps(tokens, divisor):
    method = replace(GRPO, kl=None, entropy=bonus(0.5), keep=())
    batch = rows([[1, 1], [1, 1]], reward=[[0.0, 1.0], [0.0, 0.0]])
    prepared, totals = method.prepare(batch, method.initial_state()), Totals(2, tokens, 4)
    with_bonus, without = (
        float(m.loss(prepared, PolicyOutputs(batch.logp_old, entropy=torch.ones(2, 2)), totals, prepared.state).value)
        for m in (method, replace(method, entropy=None))
    )
    assert with_bonus - without == pytest.approx(-0.5 * 4 / divisor)


def test_a_critic_may_have_an_estimator_of_returns_of_its_own():
    rows, _ = world()
    apart = replace(resolve("ppo"), kl=None, psi=gae(1.0, 0.5), critic=value_loss(returns=gae(1.0, 1.0)))
    together = replace(apart, critic=value_loss())
    prepared, plain = apart.prepare(rows, {}), together.prepare(rows, {})
    torch.testing.assert_close(prepared.advantage, plain.advantage, rtol=0, atol=0)
    to_go = reward_to_go()(rows)  # λ = 1: the critic learns the return itself
    torch.testing.assert_close(prepared.returns[rows.mask], to_go[rows.mask])
    assert not torch.allclose(plain.returns[rows.mask], to_go[rows.mask])
    with pytest.raises(ValueError, match=r"critic\.returns is whitened or has a state"):
        replace(resolve("ppo"), critic=value_loss(returns=whitened(gae())))
