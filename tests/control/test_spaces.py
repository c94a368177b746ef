"""Spaces of several parts: observations as Gymnasium flattens them, actions of several choices, and learning on both."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest
from control_worlds import Locks
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from psigrad.control import A2C, DQN, PPO, TRPO, Agent, evaluate_policy
from psigrad.control.environments import spaces as meanings
from psigrad.control.environments.vector import Environments, Serial
from psigrad.errors import UserError

INNER = {"b": spaces.Box(-np.inf, 4, (2, 2), np.float32), "a": spaces.Discrete(3, start=-1), "c": spaces.MultiBinary((2, 2))}
SPACES = [
    spaces.Dict(INNER),
    spaces.Dict(
        {"deep": spaces.Dict(INNER), "pair": spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([2, 3], start=[1, -1])])}
    ),
    spaces.Tuple([spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2)]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary(5),
    spaces.Discrete(4, start=2),
    spaces.Box(np.array([0, -1.5]), np.array([np.inf, 2.5]), dtype=np.float64),
    spaces.Box(0, 255, (8, 9, 3), np.uint8),
]


def name(space):
    return type(space).__name__


@pytest.mark.parametrize("space", SPACES[:6], ids=name)
def test_observations_of_parts_are_flattened_as_gymnasium_does(space):
    space.seed(0)
    size, flatten = meanings.observations(space)
    rows = [space.sample() for _ in range(4)]
    expected = np.stack([spaces.flatten(space, row) for row in rows]).astype(np.float32)
    found = flatten(meanings.stack(space, rows))
    assert size == spaces.flatdim(space) and found.dtype == np.float32
    # gymnasium ignores where a MultiDiscrete starts, but for Discrete it does not
    np.testing.assert_array_equal(found, expected)
    batch, single = meanings.batch_of(space, rows[2])
    assert single
    np.testing.assert_array_equal(flatten(batch), expected[2:3])
    assert not meanings.batch_of(space, meanings.stack(space, rows))[1]


@pytest.mark.parametrize("space", SPACES, ids=name)
def test_a_space_comes_back_from_json(space):
    text = json.dumps(meanings.to_json(space), allow_nan=False)
    again = meanings.from_json(json.loads(text))
    assert again == space and meanings.to_json(again) == meanings.to_json(space)


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_a_vector_of_dictionaries_gives_what_a_plain_loop_gives(mode):
    vectors = Environments(SyncVectorEnv([Locks] * 3, autoreset_mode=mode))
    plain = Environments(Serial([Locks() for _ in range(3)]))
    np.testing.assert_array_equal(vectors.reset(7), plain.reset(7))
    action = np.zeros((3, 2), np.int64)
    one, other = vectors.step(action), plain.step(action)
    np.testing.assert_array_equal(one.reward, other.reward)
    last = [one.last.get(i, one.observation[i]) for i in range(3)]  # NEXT_STEP shows the last observation itself
    np.testing.assert_array_equal(last, [other.last[i] for i in range(3)])


@pytest.mark.parametrize(
    ("cls", "world", "settings"),
    [
        (PPO, Locks, {"n_epochs": 4, "batch_size": 128}),
        (PPO, lambda: Locks(binary=True), {"n_epochs": 4, "batch_size": 128}),
        pytest.param(A2C, Locks, {"optimizer": "adam"}, marks=pytest.mark.slow),
        pytest.param(TRPO, Locks, {"batch_size": 128}, marks=pytest.mark.slow),
    ],
    ids=["ppo", "ppo of binary choices", "a2c", "trpo"],
)
def test_policies_learn_to_see_every_part_and_to_make_every_choice(cls, world, settings):
    agent = cls("MultiInputPolicy", world, n_envs=8, n_steps=32, learning_rate=1e-2, log_interval=10, **settings)
    assert evaluate_policy(agent, n_eval_episodes=200)[0] < 0.8
    agent.learn(12_000)
    assert evaluate_policy(agent, n_eval_episodes=400)[0] > 0.95


def test_one_observation_of_parts_and_a_batch_are_predicted_alike():
    agent = PPO(Locks, n_envs=2)
    space = agent.observation_space
    space.seed(1)
    rows = [space.sample() for _ in range(5)]
    batch, _ = agent.predict(meanings.stack(space, rows), deterministic=True)
    singles = [agent.predict(row, deterministic=True)[0] for row in rows]
    np.testing.assert_array_equal(batch, singles)
    assert agent.action_space.contains(singles[0])
    for wrong, said in (({"dial": 0.0}, "a value for"), (np.zeros(4), "a value"), ({"dial": [[[0.0]]], "colour": 1}, "shape")):
        with pytest.raises(UserError, match=said):
            agent.predict(wrong)


def test_methods_of_single_choices_refuse_several():
    for make in (lambda: DQN(Locks, n_envs=1), lambda: Agent(Locks, algorithm="q_actor_critic")):
        with pytest.raises(UserError, match="one at a time"):
            make()
    with pytest.raises(UserError, match="needs a Dict"):
        PPO("MultiInputPolicy", "CartPole-v1")


def test_a_tuple_of_gymnasiums_own_is_played():
    agent = PPO("Blackjack-v1", n_envs=4, n_steps=32).learn(512)
    observation, _ = gym.make("Blackjack-v1").reset(seed=0)
    assert agent.predict(observation)[0] in (0, 1)


@pytest.mark.parametrize(
    ("space", "outside"),
    [
        (spaces.Discrete(4), [-1, 4, -4]),
        (spaces.Discrete(3, start=2), [1, 5]),
        (spaces.MultiDiscrete([2, 3]), [[0, -1], [2, 0]]),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.MultiBinary(1)}), [{"a": -1, "b": np.zeros(1, np.int8)}]),
    ],
    ids=["Discrete", "Discrete from 2", "MultiDiscrete", "Dict"],
)
def test_a_choice_outside_its_space_is_refused_by_training_and_by_predict(space, outside):
    class World(gym.Env):
        observation_space, action_space = space, spaces.Discrete(2)
        seen = None

        def reset(self, *, seed=None, options=None):
            return self.seen or space.sample(), {}

        def step(self, action):
            return self.reset()[0], 0.0, False, False, {}

    agent = PPO(World, n_envs=1, n_steps=4).learn(4)
    for wrong in outside:
        assert not space.contains(wrong)
        with pytest.raises(UserError, match="expected a value in the observation_space"):
            agent.predict(wrong)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="outside its observation_space"):
            patch.setattr(World, "seen", wrong)
            agent.learn(4)
