"""The workloads that people have: pairs are kept, TRL has its best setting, and a missed goal ends with status 1."""

from __future__ import annotations

import json
import math
import sys

import pytest
import real


def taken(ours, trl, mb=(1.0, 2.0), first=7.0, **times):
    """A pair as `beside_trl.pair` has it; `times` are the seconds of phases, whose floor is one."""
    found = {"ours": ours, "trl": trl, "ours_mb": mb[0], "trl_mb": mb[1], "ours_first": first, "trl_first": 20.0}
    found |= {"ours_seconds": ours, "trl_seconds": trl, "ours_tokens": 100, "trl_tokens": 100}
    phases = {name.replace("_", "-"): value for name, value in times.items()}
    return found | {"phases": phases, "floor": dict.fromkeys(phases, 1.0)}


def pair(*given, setting=(16, False), **more):
    """The same as a line of the file."""
    return {"trl_setting": list(setting), **taken(*given, **more)}


def test_the_interval_is_that_of_the_logarithms_by_hand():
    """Of 1 and e² the mean of the logarithms is 1, their deviation √2: the half width is 12.71 · √2 / √2."""
    middle, low, high = real.interval([1.0, math.exp(2)])
    assert middle == pytest.approx(math.e) and math.log(high) == pytest.approx(1 + 12.71, abs=0.01)
    assert math.log(low) == pytest.approx(1 - 12.71, abs=0.01)
    assert real.interval([3.0]) == (pytest.approx(3.0), 0.0, math.inf)


def test_trl_has_its_best_setting_and_what_is_there_is_not_taken_again():
    work, kept, asked = real.WORKS["R7"], [], []

    def take(work, pairs, keep):
        asked.append((work.micro_batch, work.half_weights, pairs))
        for _ in range(pairs):
            keep(taken(1.0, 3.0 if work.half_weights else 4.0))

    found = [{"workload": "R7", **pair(1.0, 5.0)}]
    real.complete(work, found, 4, take, kept.append)
    assert asked == [(32, False, 1), (16, True, 1), (16, True, 3)]
    assert len(kept) == 5 and real.best_of(found) == (16, True)
    real.complete(work, found, 4, take, kept.append)
    assert len(kept) == 5


def test_a_setting_that_more_pairs_show_to_be_best_has_all_its_pairs():
    ratios = {(16, False): [6.0, 6.1, 6.2], (32, False): [9.0], (16, True): [5.0, 7.0, 8.0]}  # of the last the median is 7
    found = []

    def take(work, pairs, keep):
        for _ in range(pairs):
            keep(taken(1.0, ratios[(work.micro_batch, work.half_weights)].pop(0)))

    real.complete(real.WORKS["R7"], found, 3, take, lambda pair: None)
    assert real.best_of(found) == (16, False) and len(real.of_setting(found, (16, False))) == 3


@pytest.mark.parametrize(("times", "share", "missed"), [(5.0, 0.5, False), (4.9, 0.5, True), (9.0, 0.51, True)])
def test_a_goal_is_missed_where_the_interval_ends_below_it(times, share, missed):
    pairs = [pair(1.0, times * factor, mb=(share, 1.0)) for factor in (0.995, 1.0, 1.005) * 3]
    lines, bad = real.judge(real.WORKS["R7"], pairs)
    assert bad is missed and ("missed" in " ".join(lines)) is missed


def test_few_pairs_miss_nothing():
    assert not real.judge(real.WORKS["R7"], [pair(1.0, 0.1, forward_backward=9.0)])[1]


@pytest.mark.parametrize(
    ("name", "change", "missed"),
    [
        ("R1", {}, False),
        ("R1", {"first": 8.1}, True),
        ("R2", {"first": 8.1}, False),
        ("R1", {"sample": 1.9}, True),
        ("R1", {"forward_backward": 1.5}, True),
        ("R1", {"rest": 5.0}, False),
    ],
)
def test_the_first_step_and_the_phases_have_goals_of_their_own(name, change, missed):
    """Sampling may take 1.8 times its floor, training 1.4 times; a phase without a goal is told alone."""
    pairs = [pair(1.0, 30.0 + 0.01 * n, mb=(0.5, 1.0), **{"sample": 1.7, "forward_backward": 1.3, **change}) for n in range(7)]
    lines, bad = real.judge(real.WORKS[name], pairs)
    assert bad is missed and sum("missed" in line for line in lines) == missed
    text = "\n".join(lines)
    assert f"{change.get('first', 7.0):.1f} s to the end of the first step (TRL 20.0)" in text
    assert "psigrad: 1.00 s a step, 100 tokens/s" in text
    assert f"sample: {change.get('sample', 1.7):.2f} s, {change.get('sample', 1.7):.2f} times its floor" in text


@pytest.mark.parametrize(("mb", "seconds", "missed"), [(1.09, 1.24, 0), (0.91, 0.76, 0), (1.12, 1.0, 1), (0.88, 0.7, 2)])
def test_the_plan_is_within_a_tenth_in_memory_and_a_quarter_in_time(mb, seconds, missed):
    pairs = [{**pair(1.0, 9.0 + 0.01 * n, mb=(400.0, 1000.0)), "plan": {"mb": 400 * mb, "seconds": seconds}} for n in range(7)]
    lines, bad = real.judge(real.WORKS["R6"], pairs)
    assert sum("missed" in line for line in lines) == missed and bad is bool(missed)
    assert any(f"the plan says {400 * mb:.4g} MiB" in line for line in lines)


def test_a_phase_without_a_floor_is_told_and_judges_nothing():
    """As of episodes, some of whose tokens are the environment's."""
    pairs = [{**pair(1.0, 30.0, sample=50.0), "floor": {}} for _ in range(7)]
    lines, bad = real.judge(real.WORKS["R5"], pairs)
    assert not bad and any("sample: 50.00 s" in line and "floor" not in line for line in lines)


def test_the_command_goes_on_with_its_file_and_tells_by_its_status(tmp_path, monkeypatch, capsys):
    def measured(one, dtype, threads, work, pairs, keep):
        for _ in range(pairs):
            keep(taken(1.0, 2.0, mb=(1.0, 4.0)))

    monkeypatch.setattr(real, "measure", measured)
    file = tmp_path / "real.jsonl"
    monkeypatch.setattr(sys, "argv", ["real.py", "R7", "--json", str(file)])
    assert real.main() == 1 and "2.00 times as fast" in capsys.readouterr().out
    assert len(file.read_text().splitlines()) == 9 and json.loads(file.read_text().splitlines()[0])["dtype"] == "bfloat16"
    monkeypatch.setattr(real, "measure", lambda *given: pytest.fail("taken again"))
    assert real.main() == 1, "nothing is missing"
    monkeypatch.setattr(sys, "argv", ["real.py", "R99"])
    with pytest.raises(real.UserError, match="none of R1"):
        real.main()


def test_without_bitsandbytes_a_coded_base_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real, "measure", lambda *given: pytest.fail("measured"))
    monkeypatch.setattr(real, "find_spec", lambda name: None)
    monkeypatch.setattr(real, "PACKAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["real.py", "R4", "--json", str(tmp_path / "real.jsonl")])
    assert real.main() == 0 and "R4  not measured: TRL's base in nf4 needs bitsandbytes" in capsys.readouterr().out
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").touch()
    assert not real.lacks(real.WORKS["R4"])
