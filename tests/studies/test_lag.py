"""The simulation of a lag against closed forms, and what it is there to show."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from psigrad.errors import UserError
from studies import lag
from studies.settings import LagSettings

ALIKE = LagSettings(completions=64, mean_length=100, spread=0.0, steps=12, most_devices=8, slots=16, swap=0.5, publish=0.25)
LONG_TAIL = LagSettings(completions=256, mean_length=400, longest=4000, steps=9, most_devices=8, slots=32, swap=0.5, publish=0.1)


def sampling(s: LagSettings, devices: int) -> float:
    """Seconds until completions that are all alike have ended: rounds of full slots, each as long as one completion."""
    each = s.completions // devices
    assert each * devices == s.completions and each <= s.slots
    return s.mean_length * (s.decode_weights + each * s.decode_cache)


def test_taking_turns_is_the_sum_of_its_parts():
    row = lag.in_turns(ALIKE, 8)
    tokens = ALIKE.completions * ALIKE.mean_length
    period = sampling(ALIKE, 8) + ALIKE.swap + tokens * ALIKE.train_token / 8
    assert row.speed == pytest.approx(tokens / period / 8, rel=1e-9)


@pytest.mark.parametrize("train", [1e-5, 1e-3])
def test_with_lengths_alike_a_lag_hides_the_shorter_half(train):
    s = replace(ALIKE, train_token=train)
    tokens = s.completions * s.mean_length
    training = tokens * train / 4 + s.publish * (1 + 0.2 * math.log2(4))
    for k, period in ((0, sampling(s, 4) + training), (1, max(sampling(s, 4), training))):
        row = lag.apart(s, 8, 0.5, k, True, 1.0)
        # with a lag samplers hold completions of two steps at the edges, which costs them a part of a step at most
        assert row.speed == pytest.approx(tokens / period / 8, rel=1e-9 if k == 0 else 0.15)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_in_order_the_staleness_is_the_lag_and_no_length_comes_first(k):
    row = lag.apart(LONG_TAIL, 8, 0.5, k, True, 1.0)
    expected = [min(step, k) for step in range(LONG_TAIL.steps)]
    assert row.oldest == k and row.staleness == pytest.approx(sum(expected) / len(expected))
    assert row.first_lengths == pytest.approx(1.0, abs=0.1)


def test_first_come_trains_on_short_completions_first_and_on_older_ones():
    in_order = lag.apart(LONG_TAIL, 8, 0.5, 2, True, 1.0)
    first_come = lag.apart(LONG_TAIL, 8, 0.5, 2, False, 1.0)
    assert first_come.first_lengths < 0.9 * in_order.first_lengths
    assert first_come.oldest > 2


def test_a_longer_lag_is_never_much_slower_and_the_tail_is_what_it_hides():
    speeds = [lag.apart(LONG_TAIL, 8, 0.5, k, True, 1.0).speed for k in (0, 1, 2, 4)]
    assert all(after > 0.98 * before for before, after in itertools.pairwise(speeds)) and speeds[-1] > 1.2 * speeds[0]


def test_lengths_have_the_mean_and_stay_below_the_longest():
    found = lag.lengths(LagSettings(), 100_000)
    assert max(found) == 32_768 and sum(found) / len(found) == pytest.approx(3950, rel=0.03)


@pytest.mark.parametrize(("setting", "value"), [("completions", 0), ("spread", -1.0), ("steps", 2), ("most_devices", 4)])
def test_settings_that_make_no_sense_are_refused(setting, value):
    with pytest.raises(UserError, match=setting):
        lag.check(replace(LagSettings(), **{setting: value}))
