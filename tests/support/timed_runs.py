"""Timed runs in a test's own process."""

from __future__ import annotations

import pytest
from timed.workload import Phases


@pytest.fixture
def timed_functions(monkeypatch) -> None:
    """What a timed run puts around functions goes with the test: a run has a process of its own, a test has not."""
    around = Phases.around

    def noted(self: Phases, owner: object, method: str, name: str) -> None:
        monkeypatch.setattr(owner, method, getattr(owner, method))
        around(self, owner, method, name)

    monkeypatch.setattr(Phases, "around", noted)
