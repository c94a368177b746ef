"""Deep Q-learning: targets, replay, the slow copy, and the exact values of a small world."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from control_worlds import Chain, Counter

from psigrad.control import DQN, builder
from psigrad.control.methods.dqn import ReplayBuffer
from psigrad.objective import q_learning


def build(env, **given):
    settings = {"tuned": False, "n_envs": 1, "batch_size": 32, "learning_rate": 3e-3, "max_grad_norm": 10.0, **given}
    made = builder.build(builder.settings("dqn", env, settings))
    made.restart()
    return made


def test_the_ring_keeps_the_newest():
    ring = ReplayBuffer(5, 1)
    for start in (0, 3, 6):
        ids = np.arange(start, start + 3)
        ring.add(
            observation=ids[:, None].astype(np.float32),
            action=ids,
            reward=ids.astype(np.float32),
            next_observation=ids[:, None].astype(np.float32) + 1,
            terminated=ids % 2 == 0,
        )
    drawn = ring.sample(2000, np.random.default_rng(0))
    assert set(drawn.action.tolist()) == {4, 5, 6, 7, 8} and len(ring) == 5
    counts = np.bincount(drawn.action.numpy())[4:]
    assert counts.min() > 320  # 400 each, five standard errors
    torch.testing.assert_close(drawn.observation[:, 0] + 1, drawn.next_observation[:, 0])
    assert (drawn.terminated == (drawn.action % 2 == 0)).all()
    other = ReplayBuffer(5, 1)
    other.load(ring.tensors())
    torch.testing.assert_close(other.sample(9, np.random.default_rng(1)).reward, ring.sample(9, np.random.default_rng(1)).reward)
    for capacity, kept in ((3, [6, 7, 8]), (7, [4, 5, 6, 7, 8])):
        taken = ReplayBuffer(capacity, 1)
        taken.take(ring.tensors())
        assert taken._data["action"][: len(taken)].tolist() == kept
    with pytest.raises(ValueError, match=r"observation of shape \[1\]; expected observation of shape \[2\]"):
        ReplayBuffer(5, 2).take(ring.tensors())
    with pytest.raises(ValueError, match="learning_starts"):
        ReplayBuffer(5, 1).sample(1, np.random.default_rng(0))


def test_what_followed_is_of_the_same_episode_and_only_termination_ends_it():
    made = build(lambda: Counter((2, 3)), train_freq=20, learning_starts=5)
    made._remember(made.collector.steps(lambda o: np.zeros(len(o), np.int64), 20))
    data = made.replay._data
    n = len(made.replay)
    np.testing.assert_array_equal(data["next_observation"][:n, 0], data["observation"][:n, 0])
    np.testing.assert_array_equal(data["next_observation"][:n, 1], data["observation"][:n, 1] + 1)
    episode, step = data["observation"][:n, 0], data["observation"][:n, 1]
    np.testing.assert_array_equal(data["terminated"][:n], (episode % 2 == 0) & (step == 1))


FORMS = {"hard": {}, "double": {"double_q": True}, "moving": {"tau": 0.05, "target_update_interval": 4}}


@pytest.mark.parametrize(
    "given", [pytest.param(form, id=name, marks=() if name == "double" else pytest.mark.slow) for name, form in FORMS.items()]
)
def test_q_values_converge_to_the_exact_ones(given):
    """The chain's optimal Q by hand: right is worth γ^(steps left − 1); left costs 0.02 and starts again from state 0."""
    gamma = 0.9
    settings = {"learning_starts": 100, "train_freq": 4, "gradient_steps": 4, "target_update_interval": 50, "gamma": gamma}
    made = build(Chain, total_timesteps=5_000, exploration_final_eps=0.3, net_arch=(32,), **{**settings, **given})
    while made.timesteps < 5_000:
        made.iterate()
    right = np.array([gamma**2, gamma, 1.0])
    exact = np.stack([np.full(3, -0.02 + gamma * right[0]), right], axis=1)
    found = made.network(torch.eye(4)[:3]).policy.numpy()
    np.testing.assert_allclose(found, exact, atol=0.05)


