"""What a step sends between processes: with whole models once, in shards with each micro-batch."""

from __future__ import annotations

import json

import pytest
import ranks
from rank_gradients import make_models


def sent(folder, budgets: str, sharded: bool, once: str = "") -> list[dict]:
    """Of rank 0 of two, for each budget."""
    out = folder / f"{sharded}{once}.json"
    ranks.run(2, "rank_collectives", "main", folder, out, budgets, "24", once, lockstep=sharded)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def test_whole_models_send_their_gradient_once_for_a_step(models):
    steps = sent(models, "1000,100", False)
    print(steps)
    few, many = steps
    assert many["micro"] >= 4 * few["micro"]
    assert few["calls"] == many["calls"] and few["bytes"] == many["bytes"]
    assert list(few["bytes"]) == ["all_reduce"] and few["bytes"]["all_reduce"] == pytest.approx(few["weights"], rel=0.01)


def test_shards_are_gathered_twice_for_each_micro_batch_and_reduced_in_each_or_once(models):
    """Their norm is one message. A gradient that is reduced once is the same."""
    each, once = sent(models, "1000,100", True), sent(models, "1000,100", True, "once")
    for step, other in zip(each, once, strict=True):
        print(step, other)
        for one, times in ((step, step["micro"]), (other, 1)):
            gathered, reduced = one["bytes"]["all_gather_single"], one["bytes"]["reduce_scatter_single"]
            assert reduced == pytest.approx(times * one["weights"], rel=0.02)
            assert gathered <= 2.02 * one["micro"] * one["weights"] and one["norm calls"] == {"all_reduce": 1}
            assert one["norm reads"] == 2, "all squares at once, and their sum over the processes"
        assert other["norm"] == pytest.approx(step["norm"], rel=1e-5)
