"""Every way in which Gymnasium begins an episode again gives the same data."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from control_worlds import Counter, Target
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from psigrad.control.environments import vector
from psigrad.control.environments.collector import Collector, Normalizer, play
from psigrad.control.environments.vector import Environments, Serial
from psigrad.errors import UserError

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def environments(mode: AutoresetMode | None, count: int = 2) -> Environments:
    makers = [lambda i=i: Counter((2, 3) if i == 0 else (4, 1, 2)) for i in range(count)]
    if mode is None:
        return Environments(Serial([make() for make in makers]))
    return Environments(SyncVectorEnv(makers, autoreset_mode=mode))


def collector(envs: Environments) -> Collector:
    made = Collector(envs, Normalizer(envs.size, envs.count, 0.99, False, False))
    made.restart(0)
    return made


def rows(rollout):
    """Each row as (episode, first step, rewards, terminated, truncated, what came after)."""
    found = []
    for n in range(len(rollout.terminated)):
        own = rollout.row == n
        episode, first = rollout.observation[own][0]
        end = (bool(rollout.terminated[n]), bool(rollout.truncated[n]), rollout.after[n].tolist())
        found.append((int(episode), int(first), rollout.reward[own].tolist(), *end))
    return found


def act(observation):
    return np.ones(len(observation), np.int64)


@pytest.mark.parametrize("mode", [*MODES, None], ids=lambda m: m.name if m else "serial")
def test_rows_are_whole_episodes_with_their_ends(mode):
    found = rows(collector(environments(mode)).episodes(act, 3, seed=0))
    assert found == [
        (0, 0, [1, 2], True, False, [0, 2]),
        (1, 0, [1, 2, 3], False, True, [1, 3]),
        (2, 0, [1, 2], True, False, [2, 2]),
        (0, 0, [1, 2, 3, 4], True, False, [0, 4]),
        (1, 0, [1], False, True, [1, 1]),
        (2, 0, [1, 2], True, False, [2, 2]),
    ]


@pytest.mark.parametrize("mode", [*MODES, None], ids=lambda m: m.name if m else "serial")
def test_a_window_cuts_rows_and_the_next_one_goes_on(mode):
    rest = mode is AutoresetMode.NEXT_STEP  # a step in which an episode only begins is nobody's
    made = collector(environments(mode, count=1))
    first, second = made.steps(act, 3 + rest), made.steps(act, 2 + rest)
    assert rows(first) == [(0, 0, [1, 2], True, False, [0, 2]), (1, 0, [1], False, False, [1, 1])]
    assert rows(second)[0] == (1, 1, [2, 3], False, True, [1, 3])
    # the step after the end of episode 1 belongs to the next window in NEXT_STEP, whose last step only begins episode 2
    assert made.statistics.episodes == 2 and list(made.statistics.returns) == [3.0, 6.0]


def test_negative_control_to_take_one_mode_for_another_mixes_episodes_up():
    envs = environments(AutoresetMode.SAME_STEP, count=1)
    envs.mode = AutoresetMode.NEXT_STEP
    assert rows(collector(envs).steps(act, 8)) != rows(collector(environments(None, count=1)).steps(act, 8))


def test_figures_count_only_steps_that_the_policy_chose():
    made = collector(environments(AutoresetMode.NEXT_STEP))
    made.steps(act, 40)
    assert set(made.statistics.lengths) == {1, 2, 3, 4} and set(made.statistics.returns) == {1.0, 3.0, 6.0, 10.0}


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_play_gives_each_environment_the_same_share(mode):
    returns, lengths, _ = play(environments(mode), act, 6, seed=0)
    assert sorted(lengths) == [1, 2, 2, 2, 3, 4] and sorted(returns) == [1, 3, 3, 3, 6, 10]


def test_cartpoles_own_vector_form_and_a_plain_loop_agree():
    """The same dynamics: episodes under a fixed policy are equally long, whoever steps them."""

    def lengths(how):
        envs = vector.make("CartPole-v1", 16, how)
        return np.array(play(envs, lambda o: (o[:, 2] + 0.5 * o[:, 3] > 0).astype(np.int64), 64, seed=1)[1])

    a, b = lengths("vector_entry_point"), lengths("serial")
    spread = np.sqrt(a.var() / len(a) + b.var() / len(b)) + 1e-9
    assert abs(a.mean() - b.mean()) < 4 * spread + 1


def test_actions_and_observations_are_mapped():
    box = vector.make(Target, 3)
    seen = box.reset(0)
    assert seen.shape == (3, 1) and seen.dtype == np.float32
    np.testing.assert_array_equal(box.to_env(np.float32([[5], [-5], [1]])), np.float32([[2], [-2], [1]]))
    lake = vector.make("FrozenLake-v1", 2)
    np.testing.assert_array_equal(lake.reset(0), np.eye(16, dtype=np.float32)[[0, 0]])

    class Shifted(Counter):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Discrete(2, start=5)

    np.testing.assert_array_equal(vector.make(Shifted, 1).to_env(np.array([0, 1])), [5, 6])


def test_what_cannot_be_handled_is_said_in_a_sentence():
    class Picture(Counter):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict({name: spaces.Box(0, 255, (8, 8, 3), np.uint8) for name in "ab"})

    class Words(Counter):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Text(3)

    said_of = {
        Picture: "several images",
        Words: "MultiDiscrete",
        "NoSuch-v1": "NoSuch",
        "no_module:A-v1": "no_module",
    }
    for make, said in (said_of | {"CartPole-v1": "env_kwargs has 'gravitation'.*takes.*sutton_barto"}).items():
        kwargs = {"gravitation": 3} if make == "CartPole-v1" else {}
        with pytest.raises(UserError, match=said):
            vector.make(make, 1, **kwargs)
    with pytest.raises(UserError, match="n_envs=1"):
        vector.make(gym.make("CartPole-v1"), 2)
    envs = SyncVectorEnv([Counter])
    envs.metadata = {}
    with pytest.raises(UserError, match="autoreset_mode"):
        vector.make(envs)


def test_the_normaliser_tracks_mean_and_deviation_and_changes_between_rollouts_only():
    made = collector(environments(None))
    made.normalizer = Normalizer(2, 2, 0.9, True, True)
    first = made.steps(act, 20)
    np.testing.assert_array_equal(first.observation[:2, 1], [0, 1])  # the first rollout is seen as it is
    raw = first.observation
    np.testing.assert_allclose(made.normalizer.observation_moments.mean, raw.mean(0), atol=1e-3)
    np.testing.assert_allclose(made.normalizer.observation_moments.var, raw.var(0), rtol=1e-3)
    second = made.steps(act, 50)
    assert abs(second.observation[:, 1].mean()) < 0.2 and abs(second.observation[:, 1].std() - 1) < 0.2
    again = Normalizer(2, 2, 0.9, True, True)
    again.restore(made.normalizer.state())
    assert again.state() == made.normalizer.state()


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    made = Normalizer(1, 1, 0.5, False, True)
    rng = np.random.default_rng(0)
    reward = rng.normal(size=(5000, 1)).astype(np.float32)
    made.learn_rewards(reward, np.zeros((5000, 1), bool))
    # returns are an autoregression of coefficient 1/2: variance 1 / (1 − 1/4)
    assert made.return_moments.var[0] == pytest.approx(4 / 3, rel=0.1)
    np.testing.assert_allclose(made.scale(reward), reward / np.sqrt(made.return_moments.var[0]), rtol=1e-5)
