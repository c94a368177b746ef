"""Learning on the environments that everyone knows, by the settings that `psigrad control` starts from, over five seeds."""

from __future__ import annotations

import numpy as np
import pytest

from psigrad.control import Agent, evaluate_policy

pytestmark = pytest.mark.long
SEEDS = range(5)


def score(algorithm: str, env: str, seed: int) -> float:
    """Mean return over 100 episodes of the policy that training ends with."""
    agent = Agent(env, algorithm=algorithm, seed=seed).learn()
    mean, _ = evaluate_policy(agent, n_eval_episodes=100, seed=1000 + seed)
    agent.close()
    return mean


@pytest.mark.parametrize("algorithm", ["reinforce", "a2c", "ppo", "ppo_penalty", "trpo", "dqn"])
def test_cartpole_is_solved(algorithm):
    """475: the threshold that Gymnasium registers."""
    scores = [score(algorithm, "CartPole-v1", seed) for seed in SEEDS]
    assert np.mean(scores) >= 475, scores


def test_ppo_lands():
    """200: the threshold of LunarLander-v3, within a million steps."""
    scores = [score("ppo", "LunarLander-v3", seed) for seed in SEEDS]
    assert np.mean(scores) >= 200, scores
