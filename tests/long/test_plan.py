"""The predicted peak memory is within the margin of the measured one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import scripts

from psigrad_extras.preflight.plan.predict import MARGIN

pytestmark = pytest.mark.long
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield scripts.load(BENCHMARKS / "plan.py")
    sys.modules.pop("workloads", None)


@pytest.mark.parametrize("name", ["W0", "W1", "W2", "W3", "W4"])
def test_the_prediction_holds(name, script):
    line = script.measure(script.WORKLOADS[name], "float32", 1)
    assert abs(line["error"]) <= MARGIN, line
