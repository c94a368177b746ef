"""Evaluations: as many episodes as were asked for, none chosen by its length, and an end even where the environment has none."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from PIL import Image

from psigrad import cli
from psigrad.control import PPO, REINFORCE, evaluate_policy
from psigrad.control.environments import collector, vector
from psigrad.control.environments.vector import make
from psigrad.errors import UserError

SMALL = {"tuned": False, "n_envs": 2, "n_steps": 16}


class Fixed(gym.Env):
    """Episodes of `length` steps, each worth 1; 0: without an end."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, length: int = 0) -> None:
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == self.length, False, {}


class Ends(Fixed):
    """Ends for good after nine steps."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self.t == 9, False, info


def act(observation):
    return np.zeros(len(observation), np.int64)


@pytest.mark.parametrize("episodes", [1, 3, 7, 50])
def test_each_environment_plays_its_share_and_no_more(episodes):
    """One environment has short episodes and one long ones. Stable-Baselines3's shares: (n + i) // E of environment i."""
    envs = make(SyncVectorEnv([lambda: Fixed(2), lambda: Fixed(40), lambda: Fixed(9)]))
    _, lengths, cut = collector.play(envs, act, episodes, seed=0)
    shares = [(episodes + i) // 3 for i in range(3)]
    assert [lengths.count(n) for n in (2, 40, 9)] == shares and len(lengths) == episodes and not cut


def test_the_command_and_evaluate_policy_play_as_many_as_asked(tmp_path):
    out = tmp_path / "run"
    given = ["--total-timesteps", "64", "--eval-episodes", "50", "--no-progress", "--no-report", "--output-dir", str(out)]
    assert cli.main(["control", "ppo", "--env", "CartPole-v1", *given]) == 0
    assert len((out / "rollouts.jsonl").read_text().splitlines()) == 50
    agent = PPO("CartPole-v1", **SMALL)
    assert len(evaluate_policy(agent, n_eval_episodes=37, return_episode_rewards=True)[0]) == 37


@pytest.mark.parametrize("given", ["class", "object", "own object", "copies"])
def test_an_evaluation_without_an_end_is_cut_and_says_so(given, monkeypatch):
    monkeypatch.setattr(vector, "MOST_STEPS", 30)
    own = Fixed()
    agent = PPO(own, tuned=False, n_steps=16) if given == "own object" else PPO(Fixed, **SMALL)
    env = {"class": Fixed, "object": Fixed(), "own object": own, "copies": agent.get_env()}[given]
    with pytest.warns(UserWarning, match="3 of 3 evaluated episodes were cut after 30 steps.*eval_max_steps"):
        assert evaluate_policy(agent, env, n_eval_episodes=3) == (30.0, 0.0)
    agent.learn(32)
    assert agent.get_env().envs[0] is not None and not isinstance(agent.get_env().envs[0], TimeLimit)


@pytest.mark.parametrize("vectorization", ["auto", "sync"])
def test_the_limit_is_a_setting_and_one_that_is_declared_is_kept(vectorization):
    agent = PPO("CartPole-v1", vectorization=vectorization, eval_max_steps=5, **SMALL)
    with pytest.warns(UserWarning, match="after 5 steps"):
        assert set(evaluate_policy(agent, n_eval_episodes=10, return_episode_rewards=True)[1]) == {5}
    assert make("CartPole-v1", 2, vectorization, limit=0).cut_at == 0
    assert make(Fixed, 2, limit=0).cut_at == vector.MOST_STEPS and make(Fixed, 2).cut_at == 0
    assert make(lambda: TimeLimit(Fixed(), 7), limit=0).cut_at == vector.MOST_STEPS  # its own limit comes first


def test_a_run_whose_evaluation_was_cut_warns(tmp_path, monkeypatch, capsys):
    (tmp_path / "endless.py").write_text(
        "import gymnasium as gym\nimport numpy as np\n"
        "class Endless(gym.Env):\n"
        "    observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n        super().reset(seed=seed)\n        return 0, {}\n"
        "    def step(self, action):\n        return 0, 1.0, False, False, {}\n"
        "    def __init__(self, render_mode=None):\n        self.frame, self.render_mode = 0, render_mode\n"
        "    metadata = {'render_modes': ['rgb_array']}\n"
        "    def render(self):\n        self.frame += 1\n        return np.full((8, 8, 3), self.frame % 250, np.uint8)\n"
    )
    monkeypatch.chdir(tmp_path)
    given = ["--total-timesteps", "64", "--eval-episodes", "4", "--eval-max-steps", "20", "--no-progress", "--output-dir", "run"]
    assert cli.main(["control", "ppo", "--env", "endless.py:Endless", *given, "--video"]) == 0
    said = capsys.readouterr()
    assert "Evaluated episodes were cut" in said.err and "Evaluated episodes were cut" in said.out
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert Image.open(tmp_path / "run" / "episode.gif").n_frames == 20
    assert (row["eval/episodes/cut"], row["eval/episodes"], row["eval/return/mean"]) == (4, 4, 20)


def test_an_episode_that_ends_at_the_limit_was_not_cut():
    assert collector.play(make(Ends, 2, limit=9), act, 4, seed=0) == ([9.0] * 4, [9] * 4, 0)
    assert collector.play(make(Ends, 2, limit=8), act, 4, seed=0) == ([8.0] * 4, [8] * 4, 4)


def test_what_cannot_be_given_a_limit_is_left_and_whole_episodes_are_refused(monkeypatch):
    monkeypatch.setattr(collector, "MOST_STEPS", 30)
    monkeypatch.setattr(collector, "_NO_END", 40)
    agent = PPO(Fixed, **SMALL)
    with pytest.warns(UserWarning, match=r"1 of 3 evaluated episodes were cut after 30 steps"):
        found = evaluate_policy(agent, SyncVectorEnv([Fixed, lambda: Fixed(9)]), n_eval_episodes=3, return_episode_rewards=True)
    assert found == ([9.0, 9.0, 30.0], [9, 9, 30])
    with pytest.raises(UserError, match=r"after 40 steps.*whole episodes.*choose ppo"):
        REINFORCE(Fixed).learn(100)
    REINFORCE(lambda: TimeLimit(Fixed(), 35)).learn(100)
