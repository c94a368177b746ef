"""Deep Q-learning's target and loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss


def td_target(reward: Tensor, terminated: Tensor, next_q: Tensor, gamma: float, choosing_q: Tensor | None = None) -> Tensor:
    """[M] what Q(s_t, a_t) is to become, without gradient.

    Formula: y = r + γ·(1 − terminated)·max_a Q⁻(s', a), and in Double DQN y = r + γ·(1 − terminated)·Q⁻(s', argmax_a Q(s', a))

    `next_q` [M, A] is the target network's Q⁻(s', ·), `choosing_q` the learning network's Q(s', ·) for Double DQN. An episode
    that was only cut by its time limit is not terminated: its next state keeps its worth.

    Source: Mnih et al. 2015, Nature 518; van Hasselt et al. 2016, arXiv:1509.06461.
    """
    best = next_q.max(1).values if choosing_q is None else next_q.gather(1, choosing_q.argmax(1, keepdim=True))[:, 0]
    # where, not a product: a diverged Q of a final state is inf, and 0 · inf is NaN
    return (reward + gamma * torch.where(terminated, torch.zeros_like(best), best)).detach()


def q_loss(q: Tensor, action: Tensor, target: Tensor) -> Tensor:
    """Mean Huber loss (δ = 1) of Q [M, A] at the actions [M] taken.

    Formula: mean of ½·d² where |d| < 1 and |d| − ½ elsewhere, d = Q(s_t, a_t) − y
    """
    return smooth_l1_loss(q.gather(1, action[:, None])[:, 0], target)


def q_slope(q: Tensor, action: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """`q_loss` and its gradient [M, A] with respect to Q, in closed form: clip(d, −1, 1) / M at the actions taken."""
    error = q.gather(1, action[:, None])[:, 0] - target
    near = error.clamp(-1, 1)
    loss = (near * (error - 0.5 * near)).mean()
    return loss, torch.zeros_like(q).scatter_(1, action[:, None], (near / len(q))[:, None])


def polyak(target: Tensor, source: Tensor, tau: float) -> None:
    """target ← (1 − τ)·target + τ·source, in place; τ = 1 copies. Source: Lillicrap et al. 2016, arXiv:1509.02971."""
    with torch.no_grad():
        target.lerp_(source, tau)


def linear_epsilon(progress: float, fraction: float, first: float, last: float) -> float:
    """ε after a share `progress` of the run: falls from `first` to `last` over the share `fraction`, then stays."""
    return last if progress >= fraction else first + (last - first) * progress / fraction
