"""PPO-penalty: a surrogate with KL(π_old‖π) in place of clipping, and the rule that adapts its coefficient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from psigrad.objective.batch import zero_outside
from psigrad.objective.lazy_torch import Tensor
from psigrad.objective.parts.ratio import exp_ratio

__all__ = ["kl_penalty"]

STATE_KEY = "penalty_coefficient"


@dataclass(frozen=True)
class kl_penalty:
    """The importance-weighted surrogate minus a penalty on the distance from the policy that collected.

    Formula: L_t = −ρ_t·A_t + β·(ρ_t − 1 − log ρ_t)

    The bracket is an unbiased, never negative estimate of KL(π_old‖π). Steps were sampled from π_old, which does not depend on
    the parameters, so its gradient is right too. With a `target`, β is doubled when the measured KL is above 1.5 · target and
    halved when it is below target / 1.5: after each update call `adapted` with `measured_kl`. The coefficient lives in the state.

    Source: Schulman et al. 2017, PPO, arXiv:1707.06347, section 4.
    """

    coefficient: float = 1.0
    """β, or its first value when there is a target."""
    target: float | None = None
    """Wanted KL(π_old‖π) per step, in nats; None: β is fixed."""

    def __post_init__(self) -> None:
        if self.coefficient < 0 or (self.target is not None and self.target <= 0):
            raise ValueError(
                f"kl_penalty has coefficient={self.coefficient} and target={self.target}; expected coefficient >= 0 and "
                "target > 0; leave target out for a fixed coefficient."
            )

    def __call__(self, logp: Tensor, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """[N, T] loss of each step."""
        ratio = exp_ratio(log_ratio)
        return -ratio * advantage + self.coefficient * (ratio - 1 - log_ratio)


def measured_kl(logp: Tensor, logp_old: Tensor, mask: Tensor) -> float:
    """How far an update has moved the policy from the one that collected: the mean of ρ_t − 1 − log ρ_t over the steps of `mask`.

    `logp` is that of the policy after all passes over the batch; before its last minibatch a part of the way would be missing.
    """
    moved = zero_outside(mask, logp.detach() - logp_old)
    return float((exp_ratio(moved) - 1 - moved).sum() / mask.sum().clamp(min=1))


def adapted(penalty: kl_penalty, state: Mapping[str, float], kl: float) -> dict[str, float]:
    """The state after one update that moved the policy by `kl`."""
    coefficient = state[STATE_KEY]
    if penalty.target is not None and kl > 1.5 * penalty.target:
        coefficient *= 2
    elif penalty.target is not None and kl < penalty.target / 1.5:
        coefficient /= 2
    return {**state, STATE_KEY: coefficient}
