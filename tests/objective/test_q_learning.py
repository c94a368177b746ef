"""Deep Q-learning's targets, loss and schedule, by hand."""

from __future__ import annotations

import pytest
import torch

from psigrad.objective import q_learning


def test_the_target_of_a_terminated_step_is_its_reward_and_of_a_truncated_one_is_not():
    reward, next_q = torch.tensor([1.0, 1.0]), torch.tensor([[2.0, 5.0], [2.0, 5.0]])
    found = q_learning.td_target(q_learning.back_up(reward, torch.tensor([True, False]), next_q, 0.9))
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0 + 0.9 * 5.0]))
    infinite = q_learning.td_target(q_learning.back_up(reward, torch.tensor([True, False]), torch.full((2, 2), torch.inf), 0.9))
    assert infinite[0] == 1.0  # and not 0 · inf


def test_double_dqn_values_what_the_other_network_chooses():
    next_q, choosing = torch.tensor([[2.0, 5.0]]), torch.tensor([[7.0, 1.0]])
    worth = q_learning.back_up(torch.zeros(1), torch.tensor([False]), next_q, 1.0)
    assert float(q_learning.td_target(worth, choosing)) == 2.0
    assert float(q_learning.td_target(worth)) == 5.0


def test_loss_is_quadratic_near_and_linear_far():
    q = torch.tensor([[0.5, 0.0], [3.0, 0.0]], requires_grad=True)
    loss = q_learning.q_loss(q, torch.tensor([0, 0]), torch.zeros(2))
    assert float(loss.detach()) == pytest.approx((0.5 * 0.25 + 3.0 - 0.5) / 2)
    loss.backward()
    torch.testing.assert_close(q.grad, torch.tensor([[0.25, 0.0], [0.5, 0.0]]))


def test_the_moving_average_converges_to_its_source_and_one_copies_it():
    target, source = torch.zeros(3), torch.ones(3)
    q_learning.polyak(target, source, 0.25)
    torch.testing.assert_close(target, torch.full((3,), 0.25))
    q_learning.polyak(target, source, 0.25)
    torch.testing.assert_close(target, torch.full((3,), 1 - 0.75**2))
    q_learning.polyak(target, source, 1.0)
    torch.testing.assert_close(target, source)


def test_epsilon_falls_linearly_and_stays():
    values = [q_learning.linear_epsilon(p, 0.5, 1.0, 0.1) for p in (0.0, 0.25, 0.5, 0.9)]
    assert values == pytest.approx([1.0, 0.55, 0.1, 0.1])
