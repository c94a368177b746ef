"""Scorers over the functions of zoo.py, in this process or in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from inline_scorer import InlineScorer, results

from psigrad.language.rewards import RewardPool, RewardSpec, Samples, resolve

ZOO = Path(__file__).with_name("zoo.py")


@pytest.fixture(scope="session")
def zoo() -> Callable[[str], RewardSpec]:
    """A function of zoo.py by name, as a user's file."""
    return lambda name: resolve(f"{ZOO}:{name}")


@pytest.fixture(scope="session")
def score() -> Callable[..., Any]:
    """Score completions; groups of `size`, other keywords are columns."""

    def score(scorer: Any, completions: Sequence[Any], size: int = 4, **columns: list[Any]) -> Any:
        parts = [slice(start, start + size) for start in range(0, len(completions), size)]
        return results(scorer, *(group_of(completions, part, columns) for part in parts))

    def group_of(completions: Sequence[Any], part: slice, columns: dict[str, list[Any]]) -> Samples:
        own, count = completions[part], len(completions[part])
        return Samples(["question"] * count, own, [[1]] * count, {name: values[part] for name, values in columns.items()})

    return score


@pytest.fixture
def pool_of() -> Iterator[Callable[..., RewardPool]]:
    """Makes pools and closes them."""
    made: list[RewardPool] = []

    def make(*specs: RewardSpec, **settings: Any) -> RewardPool:
        made.append(RewardPool(specs, **settings))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture(params=["inline", "pool"])
def scorer_of(request, pool_of) -> Callable[..., Any]:
    """Makes scorers of both kinds, which keep one contract."""
    if request.param == "pool":
        return lambda *specs, **settings: pool_of(*specs, timeout=60.0, **settings)
    return lambda *specs, **settings: InlineScorer(specs, **settings)
