"""Surrogates as functions of the ratio ρ = π/π_old: what each is worth, how hard it pushes, and where it stops pushing.

A grid of ρ is one batch of single steps; the push is d(−loss)/d log π by autograd through the library's own ratio and surrogate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from psigrad.experiments.settings import ClipSettings
from psigrad.objective import ratio
from psigrad.objective.surrogate import Surrogate, clip, clip_fractions, dual_clip, truncated_weight, unclipped
from psigrad.tabular.mdp import FloatArray

CASES = (0.5, 1.0, 2.0, 8.0)
OLD = 1 / 16
"""π_old of the one token, so that ratios reach up to 16."""


@dataclass(frozen=True)
class Result:
    """What `run` found."""

    settings: ClipSettings
    cases: tuple[float, ...]
    """The ratios of `Row.pushes`."""
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]


def run(settings: ClipSettings) -> Result:
    """Where each surrogate passes gradient. Raises ValueError for bounds that make no sense."""
    chosen = check(settings)
    return Result(settings, CASES, tuple(rows(chosen)), tuple(curves(chosen)))


def check(s: ClipSettings) -> list[Named]:
    """The surrogates of these settings. Raises ValueError for bounds that make no sense."""
    return surrogates(s.low, s.high, s.higher, s.bound, s.cap)


@dataclass(frozen=True)
class Named:
    """A surrogate with the name that people know it by."""

    name: str
    surrogate: Surrogate


def surrogates(low: float = 0.2, high: float = 0.2, higher: float = 0.28, bound: float = 3.0, cap: float = 5.0) -> list[Named]:
    """The surrogates that are compared. Raises ValueError for bounds that make no sense."""
    return [
        Named("no clip", unclipped),
        Named("clip (PPO)", clip(low, high)),
        Named("clip-higher (DAPO)", clip(low, higher)),
        Named("dual clip", dual_clip(low, high, bound)),
        Named("CISPO", truncated_weight(cap)),
    ]


def pushes(surrogate: Surrogate, rho: FloatArray, advantage: float) -> tuple[FloatArray, FloatArray]:
    """(value, push) at each ρ: the surrogate −L, and −∂L/∂ log π, which for no clip is ρ·A.

    π_old = 1/16 stays; log π moves. CISPO's value is its weight times A·log π and no function of ρ alone.
    """
    old = torch.full((len(rho), 1), float(np.log(OLD)), dtype=torch.float64)
    logp = (old + torch.from_numpy(np.log(rho))[:, None]).requires_grad_()
    loss = surrogate(logp, _log_ratio(logp, old), torch.full_like(old, advantage))
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    return -loss.detach().numpy()[:, 0], 0.0 - gradient.numpy()[:, 0]


def _log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    return ratio.token(logp, old, torch.ones_like(old, dtype=torch.bool))


@dataclass(frozen=True)
class Silence:
    """A range of ρ on which the gradient is exactly 0, by autograd; `high` is None where it has no end."""

    low: float
    high: float | None


def silences(surrogate: Surrogate, advantage: float, *, least: float = 1e-3, most: float = 15.9) -> list[Silence]:
    """Where a surrogate has no gradient: the ends of each range are found by bisection to 1e-9."""
    rho = np.geomspace(least, most, 2001)

    def silent(x: float) -> bool:
        return bool(pushes(surrogate, np.array([x]), advantage)[1][0] == 0)

    def edge(a: float, b: float) -> float:
        at_a = silent(a)
        while b - a > 1e-12:
            middle = (a + b) / 2
            a, b = (middle, b) if silent(middle) == at_a else (a, middle)
        return round((a + b) / 2, 9)

    dead = pushes(surrogate, rho, advantage)[1] == 0
    changes = [edge(float(rho[i]), float(rho[i + 1])) for i in np.flatnonzero(dead[1:] != dead[:-1])]
    starts = ([0.0] if dead[0] else []) + changes
    return [Silence(a, b) for a, b in zip_longest(starts[::2], starts[1::2])]


@dataclass(frozen=True)
class Row:
    """One surrogate for one sign of the advantage."""

    name: str
    advantage: int
    silent: tuple[Silence, ...]
    """Where the gradient vanishes."""
    pushes: tuple[float, ...]
    """−∂L/∂ log π at ρ = 0.5, 1, 2 and 8."""
    logged: bool
    """Whether the steps that `clip_fractions` counts, and so the run's clip_ratio, are those without gradient."""


@dataclass(frozen=True)
class Curve:
    """The surrogate and its push over ρ, for the picture."""

    name: str
    advantage: int
    ratio: tuple[float, ...]
    value: tuple[float, ...]
    push: tuple[float, ...]


def rows(chosen: Sequence[Named]) -> list[Row]:
    """Every surrogate, for A = 1 and A = −1."""
    return [
        Row(
            one.name,
            sign,
            tuple(silences(one.surrogate, sign)),
            tuple(map(float, pushes(one.surrogate, np.array(CASES), sign)[1])),
            _logged(one.surrogate, sign),
        )
        for sign in (1, -1)
        for one in chosen
    ]


def _logged(surrogate: Surrogate, advantage: float) -> bool:
    rho = np.geomspace(0.01, 15.0, 1000)
    logp = torch.from_numpy(np.log(rho))[:, None]
    hits = clip_fractions(surrogate, logp, torch.full_like(logp, advantage))
    counted = hits.get("clip_ratio/region_mean", torch.zeros_like(logp, dtype=torch.bool)).numpy()[:, 0]
    return bool((counted == (pushes(surrogate, rho, advantage)[1] == 0)).all())


def curves(chosen: Sequence[Named], most: float = 6.0) -> list[Curve]:
    """Values and pushes from ρ = 0 to `most`."""
    rho = np.linspace(0.02, most, 300)
    found = []
    for sign in (1, -1):
        for one in chosen:
            value, push = pushes(one.surrogate, rho, sign)
            columns = (tuple(column.round(6).tolist()) for column in (rho, value, push))
            found.append(Curve(one.name, sign, *columns))
    return found
