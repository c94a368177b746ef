"""The workloads that people have: pairs are kept, TRL has its best setting, and a missed goal ends with status 1."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def real(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import real

    yield real
    del sys.modules["real"], sys.modules["beside_trl"]


def pair(ours, trl, setting=(16, False), mb=(1.0, 2.0)):
    return {"trl_setting": list(setting), "ours": ours, "trl": trl, "ours_mb": mb[0], "trl_mb": mb[1]}


def test_the_interval_is_that_of_the_logarithms_by_hand(real):
    """Of 1 and e² the mean of the logarithms is 1, their deviation √2: the half width is 12.71 · √2 / √2."""
    middle, low, high = real.interval([1.0, math.exp(2)])
    assert middle == pytest.approx(math.e) and math.log(high) == pytest.approx(1 + 12.71, abs=0.01)
    assert math.log(low) == pytest.approx(1 - 12.71, abs=0.01)
    assert real.interval([3.0]) == (pytest.approx(3.0), 0.0, math.inf)


def test_trl_has_its_best_setting_and_what_is_there_is_not_taken_again(real):
    work, kept, asked = real.WORKS["R7"], [], []

    def take(work, pairs, keep):
        asked.append((work.micro_batch, work.half_weights, pairs))
        for _ in range(pairs):
            keep({"ours": 1.0, "trl": 3.0 if work.half_weights else 4.0, "ours_mb": 1.0, "trl_mb": 2.0})

    found = [{"workload": "R7", **pair(1.0, 5.0)}]
    real.complete(work, found, 4, take, kept.append)
    assert asked == [(32, False, 1), (16, True, 1), (16, True, 3)]
    assert len(kept) == 5 and real.best_of(found) == (16, True)
    real.complete(work, found, 4, take, kept.append)
    assert len(kept) == 5


@pytest.mark.parametrize(("times", "share", "missed"), [(5.0, 0.5, False), (4.9, 0.5, True), (9.0, 0.51, True)])
def test_a_goal_is_missed_where_the_interval_ends_below_it(real, times, share, missed):
    taken = [pair(1.0, times * factor, mb=(share, 1.0)) for factor in (0.995, 1.0, 1.005) * 3]
    lines, bad = real.judge(real.WORKS["R7"], taken)
    assert bad is missed and ("missed" in " ".join(lines)) is missed


def test_few_pairs_miss_nothing(real):
    assert not real.judge(real.WORKS["R7"], [pair(1.0, 0.1)])[1]


def test_the_command_goes_on_with_its_file_and_tells_by_its_status(real, tmp_path, monkeypatch, capsys):
    def measured(one, dtype, threads, work, pairs, keep):
        for _ in range(pairs):
            keep({"ours": 1.0, "trl": 2.0, "ours_mb": 1.0, "trl_mb": 4.0})

    monkeypatch.setattr(real, "measure", measured)
    file = tmp_path / "real.jsonl"
    monkeypatch.setattr(sys, "argv", ["real.py", "R7", "--json", str(file)])
    assert real.main() == 1 and "2.00 times as fast" in capsys.readouterr().out
    assert len(file.read_text().splitlines()) == 9 and json.loads(file.read_text().splitlines()[0])["dtype"] == "bfloat16"
    monkeypatch.setattr(real, "measure", lambda *given: pytest.fail("taken again"))
    assert real.main() == 1, "nothing is missing"
    monkeypatch.setattr(sys, "argv", ["real.py", "R4"])
    with pytest.raises(real.UserError, match="4 bits"):
        real.main()
