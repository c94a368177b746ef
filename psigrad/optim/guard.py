"""The guard against gradients and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from psigrad.errors import UserError

MAX_NONFINITE = 3
"""Steps in a row without a finite gradient that end a run."""


class NonFiniteError(UserError):
    """The gradient was not finite for `MAX_NONFINITE` steps in a row, or a weight is not finite."""


def check_gradients(nonfinite: int, step: int) -> None:
    """Raise `NonFiniteError` if the last `nonfinite` steps, up to `step`, are too many without a finite gradient."""
    if nonfinite >= MAX_NONFINITE:
        raise NonFiniteError(
            f"The gradient was not finite for {nonfinite} steps in a row, up to step {step}. No such step was applied, and the "
            "last checkpoint is sound. Lower learning_rate, or look at the rewards and the inputs of these steps."
        )


def check_weights(weights: Mapping[str, Tensor], step: int) -> None:
    """Raise `NonFiniteError` if a weight is not finite: no run should resume from it."""
    if bad := [name for name, x in weights.items() if x.numel() and not _is_finite(x)]:
        raise NonFiniteError(
            f"The weights are not finite after step {step} ({', '.join(bad[:3])}), so no checkpoint was made of them. The last "
            "one is sound. Lower learning_rate."
        )


def _is_finite(x: Tensor) -> bool:
    least, most = x.detach().aminmax()  # one pass, and no tensor of that size
    return math.isfinite(float(least)) and math.isfinite(float(most))
