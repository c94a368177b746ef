"""The aggregate slot: (mask [N,T], totals) -> weights [N,T]; the loss is Σ weights · per-step loss.

Weights divide by the totals of the whole optimiser step, never by the micro-batch at hand, so any split gives the same gradient.
They are float64; the loss casts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psigrad.objective.batch import Totals
from psigrad.objective.lazy_torch import Tensor, torch

__all__ = ["fixed_length", "sequence_mean", "sequence_sum", "token_mean"]

Aggregate = Callable[[Tensor, Totals], Tensor]


def token_mean(mask: Tensor, totals: Totals) -> Tensor:
    """Mean over all steps of the optimiser step: a long sequence weighs more.

    Formula: w_t = 1 / (number of steps in all sequences)

    Source: Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.3; TRL loss_type "dapo".
    """
    return mask.to(torch.float64) / max(totals.tokens, 1)


def sequence_mean(mask: Tensor, totals: Totals) -> Tensor:
    """Mean over the steps of each sequence, then over sequences: a step of a long sequence weighs less.

    Formula: w_t = 1 / (|y| · number of sequences)

    Source: Shao et al. 2024, GRPO, arXiv:2402.03300, eq. 3; TRL loss_type "grpo".
    """
    return mask.to(torch.float64) / mask.sum(1, keepdim=True).clamp(min=1) / max(totals.sequences, 1)


def sequence_sum(mask: Tensor, totals: Totals) -> Tensor:
    """Sum over the steps of each sequence, then mean over sequences: the log-probability of the whole trajectory.

    Formula: w_t = 1 / (number of sequences)

    Source: Williams 1992; Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740.
    """
    return mask.to(torch.float64) / max(totals.sequences, 1)


@dataclass(frozen=True)
class fixed_length:
    """Sum over the steps of each sequence divided by a constant, then mean over sequences: no length bias.

    Formula: w_t = 1 / (n · number of sequences)

    Source: Liu et al. 2025, Dr. GRPO, arXiv:2503.20783, section 3.2; TRL loss_type "dr_grpo", where n is max_completion_length.
    """

    n: int = 1024
    """The constant; the longest completion allowed is the usual choice. It only scales the gradient."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(
                f"fixed_length has n={self.n}; expected at least 1; the longest completion allowed is the usual choice."
            )

    def __call__(self, mask: Tensor, totals: Totals) -> Tensor:
        """[N, T] weights of the steps."""
        return sequence_sum(mask, totals) / self.n
