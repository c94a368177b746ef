"""Whether what a run holds stays what it held: what grows is told, by status and line."""

from __future__ import annotations

import json
import sys

import memory as benchmark
import pytest


@pytest.fixture
def memory(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "memory.json")
    return benchmark


@pytest.mark.parametrize(("last", "status"), [(105, 0), (106, 1)])
def test_what_grows_by_more_than_a_twentieth_ends_with_1(memory, tmp_path, monkeypatch, capsys, last, status):
    monkeypatch.setattr(memory, "make", lambda folder: None)
    monkeypatch.setattr(memory, "peaks", lambda folder, method, dtype, steps: [70, 80, 90, 95, 100, last])
    monkeypatch.setattr(sys, "argv", ["memory", str(tmp_path), "sft"])
    assert memory.main() == status
    assert capsys.readouterr().out.splitlines()[0] == f"sft float32: {last} MiB at step 6, 100 at step 5: {last / 100:.3f}"
    assert json.loads(memory.RESULTS.read_text())["sft bfloat16"]["mib"][-1] == last


@pytest.mark.slow
@pytest.mark.needs("linux")
def test_a_run_tells_what_it_held_after_each_step(memory, tmp_path):
    memory.make(tmp_path)
    held = memory.peaks(tmp_path, "sft", "bfloat16", 6)
    assert len(held) == 6 and 100 < held[0] <= held[-1] < 1.2 * held[0]
    assert memory.peaks(tmp_path, "sft", "bfloat16", 6) == held  # it has ended, and is not run again
