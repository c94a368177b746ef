"""Exhibits of classic reinforcement learning."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

from museum.exhibit import Case, exhibit


@exhibit("Toni-SM/skrl#449", "DLR-RM/stable-baselines3#1864")
def time_limit() -> Case:
    """An episode cut by a time limit counts as ended, so the value of the remaining steps is lost.

    Reward 1 a step, episodes cut after 2 steps, a critic that says 10 everywhere, γ = 0.9, λ = 0: A = r + γ V(s') - V(s) =
    1 + 9 - 10 = 0 in both steps. With V(s') = 0 after the cut, the second is 1 - 10 = -9.
    """
    return Case(SimpleNamespace(limit=2, value=10.0, gamma=0.9), (0.0, 0.0), (0.0, -9.0))


@exhibit("Farama-Foundation/Gymnasium#1132", psigrad_too=True)
def reused_array() -> Case:
    """An environment returns the same array each time, so its restart overwrites the last observation of the episode.

    The environment counts its steps and is cut after 5, so the last observation is 5. After the restart the array holds 0.
    """
    return Case(SimpleNamespace(limit=5), (5.0,), (0.0,))


@exhibit("hill-a/stable-baselines#681", psigrad_too=True)
def normalised_bytes() -> Case:
    """A replay buffer of bytes stores normalised images, whose values wrap around.

    The pixels are alternately 0 and 1, with mean 1/2 and standard deviation 1/2. Normalised they are -1 and 1, so the learner
    reads the mean 0 and the largest absolute value 1. As bytes, -1 is 255 and 1 is 1: mean 128, largest 255.
    """
    return Case(SimpleNamespace(steps=400, limit=2, shape=(7, 7, 3)), (0.0, 1.0), (128.0, 255.0), 0.15)


@exhibit("hill-a/stable-baselines#200", psigrad_too=True)
def replayed_scale() -> Case:
    """Replayed rewards keep the scale of the moment when they were stored.

    Every reward is 1, so the largest reward of a batch over the smallest is 1. With γ = 0.9 and episodes of 20 steps, the running
    return is 1, 1.9, 2.71, 3.439, … Its standard deviation is 0.910 after four steps, and 2.318 over a whole episode. If rewards
    are divided by it before they are stored, the first ones are 2.318 / 0.910 = 2.549 times the last.
    """
    returns = [10 * (1 - 0.9**t) for t in range(1, 21)]
    ratio = statistics.pstdev(returns) / statistics.pstdev(returns[:4])
    return Case(SimpleNamespace(steps=400, limit=20, gamma=0.9), (1.0,), (ratio,), 1e-3)


@exhibit("DLR-RM/stable-baselines3#2241", "DLR-RM/stable-baselines3#2052")
def discrete_start() -> Case:
    """The start of a Discrete space is ignored, so an environment receives actions that it does not have.

    Discrete(3, start=5) contains 5, 6 and 7: of 32 actions, 0 are outside. Drawn from 0, 1 and 2, all 32 are outside.
    """
    return Case(SimpleNamespace(count=3, start=5, steps=32), (0.0,), (32.0,))


@exhibit("Farama-Foundation/Gymnasium#1507", "Farama-Foundation/Gymnasium#760")
def reward_scale() -> Case:
    """Reward normalisation adds up the returns of successive episodes, because a time limit does not reset the sum.

    Reward 1, γ = 1/2, episodes cut after 2 steps: the running returns are 1, 1.5, 1, 1.5, …, with standard deviation 0.25, so a
    reward becomes 1 / 0.25 = 4. Without a restart they converge to 2, and their deviation falls like one over the root of the
    number of steps: 400 steps of 2 - 2^-t have variance Σ 4^-t / 400 - (Σ 2^-t / 400)² ≈ (1/3 + 1) / 400 - 4 / 400².
    """
    variance = sum(4.0**-t for t in range(400)) / 400 - (sum(2.0**-t for t in range(400)) / 400) ** 2
    return Case(SimpleNamespace(limit=2, gamma=0.5, steps=400), (4.0,), (variance**-0.5,), 0.05)


@exhibit("Farama-Foundation/Gymnasium#1624", "Farama-Foundation/Gymnasium#1017")
def episode_length() -> Case:
    """Statistics of vector environments count the step that restarts an episode, or skip the first step after it.

    Episodes of 3 steps with reward 1: lengths 3, 3, 3. The faults gave 3, 4, 4 and, with restarts in the same step, 3, 2, 2.
    """
    return Case(SimpleNamespace(limit=3), (3.0, 3.0, 3.0), (3.0, 2.0, 2.0))
