"""The gradient of some methods' losses in closed form, which is faster than autograd for small networks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psigrad.objective.batch import Prepared, Totals, zero_outside
from psigrad.objective.parts import ratio
from psigrad.objective.parts.critic import value_loss
from psigrad.objective.parts.ratio import MAX_LOG_RATIO
from psigrad.objective.parts.surrogate import clip, score, unclipped
from psigrad.objective.policy_gradient import PolicyGradient


@dataclass(frozen=True, eq=False)
class Slopes:
    """The closed-form gradient of the loss on given steps.

    Formulas, with w the aggregate's weights, A the advantage, ρ = π/π_old, H the entropy, V the critic's value, R its target,
    c_H and c_V the coefficients of entropy and critic, and n the number of steps:

    dL/dlog π = −w·A for the surrogate `score`, and −w·A·ρ for `unclipped`. For `clip` it is −w·A·ρ while ρ is within the
    bounds, otherwise 0.
    dL/dH = −c_H / n
    dL/dV = c_V·(V − R) / n, and 0 where the critic's clip is active
    """

    scale: Tensor
    """[N, T] −w·A, and 0 on the steps that a filter drops."""
    logp_old: Tensor | None
    """[N, T] log π_old, if there is a ratio."""
    bounds: tuple[Tensor, Tensor] | None
    """(lower, upper) [N, T]: the log ratios between which `clip` has a gradient; None for other surrogates."""
    entropy: float
    """dL/dH of every step."""
    critic: value_loss | None
    value_old: Tensor | None
    returns: Tensor | None
    steps: int

    def logp(self, logp: Tensor) -> Tensor:
        """Return dL/dlog π [N, T] at the current policy's log-probs `logp` [N, T]."""
        if self.logp_old is None:
            return self.scale
        moved = logp - self.logp_old
        slope = moved.clamp(max=MAX_LOG_RATIO).exp_().mul_(self.scale)
        if self.bounds is None:
            return slope
        least, most = self.bounds
        return slope.masked_fill_((moved < least) | (moved > most), 0.0)

    def value(self, value: Tensor) -> Tensor:
        """Return dL/dV [N, T] at the critic's current values `value` [N, T]."""
        assert self.critic is not None and self.returns is not None
        slope = (value - self.returns) * (self.critic.coefficient / self.steps)
        if self.critic.clip is None:
            return slope
        assert self.value_old is not None
        moved = value - self.value_old
        near = self.value_old + moved.clamp(-self.critic.clip, self.critic.clip)
        worse = (value - self.returns).abs() > (near - self.returns).abs()
        return slope.masked_fill_((moved.abs() > self.critic.clip) & ~worse, 0.0)


def has_slopes(algorithm: PolicyGradient) -> bool:
    """Return True if this module has the closed-form gradient for all parts of a method."""
    surrogate, critic = algorithm.surrogate, algorithm.critic
    known = surrogate in (score, unclipped) or type(surrogate) is clip
    fits = algorithm.ratio in (ratio.none, ratio.token) and algorithm.correction is None
    fits &= algorithm.kl is None or algorithm.kl.where == "reward"
    return known and fits and (critic is None or type(critic) is value_loss)


def slopes(algorithm: PolicyGradient, prepared: Prepared, totals: Totals) -> Slopes | None:
    """Return the closed form, or None if a step is masked or a row dropped. `has_slopes` must be True for the method."""
    surrogate, batch = algorithm.surrogate, prepared.batch
    if not prepared.is_full and not bool((batch.mask & prepared.keep[:, None]).all()):
        return None
    advantage = prepared.advantage
    weights = algorithm.aggregate(batch.mask, totals).to(advantage.dtype)
    steps, scale = max(totals.tokens, 1), -advantage * weights
    return Slopes(
        scale=scale if prepared.counts is None else zero_outside(prepared.counts, scale),
        logp_old=None if surrogate is score else batch.logp_old,
        bounds=_bounds(surrogate, advantage) if isinstance(surrogate, clip) else None,
        entropy=0.0 if algorithm.entropy is None else -algorithm.entropy.coefficient / steps,
        critic=algorithm.critic,
        value_old=batch.value,
        returns=prepared.returns,
        steps=steps,
    )


def _bounds(surrogate: clip, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Return `Slopes.bounds` for `clip`: log(1 − `low`) where A < 0, else −∞; and log(1 + `high`) where A > 0, else ∞."""
    low, high = torch.log(advantage.new_tensor([1 - surrogate.low, 1 + surrogate.high])).unbind()
    return torch.where(advantage < 0, low, -torch.inf), torch.where(advantage > 0, high, torch.inf)
