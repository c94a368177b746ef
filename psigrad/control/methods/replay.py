"""The replay buffer: a ring of transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from psigrad.control.networks.distributions import Array


@dataclass(frozen=True, eq=False)
class Transitions:
    """M transitions as tensors."""

    observation: Tensor
    """[M, D]"""
    action: Tensor
    """[M] int64"""
    reward: Tensor
    """[M]"""
    next_observation: Tensor
    """[M, D] the observation after the step, also at the end of an episode, where it is not that of the next one."""
    terminated: Tensor
    """[M] bool: nothing follows. An episode cut by its limit is not terminated."""


class ReplayBuffer:
    """The last `capacity` transitions, drawn from uniformly with replacement."""

    def __init__(self, capacity: int, size: int, dtype: np.typing.DTypeLike = np.float32) -> None:
        self.capacity, self.added = capacity, 0
        self._data: dict[str, Array] = {
            "observation": np.empty((capacity, size), dtype),
            "action": np.empty(capacity, np.int64),
            "reward": np.empty(capacity, np.float32),
            "next_observation": np.empty((capacity, size), dtype),
            "terminated": np.empty(capacity, bool),
        }

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, **fields: Array) -> None:
        """Transitions [m, …], oldest first; of more than `capacity` the last stay."""
        count = len(fields["action"])
        place = np.arange(self.added, self.added + count) % self.capacity
        for name, data in self._data.items():
            data[place] = fields[name]
        self.added += count

    def sample(self, count: int, rng: np.random.Generator) -> Transitions:
        """`count` transitions. Raises `ValueError` while the buffer is empty."""
        if not len(self):
            raise ValueError("The replay buffer is empty; add transitions before sampling (learning_starts).")
        at = rng.integers(len(self), size=count)
        return Transitions(**{name: torch.from_numpy(data[at]) for name, data in self._data.items()})

    def tensors(self) -> dict[str, Tensor]:
        """What must survive a stop."""
        stored = {name: torch.from_numpy(data[: len(self)].copy()) for name, data in self._data.items()}
        return {**stored, "added": torch.tensor(self.added)}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """The transitions of another buffer's `tensors`, oldest first, in place of those here; of more than fit the last.

        Raises `ValueError` where they are of other observations.
        """
        for name, data in self._data.items():
            if name not in tensors or tensors[name].shape[1:] != data.shape[1:]:
                found = f"{name} of shape {list(tensors[name].shape[1:])}" if name in tensors else f"no {name}"
                raise ValueError(f"it holds {found}; expected shape {list(data.shape[1:])}")
        oldest = int(tensors["added"]) % max(1, len(tensors["action"])) if "added" in tensors else 0
        self.added = 0
        self.add(**{name: np.roll(tensors[name].numpy(), -oldest, 0)[-self.capacity :] for name in self._data})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.added = int(tensors["added"])
        for name, data in self._data.items():
            data[: len(self)] = tensors[name].numpy()
