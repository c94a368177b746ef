"""The benchmark of the world takes functions' and methods' places by name: all of them are there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from psigrad.processes.parallel.world import Alone, World

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import world

    yield world
    for name in ("world", "cluster", "workloads"):
        sys.modules.pop(name, None)


def test_every_stub_has_a_function_whose_place_it_takes(benchmark):
    assert all(callable(getattr(benchmark.world, name)) for name in benchmark.STUBS)
    assert set(benchmark.METHODS) == {name for name in vars(World) if callable(getattr(World, name)) and name[0] != "_"}
    assert all(callable(getattr(Alone, name)) for name in benchmark.METHODS)
