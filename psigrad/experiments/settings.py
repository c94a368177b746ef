"""Settings of the experiments; light, so that help needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PsiSettings:
    """The process, its critics, how much is sampled, and where the figures go."""

    seeds: int = 10
    """Independent repetitions; intervals are over them."""
    episodes: int = 16_000
    """Episodes of each seed."""
    batch: int = 16
    """Episodes of one gradient estimate."""
    discount: float = 1.0
    """γ, of the process and of every Ψ."""
    at_the_end: bool = False
    """Pay the last step only, as completions are paid."""
    critic_error: float = 1.0
    """Standard deviation of the noise on the rough critic's values."""
    out: str = "runs/experiments"
    """Folder for psi.json and psi.png."""


@dataclass(frozen=True)
class BiasSettings:
    """The process, how wrong V̂ is, how much is sampled, and where the figures go."""

    world: str = "walk"
    """walk or grid."""
    error: float = 0.5
    """How wrong V̂ is: 0 not at all, 1 as wrong as V̂ = 0."""
    seeds: int = 10
    """Independent repetitions; intervals are over them."""
    episodes: int = 2_000
    """Episodes of each seed."""
    out: str = "runs/experiments"
    """Folder for bias.json and bias.png."""


@dataclass(frozen=True)
class ClipSettings:
    """Bounds of the surrogates, and where the figures go."""

    low: float = 0.2
    """How far below 1 the ratio may fall."""
    high: float = 0.2
    """How far above 1 the ratio may rise."""
    higher: float = 0.28
    """The same for clip-higher."""
    bound: float = 3.0
    """Greatest ratio of dual clip for a negative advantage."""
    cap: float = 5.0
    """Greatest weight of CISPO."""
    out: str = "runs/experiments"
    """Folder for clip.json and clip.png."""
