"""The precision that a batch's rewards need: float32, unless it would round away what tells a group's completions apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROUNDED = 1e-3
"""Share of the spread of a group's rewards that float32 may round away."""
_WIDE = 1e15
"""A spread whose square float32 cannot hold."""


def reward_dtype(sizes: Sequence[int], columns: Sequence[Sequence[float]]) -> torch.dtype:
    """Return the type for these columns of numbers, which belong to rows in groups of these sizes; NaN is no number.

    Rewards of 1e6 and 1e6 + 0.001 are one number in float32, and the variance of 1e20 and 0 is infinite. Ordinary rewards stay in
    float32, and with them every bit of their runs. Advantages are float32 in either case: `PolicyGradient.prepare` casts them.
    """
    for column in columns:
        for exact in torch.tensor(column, dtype=torch.float64).split([*sizes]):
            given = exact[~exact.isnan()]
            spread = float(given.max() - given.min()) if len(given) else 0.0
            if spread and (spread > _WIDE or float((given - given.float()).abs().max()) > _ROUNDED * spread):
                return torch.float64
    return torch.float32
