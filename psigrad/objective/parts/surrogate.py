"""The surrogate slot: a function (logp, log_ratio, advantage) -> loss per step, all [N,T].

A surrogate lists extra inputs [N,T] in `needs`: "mask", "logp_sampler" (the sampler's log-probs, or log π_old if those are not
known) or "marks" (computed once from the whole batch, by the surrogate's method `marks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from psigrad.objective.batch import Batch, step_covariance, zero_outside
from psigrad.objective.lazy_torch import Tensor, torch
from psigrad.objective.parts.ratio import exp_ratio

__all__ = [
    "clip",
    "covariance_penalty",
    "divergence_mask",
    "dual_clip",
    "geometric_clip",
    "kl_penalty",
    "score",
    "soft_clip",
    "truncated_weight",
    "unclipped",
    "with_imitation",
]

Surrogate = Callable[..., Tensor]
SEQUENCES = frozenset({"mask"})


class SilentSurrogate:
    """The base class of surrogates that give a step of advantage 0 no gradient, unless it has a mark other than 0."""


class RatioSurrogate(SilentSurrogate):
    """The base class of surrogates whose gradient flows through the ratio alone."""


class SamplerWeighted(SilentSurrogate):
    """The base class of surrogates that already weight by π / π_sampler. So their `PolicyGradient` must have no `correction`."""


def score(logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """The policy gradient itself.

    Formula: L_t = −A_t · log π(a_t|s_t)

    Source: Williams 1992, REINFORCE; Sutton et al. 2000, policy gradient theorem.

    >>> show(score(row(-1, -2), row(0, 0), row(1, -1)))
    [[1.0, -2.0]]
    """
    return -advantage * logp


def unclipped(logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """The importance-weighted surrogate without a trust region.

    Formula: L_t = −ρ_t · A_t

    Source: Schulman et al. 2015, TRPO, arXiv:1502.05477.

    >>> show(unclipped(row(-1, -1), row(0.5, -0.5), row(1, 1)))
    [[-1.649, -0.607]]
    """
    return -exp_ratio(log_ratio) * advantage


@dataclass(frozen=True)
class clip(RatioSurrogate):
    """The clipped surrogate: no gradient once the ratio has moved far enough in the advantage's direction.

    Formula: L_t = −min(ρ_t·A_t, clip(ρ_t, 1 − low, 1 + high)·A_t)

    Source: Schulman et al. 2017, PPO, arXiv:1707.06347, eq. 7; Yu et al. 2025, DAPO, arXiv:2503.14476 (low ≠ high).

    >>> show(clip()(row(-1, -1), row(0.5, 0.5), row(1, -1)))
    [[-1.2, 1.649]]
    """

    low: float = 0.2
    """The largest fall of the ratio below 1 for a step with negative advantage."""
    high: float = 0.2
    """The largest rise of the ratio above 1 for a step with positive advantage."""

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and self.high >= 0):
            raise ValueError(
                f"clip has low={self.low} and high={self.high}; expected 0 <= low <= 1 and high >= 0; give distances from 1."
            )

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss [N, T] of each step."""
        # The minimum clamps the ratio from above where A > 0 and from below where A < 0. In this form its gradient needs half the
        # work.
        least = torch.where(advantage < 0, log_ratio.new_tensor(1 - self.low), -torch.inf)
        most = torch.where(advantage > 0, log_ratio.new_tensor(1 + self.high), torch.inf)
        return -exp_ratio(log_ratio).clamp(least, most) * advantage


@dataclass(frozen=True)
class dual_clip(clip):
    """The clipped surrogate with a bound on the loss of a step of negative advantage.

    Formula: L_t = −min(ρ_t·A_t, clip(ρ_t, 1 − low, 1 + high)·A_t) where A_t ≥ 0
             L_t = −max(min(ρ_t·A_t, clip(ρ_t, 1 − low, 1 + high)·A_t), bound·A_t) where A_t < 0

    Source: Ye et al. 2020, arXiv:1912.09729; the `delta` of TRL's GRPO.

    >>> show(dual_clip()(row(-1, -1), row(2, 2), row(1, -1)))
    [[-1.2, 3.0]]
    """

    bound: float = 3.0
    """Cap on the ratio at steps of negative advantage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound <= 1 + self.high:
            raise ValueError(f"dual_clip has bound={self.bound}; expected more than 1 + high = {1 + self.high}; raise bound.")

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss [N, T] of each step."""
        clipped = super().__call__(logp, log_ratio, advantage)
        return torch.where(advantage < 0, torch.minimum(clipped, -self.bound * advantage), clipped)


