"""Small batches for the examples in docstrings, and for trying out a custom part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psigrad.objective.batch import Batch, terminal
from psigrad.objective.lazy_torch import Tensor, torch


def outcomes(*rewards: float, steps: int | Sequence[int] = 1, **columns: Any) -> Batch:
    """Return a batch of completions of one prompt, each with its reward on its last step.

    `steps` is their length, or a list of lengths. `columns` are other fields of the batch as lists. `logp_old` is 0 unless given.

    >>> show(outcomes(1, 0, steps=[2, 1]).reward)
    [[0.0, 1.0], [0.0, 0.0]]
    """
    length_N = torch.tensor([steps] * len(rewards) if isinstance(steps, int) else list(steps))
    mask = torch.arange(int(length_N.max())) < length_N[:, None]
    fields: dict[str, Any] = {"logp_old": torch.zeros(mask.shape), "group": torch.zeros(len(rewards), dtype=torch.long)}
    fields |= {name: torch.tensor(numbers) for name, numbers in columns.items()}
    return Batch(mask=mask, reward=terminal(torch.tensor([float(reward) for reward in rewards]), mask), **fields)


def row(*numbers: float) -> Tensor:
    """Return a tensor [1, T] with one number for each step.

    >>> row(1, 2).shape
    torch.Size([1, 2])
    """
    return torch.tensor([[float(number) for number in numbers]])


def show(x: Tensor) -> Any:
    """Return the numbers of a tensor as nested lists, rounded to three decimals.

    >>> show(row(1 / 3, 2))
    [[0.333, 2.0]]
    """
    return (x.double().mul(1000).round() / 1000 + 0.0).tolist()
