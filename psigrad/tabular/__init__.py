"""Markov decision processes and their solvers. They import numpy and scipy and no other package of psigrad.

Read mdp.py and bellman.py, then solvers.py (known models), then prediction.py and td_control.py (unknown models).
"""

from __future__ import annotations

from psigrad.tabular.bellman import (
    advantages,
    bellman_residual,
    epsilon_greedy,
    evaluate,
    expected_steps,
    greedy,
    occupancy,
    policy_model,
    q_values,
    softmax_policy,
    uniform_policy,
)
from psigrad.tabular.classics import cliff_walking, forest, random_walk, shortest_path_4x4, teleport_5x5, windy_gridworld
from psigrad.tabular.grid_world import ACTIONS, ARROWS, GridWorld, UnboundedGrid
from psigrad.tabular.mdp import MDP, discounted_return, from_gymnasium, from_outcomes
from psigrad.tabular.prediction import (
    batch_monte_carlo,
    batch_td,
    lambda_returns,
    monte_carlo,
    n_step_returns,
    td,
    td_lambda,
)
from psigrad.tabular.simulation import Episode, Simulator, exponential, inverse_visits, linear, rollouts
from psigrad.tabular.solvers import (
    Solution,
    modified_policy_iteration,
    policy_evaluation,
    policy_iteration,
    prioritised_sweeping,
    solve,
    value_iteration,
)
from psigrad.tabular.sweeps import Sweep
from psigrad.tabular.td_control import (
    Learned,
    double_q_learning,
    expected_sarsa,
    monte_carlo_control,
    q_learning,
    sarsa,
)
from psigrad.tabular.trajectories import Paths, all_paths, sample_paths

__all__ = [
    "ACTIONS",
    "ARROWS",
    "MDP",
    "Episode",
    "GridWorld",
    "Learned",
    "Paths",
    "Simulator",
    "Solution",
    "Sweep",
    "UnboundedGrid",
    "advantages",
    "all_paths",
    "batch_monte_carlo",
    "batch_td",
    "bellman_residual",
    "cliff_walking",
    "discounted_return",
    "double_q_learning",
    "epsilon_greedy",
    "evaluate",
    "expected_sarsa",
    "expected_steps",
    "exponential",
    "forest",
    "from_gymnasium",
    "from_outcomes",
    "greedy",
    "inverse_visits",
    "lambda_returns",
    "linear",
    "modified_policy_iteration",
    "monte_carlo",
    "monte_carlo_control",
    "n_step_returns",
    "occupancy",
    "policy_evaluation",
    "policy_iteration",
    "policy_model",
    "prioritised_sweeping",
    "q_learning",
    "q_values",
    "random_walk",
    "rollouts",
    "sample_paths",
    "sarsa",
    "shortest_path_4x4",
    "softmax_policy",
    "solve",
    "td",
    "td_lambda",
    "teleport_5x5",
    "uniform_policy",
    "value_iteration",
    "windy_gridworld",
]
