"""The ratio slot: log of (policy now / policy that collected), per step.

A ratio is a function (logp [N,T] with gradient, logp_old [N,T], mask [N,T]) -> log ratio [N,T]. Masked steps arrive as 0.
"""

from __future__ import annotations

from psigrad.objective.lazy_torch import Tensor, torch

__all__ = ["none", "sequence", "token", "trajectory"]

MAX_LOG_RATIO = 20.0
"""exp(20) ≈ 5e8: beyond this a ratio overflows float32 soon, and inf · 0 would turn a zero advantage into NaN."""


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """ρ = exp(log ratio), held at exp(20), with the gradient of a ratio of exp(20) above it: a step that went too far under a
    negative advantage must find its way back.
    """
    return bound(log_ratio).exp()


def bound(log_ratio: Tensor) -> Tensor:
    """min(x, 20) with the gradient of x."""
    return log_ratio - (log_ratio - MAX_LOG_RATIO).clamp(min=0).detach()


def none(logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
    """No ratio: the batch is taken as on-policy.

    Formula: ρ_t = 1

    Source: Williams 1992, REINFORCE.
    """
    return torch.zeros_like(logp)


def token(logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
    """One ratio for each step.

    Formula: ρ_t = π(a_t|s_t) / π_old(a_t|s_t)

    Source: Schulman et al. 2017, PPO, arXiv:1707.06347, section 3.
    """
    return logp - logp_old


def sequence(logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
    """One length-normalised ratio for the whole sequence; each step passes gradient to its own log-probability.

    Formula: ρ_t = sg[ (Π_u π(a_u|s_u)/π_old(a_u|s_u))^(1/|y|) ] · π(a_t|s_t) / sg[π(a_t|s_t)]

    sg is stop-gradient. With one advantage per sequence and the mean over its steps, gradient and value equal those of the plain
    sequence ratio; with per-step advantages each step keeps its own.

    Source: Zheng et al. 2025, GSPO, arXiv:2507.18071 (the form GSPO-token).
    """
    length_N = mask.sum(1, keepdim=True).clamp(min=1)
    mean_N = ((logp - logp_old).sum(1, keepdim=True) / length_N).detach()
    return mean_N + logp - logp.detach()


def trajectory(logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
    """One ratio for the whole completion taken as a single action; use it with the sequence_mean aggregate.

    Formula: ρ_t = Π_u π(a_u|s_u) / π_old(a_u|s_u)

    Source: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740 (bandit form); TRL RLOOTrainer.
    """
    return (logp - logp_old).sum(1, keepdim=True).expand(logp.shape)