@dataclass(frozen=True)
class truncated_weight(SilentSurrogate):
    """The policy gradient weighted by a truncated, detached ratio.

    Formula: L_t = −sg[min(ρ_t, cap)] · A_t · log π(a_t|s_t), where sg stops the gradient

    Source: MiniMax 2025, CISPO, arXiv:2506.13585 (without its lower bound); ScaleRL, arXiv:2510.13786, and TRL (cap 5).

    >>> show(truncated_weight()(row(-1, -1), row(0, 2), row(1, 1)))
    [[1.0, 5.0]]
    """

    cap: float = 5.0
    """Greatest weight; TRL's `epsilon_high` of loss_type cispo."""

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ValueError(
                f"truncated_weight has cap={self.cap}; expected more than 0; it is a bound on the ratio, not a distance from 1."
            )

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss [N, T] of each step. No gradient passes through the weight min(ρ_t, cap)."""
        weight = exp_ratio(log_ratio).clamp(max=self.cap).detach()
        return -weight * advantage * logp


def innermost(surrogate: Surrogate) -> Surrogate:
    """Return the surrogate inside all wrappers, such as `with_imitation`. Without a wrapper this is `surrogate` itself."""
    inner: Surrogate | None = getattr(surrogate, "surrogate", None)
    return surrogate if inner is None else innermost(inner)


def silent_without_advantage(surrogate: Surrogate) -> bool:
    """Return True if `surrogate` is known to give a step of advantage 0 no gradient, unless the step has a mark other than 0."""
    return innermost(surrogate) in (score, unclipped) or isinstance(innermost(surrogate), SilentSurrogate)


def differentiates_ratio(surrogate: Surrogate) -> bool:
    """Return True if the surrogate's gradient flows through the ratio alone. With ratio `none` it would learn nothing."""
    return innermost(surrogate) is unclipped or isinstance(innermost(surrogate), RatioSurrogate | kl_penalty)


def clip_fractions(surrogate: Surrogate, log_ratio: Tensor, advantage: Tensor) -> dict[str, Tensor]:
    """Return {TRL's name of a clip metric: mask [N, T] of the clipped steps} for `clip` and `truncated_weight`, otherwise {}."""
    surrogate = innermost(surrogate)
    ratio = exp_ratio(log_ratio.detach())
    if isinstance(surrogate, clip):
        low = (ratio < 1 - surrogate.low) & (advantage < 0)
        high = (ratio > 1 + surrogate.high) & (advantage > 0)
        return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}
    if isinstance(surrogate, truncated_weight):
        return {"cispo_clip_ratio": (ratio > surrogate.cap) & (advantage > 0)}
    return {}


