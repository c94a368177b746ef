"""How many threads are taken where no setting says it."""

from __future__ import annotations

import pytest

from psigrad.runs import machine


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"OMP_NUM_THREADS": "4,2"}, 8),
        ({"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}, 1),
        ({"LOCAL_WORLD_SIZE": "2"}, 4),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, 4),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
    ],
)
def test_threads_are_the_environments_or_a_share_of_the_cores(monkeypatch, environment, threads):
    monkeypatch.setattr(machine, "cores", lambda: 8)
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert machine.default_threads() == threads
