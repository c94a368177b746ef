"""The benchmark of the world takes functions' and methods' places by name: all of them are there."""

from __future__ import annotations

import world as benchmark

from psigrad.processes.parallel.world import Alone, World


def test_every_stub_has_a_function_whose_place_it_takes():
    assert all(callable(getattr(benchmark.world, name)) for name in benchmark.STUBS)
    assert set(benchmark.METHODS) == {name for name in vars(World) if callable(getattr(World, name)) and name[0] != "_"}
    assert all(callable(getattr(Alone, name)) for name in benchmark.METHODS)
