"""The entropy slot: a bonus for keeping options open."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["bonus"]


@dataclass(frozen=True)
class bonus:
    """The mean entropy of the policy over all steps, subtracted from the loss.

    Formula: − c_H · (1 / number of steps) · Σ_t H(π(·|s_t))

    The mean is over steps whatever the aggregate is, so that c_H means the same for every method.

    Source: Williams and Peng 1991; Mnih et al. 2016, A3C, arXiv:1602.01783; TRL entropy_coef.
    """

    coefficient: float = 0.01
    """c_H."""
