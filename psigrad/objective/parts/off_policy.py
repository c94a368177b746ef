"""Surrogates for samples from another policy. If the sampler's log-probs are not known, log π_old takes their place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from psigrad.objective.batch import zero_outside
from psigrad.objective.lazy_torch import Tensor, torch
from psigrad.objective.parts.ratio import MAX_LOG_RATIO, exp_ratio
from psigrad.objective.parts.surrogate import SEQUENCES, SamplerWeighted, check_inner, clip

__all__ = ["gamma_weight", "off_policy_mask", "symmetric_mask"]

LEAST_LOG_WEIGHT = math.log(1e-8)


@dataclass(frozen=True)
class symmetric_mask(SamplerWeighted):
    """The importance-weighted surrogate, with loss 0 for steps whose probability has risen or fallen by more than δ.

    Formula: L_t = −M_t · A_t · π(a_t|s_t) / π_sampler(a_t|s_t)
             M_t = 1 where |π(a_t|s_t) − π_sampler(a_t|s_t)| ≤ δ; else 0; δ is `delta`

    Source: INTELLECT Policy Optimization (IPO), prime-rl, PR 3418 and docs/ipo.md.

    >>> show(symmetric_mask()(row(-0.5, -3), row(0, 0), row(1, 1), row(-1.5, -3)))
    [[0.0, -1.0]]
    """

    delta: float = 0.3
    """δ: how far the probability of a step may change; prime-rl's eps."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_sampler"})

    def __post_init__(self) -> None:
        if not 0 < self.delta <= 1:
            raise ValueError(f"symmetric_mask has delta={self.delta}; expected 0 < delta <= 1; it bounds a probability.")

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor, logp_sampler: Tensor) -> Tensor:
        """Return the loss [N, T] of each step."""
        kept = (logp.detach().exp() - logp_sampler.exp()).abs() <= self.delta
        return torch.where(kept, -exp_ratio(logp - logp_sampler) * advantage, 0.0)


@dataclass(frozen=True)
class gamma_weight(SamplerWeighted):
    """The policy gradient, weighted by a smooth function of the sequence's ratio that falls off for large and small ratios.

    Formula: L_t = −sg[φ(W)] · A_t · log π(a_t|s_t), φ(W) = W^k · e^(λ·(1 − W)), W = Π_u π(a_u|s_u) / π_sampler(a_u|s_u)
             k = k_positive and λ = lambda_positive where A_t ≥ 0
             k = k_negative and λ = lambda_negative where A_t < 0; sg stops the gradient

    Source: Shen et al. 2026, VESPO, arXiv:2602.10693; TRL loss_type "vespo".

    >>> show(gamma_weight()(row(-1, -1), row(0, 0), row(1, 1), row(1, 1) > 0, row(-1, -1)))
    [[1.0, 1.0]]
    """

    k_positive: float = 2.0
    """k of steps with an advantage of at least 0; TRL's vespo_k_pos."""
    lambda_positive: float = 3.0
    """λ of steps with an advantage of at least 0; TRL's vespo_lambda_pos."""
    k_negative: float = 3.0
    """k of steps with a negative advantage; TRL's vespo_k_neg."""
    lambda_negative: float = 2.0
    """λ of steps with a negative advantage; TRL's vespo_lambda_neg."""
    needs: ClassVar[frozenset[str]] = SEQUENCES | {"logp_sampler"}

    def __post_init__(self) -> None:
        if min(self.k_positive, self.k_negative) < 0 or min(self.lambda_positive, self.lambda_negative) <= 0:
            raise ValueError(
                f"gamma_weight has k={self.k_positive}, {self.k_negative} and lambda={self.lambda_positive}, "
                f"{self.lambda_negative} (positive, negative advantage); expected every k >= 0 and every lambda > 0."
            )

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor, mask: Tensor, logp_sampler: Tensor) -> Tensor:
        """Return the loss [N, T] of each step. No gradient passes through the weight φ(W) in the formula of the class."""
        steps = zero_outside(mask, (logp.detach() - logp_sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        log_weight_N = steps.sum(1, keepdim=True).clamp(LEAST_LOG_WEIGHT, MAX_LOG_RATIO)
        k = torch.where(advantage < 0, log_ratio.new_tensor(self.k_negative), self.k_positive)
        decay = torch.where(advantage < 0, log_ratio.new_tensor(self.lambda_negative), self.lambda_positive)
        return -(k * log_weight_N + decay * (1 - log_weight_N.exp())).exp() * advantage * logp


@dataclass(frozen=True)
class off_policy_mask:
    """The wrapped surrogate L', with loss 0 for sequences of negative advantage that have become much less likely.

    Formula: L_t = M·L'_t, M = 0 where A_t < 0 and (1/|y|)·Σ_u (log π_sampler(a_u|s_u) − log π(a_u|s_u)) > δ; else 1

    Source: DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556; TRL off_policy_mask_threshold.
    """

    surrogate: Callable[..., Tensor] = field(default_factory=clip)
    """L': the wrapped surrogate, which gives the loss where M = 1."""
    delta: float = 0.5
    """δ: how far a sequence's log-probabilities may fall on average, in nats per step."""

    def __post_init__(self) -> None:
        if self.delta <= 0:
            raise ValueError(f"off_policy_mask has delta={self.delta}; expected more than 0 nats per step.")
        check_inner(self, SEQUENCES)

    @property
    def needs(self) -> frozenset[str]:
        """The extra inputs of `__call__`: the sampler's log-probs and the mask."""
        return SEQUENCES | {"logp_sampler"}

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor, mask: Tensor, logp_sampler: Tensor) -> Tensor:
        """Return the loss [N, T] of each step."""
        given: dict[str, Any] = {"mask": mask} if "mask" in getattr(self.surrogate, "needs", ()) else {}
        fall_N = zero_outside(mask, logp_sampler - logp.detach()).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        left = (advantage < 0) & (fall_N > self.delta)
        return zero_outside(~left, self.surrogate(logp, log_ratio, advantage, **given))
