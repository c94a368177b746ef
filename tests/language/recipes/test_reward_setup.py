"""The rewards of a run: their names, weights and lengths, and which rows they can judge."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from psigrad.config import Data, OnlineConfig, Sampling
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.language.rewards.builtin import Length, SoftOverlong


def test_reward_models_have_names_of_their_own_and_finite_weights():
    config = OnlineConfig(reward=("exact",), reward_model=("a/model", "b/model", "a/model"), reward_weights=(1.0, 2.0, 3.0, 4.0))
    assert RewardSetup.of(config).weights == {"exact": 1.0, "a": 2.0, "b": 3.0, "a_2": 4.0}
    with pytest.raises(UserError, match="finite"):
        RewardSetup.of(replace(config, reward_weights=(1.0, 2.0, 3.0, math.nan)))


def test_rows_whose_columns_differ_are_judged_each_by_its_own():
    """64 rows are asked about at once; only those behind them have the column `note`."""
    rows = [Row(f"x:{i}", prompt="q", columns={"answer": str(i)}) for i in range(64)]
    odd = {66: "2\\sqrt{3}"}
    rows += [Row(f"x:{i}", prompt="q", columns={"answer": odd.get(i, "1"), "note": "n"}) for i in range(64, 70)]
    config = OnlineConfig(reward=("numeric",), data=Data(bad_rows="skip"))
    kept = RewardSetup.of(config).judgeable(rows)
    assert [row.source for row in kept] == [f"x:{i}" for i in range(70) if i != 66]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("length", Length(2048)),
        ({"reward": "length", "penalty": 0.1}, Length(2048, 0.1)),
        ({"reward": "length", "max_completion_length": 100}, Length(100)),
        ("soft_overlong", SoftOverlong(2048, 512)),
        ({"reward": "soft_overlong"}, SoftOverlong(2048, 512)),
        ({"reward": "soft_overlong", "soft_punish_cache": 128}, SoftOverlong(2048, 128)),
        ({"reward": "soft_overlong", "soft_punish_cache": 1024}, SoftOverlong(2048, 1024)),
        ({"reward": "soft_overlong", "max_completion_length": 100}, SoftOverlong(100, 25)),
        (SoftOverlong(), SoftOverlong(256, 64)),
    ],
)
def test_lengths_count_against_the_runs_own_unless_they_are_given_another(given, meant):
    config = OnlineConfig(reward=(given,), sampling=Sampling(max_completion_length=2048))
    assert RewardSetup.of(config).functions == [meant]


def wants_label(completions, label, **columns):
    return [1.0 for _ in completions]


def wants_nothing(completions, hint=None, **columns):
    return [1.0 for _ in completions]


@pytest.mark.parametrize(
    ("rewards", "weights", "kept"),
    [
        (("exact",), (), "0 2"),
        ((wants_label,), (), "0 1"),
        (("exact", wants_label), (), "0 1 2"),
        (("exact", wants_label), (1.0, 0.0), "0 2"),
        (("exact", wants_nothing), (), "0 1 2 3 4"),
        ((wants_nothing,), (), "0 1 2 3 4"),
    ],
)
def test_rows_without_a_gold_are_dropped_and_counted_before_the_first_step(rewards, weights, kept):
    golds = [("5", "{}"), (None, "{}"), (["5"], None), (" ", ""), (None, None)]
    rows = [Row(f"t.csv:{i}", prompt="q", columns={"answer": a, "label": b, "hint": None}) for i, (a, b) in enumerate(golds)]
    told = []
    setup = RewardSetup.of(OnlineConfig(reward=rewards, reward_weights=weights))
    found = setup.judgeable(rows, lambda kind, text, **fields: told.append((kind, text, fields)))
    assert [row.source for row in found] == [f"t.csv:{i}" for i in kept.split()]
    assert (found is rows) == (not told) == (len(found) == 5)
    assert sum(fields["without_gold"] for *_, fields in told) == 5 - len(found)
    if rewards == ("exact",):
        assert told == [
            (
                "rows_left_out",
                "3 rows are dropped for an empty column 'answer', which the reward needs: t.csv:1, t.csv:3, t.csv:4.",
                {"column": "answer", "without_gold": 3, "kept": 2},
            )
        ]
        with pytest.raises(UserError, match=r"No row is left\. 1 row is dropped.* column 'answer'.*: t\.csv:4; fill this column"):
            setup.judgeable(rows[4:])


def test_a_reward_model_judges_rows_without_a_gold():
    rows = [Row("t.csv:2", prompt="q", columns={"answer": None}), Row("t.csv:3", prompt="q", columns={"answer": "1"})]
    assert RewardSetup.of(OnlineConfig(reward=("exact",), reward_model=("m",))).judgeable(rows) is rows
