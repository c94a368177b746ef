"""The target and loss of deep Q-learning."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot, smooth_l1_loss


def back_up(reward: Tensor, terminated: Tensor, next_q: Tensor, gamma: float) -> Tensor:
    """Return [M, A]: the target of Q(s_t, a_t) for each possible next action a'.

    Formula: r + γ·(1 − terminated)·Q⁻(s', a'), with the target network's Q⁻(s', ·) in `next_q` [M, A]

    `terminated` is False if only the time limit ended the episode.

    Source: Mnih et al. 2015, Nature 518.
    """
    # masked_fill, because multiplying by 0 gives NaN where a diverged Q of a final state is inf
    return reward[:, None] + gamma * next_q.masked_fill(terminated[:, None], 0.0)


def td_target(worth: Tensor, choosing_q: Tensor | None = None) -> Tensor:
    """Return y [M]: in each row of `worth` [M, A], the target of the action with the greatest `choosing_q` [M, A].

    `worth` is the result of `back_up`. Without `choosing_q`, y is the greatest target of each row. For Double DQN, pass the
    learning network's Q(s', ·).

    Source: van Hasselt et al. 2016, arXiv:1509.06461.
    """
    if choosing_q is None:
        return worth.amax(1)
    return worth.gather(1, choosing_q.argmax(1, keepdim=True))[:, 0]


def q_loss(q: Tensor, action: Tensor, target: Tensor) -> Tensor:
    """Return the mean Huber loss (δ = 1) between Q(s_t, a_t), which is `q` [M, A] at `action` [M], and the `target` y [M].

    Formula: mean of ½·d² where |d| < 1 and |d| − ½ elsewhere, d = Q(s_t, a_t) − y
    """
    return smooth_l1_loss(q.gather(1, action[:, None])[:, 0], target)


def shares(action: Tensor, actions: int, size: int) -> Tensor:
    """Return weights [M, A] for `q_slope`: 1 / `size` at the taken action, else 0. The M rows form batches of `size` rows."""
    return one_hot(action, actions).float().div_(size)


def q_slope(q: Tensor, shares: Tensor, target: Tensor) -> Tensor:
    """Return the gradient [M, A] of `q_loss` with respect to `q`: clip(Q(s_t, ·) − y, −1, 1)·w; y is `target`, w is `shares`."""
    return (q - target[:, None]).clamp_(-1, 1).mul_(shares)


def polyak(target: Tensor, source: Tensor, tau: float) -> None:
    """Update the target: θ⁻ ← (1 − τ)·θ⁻ + τ·θ, in place; τ = 1 copies. Source: Lillicrap et al. 2016, arXiv:1509.02971."""
    with torch.no_grad():
        target.lerp_(source, tau)


def linear_epsilon(progress: float, fraction: float, first: float, last: float) -> float:
    """Return ε at `progress` (0 to 1) in a run: ε moves linearly from `first`, reaches `last` at `fraction`, and stays there."""
    return last if progress >= fraction else first + (last - first) * progress / fraction