@dataclass(frozen=True)
class soft_clip(RatioSurrogate):
    """A sigmoid of the ratio: the gradient fades smoothly as the ratio moves away from 1.

    Formula: L_t = −(4/τ)·σ(τ·(ρ_t − 1))·A_t
             τ is `positive` where A_t > 0, `negative` elsewhere; σ is the sigmoid

    Source: Gao et al. 2025, SAPO, arXiv:2511.20347; TRL loss_type "sapo".

    >>> show(soft_clip()(row(-1, -1), row(0, 3), row(1, 1)))
    [[-2.0, -4.0]]
    """

    positive: float = 1.0
    """τ of steps with positive advantage; TRL's sapo_temperature_pos."""
    negative: float = 1.05
    """τ of the other steps; the gradient fades sooner with a larger τ. TRL's sapo_temperature_neg."""

    def __post_init__(self) -> None:
        if self.positive <= 0 or self.negative <= 0:
            raise ValueError(f"soft_clip has positive={self.positive} and negative={self.negative}; expected both above 0.")

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss [N, T] of each step."""
        tau = torch.where(advantage > 0, log_ratio.new_tensor(self.positive), self.negative)
        return -4 / tau * torch.sigmoid(tau * (exp_ratio(log_ratio) - 1)) * advantage


@dataclass(frozen=True)
class divergence_mask(SilentSurrogate):
    """The policy gradient weighted by the detached ratio. Steps that moved too far in the advantage's direction have loss 0.

    Formula: L_t = −M_t · sg[min(ρ_t, cap)] · A_t · log π(a_t|s_t), where sg stops the gradient
             M_t = 0 where A_t > 0 and π − π_old > δ, or A_t < 0 and π_old − π > δ; else 1; δ is `delta`

    Source: Qi et al. 2026, DPPO (binary TV), arXiv:2602.04879; verl's dppo_tv.

    >>> show(divergence_mask()(row(-0.5, -3), row(0.5, 2), row(1, 1)))
    [[0.0, 22.167]]
    """

    delta: float = 0.15
    """δ: how far the probability of a token may move."""
    cap: float = 20.0
    """Greatest weight; verl's value."""

    def __post_init__(self) -> None:
        if not 0 < self.delta <= 1 or self.cap <= 0:
            raise ValueError(f"divergence_mask has delta={self.delta} and cap={self.cap}; expected 0 < delta <= 1, cap > 0.")

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss [N, T] of each step. No gradient passes through the weight min(ρ_t, cap)."""
        weight = exp_ratio(log_ratio).clamp(max=self.cap).detach()
        now = logp.detach().exp()
        moved = now - (logp - log_ratio).detach().exp()
        held = torch.where(advantage > 0, moved > self.delta, moved < -self.delta)
        return torch.where(held, 0.0, -weight * advantage) * logp


@dataclass(frozen=True)
class geometric_clip(RatioSurrogate):
    """The geometric mean of a sequence's ratios, each clipped in log space.

    Formula: L_t = −A_t · exp( (1/|y|)·Σ_u c_u ), c_u = min(log ρ_u, high) where A_u > 0, max(log ρ_u, −low) where A_u ≤ 0

    The sum is over the |y| steps u of a sequence.

    Source: Zhao et al. 2025, GMPO, arXiv:2507.20673; TRL's GMPOTrainer.

    >>> show(geometric_clip()(row(-1, -1), row(1, 0.2), row(1, 1), row(1, 1) > 0))
    [[-1.35, -1.35]]
    """

    low: float = 0.4
    """The greatest fall of a step's log ratio; the ratio's bound is e^−low."""
    high: float = 0.4
    """The greatest rise of a step's log ratio."""
    needs: ClassVar[frozenset[str]] = SEQUENCES

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < 0:
            raise ValueError(f"geometric_clip has low={self.low} and high={self.high}; expected both >= 0.")

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        """Return the loss [N, T] of each step. The geometric mean is over the steps of a sequence where `mask` is True."""
        least = torch.where(advantage > 0, log_ratio.new_tensor(-math.inf), -self.low)
        most = torch.where(advantage > 0, log_ratio.new_tensor(self.high), math.inf)
        clipped = zero_outside(mask, log_ratio.clamp(least, most))
        mean_N = clipped.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return -exp_ratio(mean_N) * advantage


@dataclass(frozen=True)
class covariance_penalty(RatioSurrogate):
    """The importance-weighted surrogate, with a penalty |log ρ| on the few tokens that lower the entropy most.

    Formula: L_t = −ρ_t·A_t + m_t·coefficient·|log ρ_t|
             m_t = 1 for the fraction `share` of all tokens that has the greatest C_t; else 0
             C_t = (log π_old(a_t|s_t) − mean(log π_old))·(A_t − mean(A)), with means over all tokens of the batch

    The penalty needs several passes or minibatches: in the first optimiser step on a batch it is 0.

    Source: Cui et al. 2025, KL-Cov, arXiv:2505.22617; verl's kl_cov.
    """

    share: float = 2e-3
    """The share of all tokens that get the penalty; at least one token. verl's kl_cov_ratio."""
    coefficient: float = 1.0
    """Weight of the penalty; verl's ppo_kl_coef."""
    needs: ClassVar[frozenset[str]] = frozenset({"marks"})

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.coefficient <= 0:
            raise ValueError(
                f"covariance_penalty has share={self.share} and coefficient={self.coefficient}; expected 0 < share < 1 and a "
                "coefficient above 0."
            )

    def marks(self, batch: Batch, advantage: Tensor) -> Tensor:
        """Return the mask [N, T] of the penalised tokens: the fraction `share` of all tokens that has the greatest C_t."""
        covariance = step_covariance(batch.logp_old, advantage, batch.mask).masked_fill(~batch.mask, -math.inf).flatten()
        count = min(max(int(self.share * int(batch.mask.sum())), 1), int(batch.mask.sum()))
        marked = torch.zeros_like(batch.mask).flatten()
        marked[covariance.sort(descending=True, stable=True).indices[:count]] = True
        return marked.view(batch.mask.shape)

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor, marks: Tensor) -> Tensor:
        """Return the loss [N, T] of each token. `marks` [N, T] is True where m_t = 1."""
        return -exp_ratio(log_ratio) * advantage + torch.where(marks, self.coefficient * log_ratio.abs(), 0.0)