def test_the_target_network_moves_when_it_is_due_and_not_before():
    made = build(Chain, learning_starts=8, train_freq=4, target_update_interval=12, total_timesteps=100)
    start = made.target.clone()
    made.iterate()
    made.iterate()
    torch.testing.assert_close(made.target, start, rtol=0, atol=0)
    before = made.network.flat.detach().clone()
    made.iterate()  # the twelfth transition: the copy is taken before this collection's update
    torch.testing.assert_close(made.target, before, rtol=0, atol=0)
    assert not torch.equal(made.network.flat.detach(), before)


def test_the_target_follows_by_tau_once_in_an_interval():
    """From 0 towards 1 by ¼: 0.25, then 1 - 0.75² = 0.4375."""
    made = build(Chain, tau=0.25, target_update_interval=12)
    made.target.zero_()
    with torch.no_grad():
        made.network.flat.fill_(1.0)
    found = []
    for collected in (4, 7, 1, 11, 1):
        made._follow(collected)
        found.append(float(made.target[0]))
    assert found == [0.0, 0.0, 0.25, 0.25, 0.4375] and float(made.target.min()) == 0.4375


def test_the_slope_of_the_loss_equals_autograd():
    draw = torch.Generator().manual_seed(0)
    q = (3 * torch.randn(64, 4, generator=draw, dtype=torch.double)).requires_grad_()
    action, target = torch.randint(4, (64,), generator=draw), torch.randn(64, generator=draw, dtype=torch.double)
    loss = q_learning.q_loss(q, action, target)
    (expected,) = torch.autograd.grad(loss, q)
    slope = q_learning.q_slope(q.detach(), q_learning.shares(action, 4, 64), target)
    assert torch.allclose(slope, expected, rtol=1e-12, atol=0)


def test_no_gradient_steps_learn_nothing():
    made = build(Chain, learning_starts=4, train_freq=4, gradient_steps=0, total_timesteps=100)
    start = made.network.flat.detach().clone()
    for _ in range(4):
        made.iterate()
    assert made.timesteps == 16 and torch.equal(made.network.flat.detach(), start)


def test_an_iteration_is_counted_once():
    """By the count the numbers of an iteration are drawn; a run that goes on begins from it."""
    made = build(Chain, total_timesteps=100, learning_starts=50)
    for _ in range(3):
        made.iterate(False)
    assert made.iterations == 3 and made.timesteps == 3 * made.config.dqn.train_freq


def test_lines_are_printed_by_episodes_as_stable_baselines_does_for_dqn_alone():
    ppo = builder.build(builder.settings("ppo", Chain, {"tuned": False}))
    assert build(Chain, total_timesteps=5000).prints_by_episode and not ppo.prints_by_episode


def test_a_ring_goes_round_for_ever():
    """Three places and eight transitions: the sixth to the eighth stay, the sixth where the third was."""
    ring = ReplayBuffer(3, 1)
    for i in range(8):
        one = np.full((1, 1), i, np.float32)
        ring.add(observation=one, next_observation=one, action=np.array([i]), reward=one[0], terminated=np.array([False]))
    assert len(ring) == 3 and ring.tensors()["action"].tolist() == [6, 7, 5]


def test_a_loaded_policy_is_its_own_target_and_learns_once_there_are_enough_transitions(tmp_path):
    given = {"tuned": False, "n_envs": 1, "batch_size": 8, "learning_starts": 32, "target_update_interval": 10_000}
    agent = DQN(Chain, **given).learn(64)
    assert not torch.equal(agent._trainer.target, agent._trainer.network.flat)
    made = DQN.load(agent.save(tmp_path), env=Chain)._trainer
    assert torch.equal(made.target, made.network.flat) and torch.equal(made.target, agent._trainer.network.flat)
    made.restart()
    for _ in range(8):
        made.iterate()
    assert made.timesteps == 64 + 32 and made.updates == 0, "32 transitions, and learning_starts is 32"
    made.iterate()
    assert made.updates == 1
