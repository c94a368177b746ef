"""How ε falls over episodes and step sizes over visits. A schedule is a number, or a function of the count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Schedule = float | Callable[[int], float]


@dataclass(frozen=True)
class linear:
    """From `first` to `last` in equal steps over `count`, then `last`: first + (last − first)·min(k/count, 1)."""

    first: float
    last: float
    count: int

    def __call__(self, k: int) -> float:
        """The value after k episodes."""
        return self.first + (self.last - self.first) * min(k / self.count, 1.0)


@dataclass(frozen=True)
class exponential:
    """max(first·decay^k, last)."""

    first: float
    last: float
    decay: float

    def __call__(self, k: int) -> float:
        """The value after k episodes."""
        return max(self.first * self.decay**k, self.last)


@dataclass(frozen=True)
class inverse_visits:
    """1/n^power at the n-th visit, n >= 1. Their sum is infinite, that of their squares is not (Robbins, Monro)."""

    power: float = 1.0

    def __post_init__(self) -> None:
        if not 0.5 < self.power <= 1:
            raise ValueError(f"power is {self.power}; expected in (0.5, 1], where learning converges.")

    def __call__(self, n: int) -> float:
        """The step size at the n-th visit."""
        return float(n**-self.power)


def at(schedule: Schedule, count: int, name: str) -> float:
    """The value of a schedule, checked to lie in [0, 1]."""
    value = schedule(count) if callable(schedule) else schedule
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value} at {count}; expected in [0, 1].")
    return value
