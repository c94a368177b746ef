"""The critic's loss and the entropy bonus."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from edge_batches import rows

from psigrad.objective import PolicyOutputs, Totals
from psigrad.objective.catalog import GRPO
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
