"""Forms 4 and 5 of Ψ: a critic of actions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, PolicyGradient
from psigrad.objective.parts import aggregate, ratio
from psigrad.objective.parts.advantage import action_advantage, action_value, needs_of
from psigrad.objective.parts.critic import value_loss
from psigrad.objective.parts.surrogate import score

MASK = torch.tensor([[True, True, False], [True, False, True]])
BATCH = Batch(
    mask=MASK,
    reward=torch.zeros(2, 3),
    logp_old=torch.zeros(2, 3),
    group=torch.arange(2),
    value=torch.tensor([[1.0, 2.0, float("nan")], [3.0, float("inf"), 4.0]]),
    action_value=torch.tensor([[1.5, 1.0, float("nan")], [3.0, 9.0, 4.25]], requires_grad=True),
)


def method(psi, critic=None) -> PolicyGradient:
    return PolicyGradient(psi, ratio.none, score, aggregate.sequence_sum, critic=critic)


def test_they_are_the_critics_numbers_on_chosen_steps_and_0_elsewhere():
    assert action_value(BATCH).tolist() == [[1.5, 1.0, 0.0], [3.0, 0.0, 4.25]]
    assert action_advantage(BATCH).tolist() == [[0.5, -1.0, 0.0], [0.0, 0.0, 0.25]]
    assert not action_value(BATCH).requires_grad


def test_the_critic_of_states_learns_from_the_critic_of_actions():
    prepared = method(action_advantage, value_loss()).prepare(BATCH, {})
    assert torch.equal(prepared.returns, BATCH.action_value)


def test_they_follow_their_rows():
    assert action_value(BATCH.select(torch.tensor([1]))).tolist() == [[3.0, 0.0, 4.25]]


def test_what_is_missing_is_said():
    assert needs_of(action_advantage) == {"value", "action_value"} and needs_of(action_value) == {"action_value"}
    with pytest.raises(ValueError, match="no `action_value`"):
        method(action_value).prepare(replace(BATCH, action_value=None), {})
    with pytest.raises(ValueError, match="no `value`"):
        action_advantage(replace(BATCH, value=None))
    with pytest.raises(ValueError, match="critic is None"):
        method(action_advantage)
    with pytest.raises(ValueError, match="action_value has shape"):
        replace(BATCH, action_value=torch.zeros(2, 4))


def test_they_have_short_names():
    spec = {"ratio": "none", "surrogate": "score", "aggregate": "sequence_sum"}
    assert resolve({**spec, "psi": "action_value"}).psi is action_value
    assert resolve({**spec, "psi": "action_advantage", "critic": {}}).psi is action_advantage