@dataclass(frozen=True)
class with_imitation:
    """The wrapped surrogate L', plus the cross-entropy of the batch's right answers.

    Formula: L_t = L'_t − coefficient · m_i · (S / S⁺) · log π(a_t|s_t), m_i = 1 where R_i ≥ `right`; else 0
             L'_t is the loss of `surrogate`; S is the number of steps in the batch, S⁺ that in right answers

    R_i is the batch's metric if it has one, otherwise the sum of the rewards.

    Source: Yue et al. 2025, VAPO, arXiv:2504.05118, section 4.3 (positive-example LM loss).
    """

    surrogate: Callable[..., Tensor] = field(default_factory=clip)
    """L': the wrapped surrogate."""
    coefficient: float = 0.1
    """Weight of the cross-entropy; the paper's μ."""
    right: float = 1.0
    """An answer is right if its metric is at least this."""

    def __post_init__(self) -> None:
        if self.coefficient <= 0:
            raise ValueError(
                f"with_imitation has coefficient={self.coefficient}; expected more than 0; for 0 use the wrapped surrogate alone."
            )
        check_inner(self, SEQUENCES | {"logp_sampler"})

    @property
    def needs(self) -> frozenset[str]:
        """The extra inputs that `__call__` receives: `marks`, and those that the wrapped surrogate needs."""
        return frozenset({"marks"}) | frozenset(getattr(self.surrogate, "needs", ()))

    def marks(self, batch: Batch, advantage: Tensor) -> Tensor:
        """Return the factor m_i · (S / S⁺) of the formula for each step, [N, T]. It is 0 for a wrong answer."""
        metric_N = batch.sequence_reward if batch.metric is None else batch.metric
        steps = (batch.mask & (metric_N >= self.right)[:, None]).to(batch.reward.dtype)
        return steps * (int(batch.mask.sum()) / max(int(steps.sum()), 1))

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor, marks: Tensor, **given: Tensor) -> Tensor:
        """Return the loss [N, T] of each step. `marks` is the result of `self.marks`. The wrapped surrogate receives `given`."""
        return self.surrogate(logp, log_ratio, advantage, **given) - self.coefficient * marks * logp


def check_inner(outer: Any, known: frozenset[str]) -> None:
    """Raise `ValueError` if the surrogate in `outer` is a `kl_penalty` with a target, or needs an input outside `known`."""
    inner = outer.surrogate
    if set(getattr(inner, "needs", ())) - known or (isinstance(inner, kl_penalty) and inner.target is not None):
        raise ValueError(
            f"{type(outer).__name__} cannot wrap {type(inner).__name__}, because the inner surrogate has a KL target, or "
            "needs inputs that the outer one does not pass on; wrap another surrogate, such as clip."
        )


PENALTY_KEY = "penalty_coefficient"


@dataclass(frozen=True)
class kl_penalty:
    """The importance-weighted surrogate, with a penalty on the distance from the policy that sampled the batch.

    Formula: L_t = −ρ_t·A_t + β·(ρ_t − 1 − log ρ_t), where β starts at `coefficient`

    With a `target`, call `PolicyGradient.adapt` after all passes over a batch. It doubles β if the KL is above 1.5 · target, and
    halves β if the KL is below target / 1.5.

    Source: Schulman et al. 2017, PPO, arXiv:1707.06347, section 4.

    >>> show(kl_penalty(2)(row(-1, -1), row(0.5, 0), row(1, 1)))
    [[-1.351, -1.0]]
    """

    coefficient: float = 1.0
    """β, or its first value if there is a target."""
    target: float | None = None
    """The target of KL(π_old‖π) per step, in nats; None: β is fixed."""

    def __post_init__(self) -> None:
        if self.coefficient < 0 or (self.target is not None and self.target <= 0):
            raise ValueError(
                f"kl_penalty has coefficient={self.coefficient} and target={self.target}; expected coefficient >= 0 and "
                "target > 0; leave target out for a fixed coefficient."
            )

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss [N, T] of each step."""
        ratio = exp_ratio(log_ratio)
        return -ratio * advantage + self.coefficient * (ratio - 1 - log_ratio)


def measure_kl(logp: Tensor, logp_old: Tensor, mask: Tensor) -> float:
    """Return an estimate of KL(π_old‖π) in nats per step. `logp` must come from the policy after all passes over the batch."""
    moved = zero_outside(mask, logp.detach() - logp_old)
    return float((exp_ratio(moved) - 1 - moved).sum() / mask.sum().clamp(min=1))


def adapt(penalty: kl_penalty, state: Mapping[str, float], kl: float) -> dict[str, float]:
    """Return `state` with the β of `penalty` doubled, halved or unchanged. `kl` is the result of `measure_kl` after an update."""
    coefficient = state[PENALTY_KEY]
    if penalty.target is not None and kl > 1.5 * penalty.target:
        coefficient *= 2
    elif penalty.target is not None and kl < penalty.target / 1.5:
        coefficient /= 2
    return {**state, PENALTY_KEY: coefficient}
