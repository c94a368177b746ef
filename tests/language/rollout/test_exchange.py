"""Trajectories of a step on several processes: everybody is told numbers, and who trains on a row gets its tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import ranks

from psigrad.language.rollout import exchange
from psigrad.language.rollout.types import Branch, Collected, Completion, Cut, Trajectory

PLAIN = Completion((5, 6, 7), (-0.5, -1.0, 0.0), (-0.5, -1.0, 0.0), "stop", 2**60)
DRAWN = replace(PLAIN, logprobs=(-0.1, -1e-9, -3.3), sampling_logprobs=(-0.2, float("-inf"), 0.0), finish_reason="length")
TOLD = ({"role": "tool", "content": "error: no such thing"}, {"role": "assistant", "content": "\ud800 ü"})
ROWS = [
    Trajectory(3, 0, (1, 2), PLAIN, 4, text="a", reward=0.0, status="scored", parts={"f": None, "g": 1.5}),
    Trajectory(3, 1, (1, 2), DRAWN, 4, text="", reward=None, reason="why"),
    Trajectory(
        *(9, 0, (1,), replace(PLAIN, experts="x", prompt_experts="y"), 4, "said", -1.25, "failed", "no", {"f": 0.1}),
        mask=(True, False, True),
        step_rewards=((0, 0.5),),
        turns=2,
        messages=TOLD,
        cuts=(Cut(1, "cut", "long"),),
        policy_turns=("s", "aid"),
        teacher_prompt_ids=(8, 8),
        branches=(Branch(2, (1, 2, 3)),),
        answer="",
    ),
    Trajectory(0, 0, (), Completion((), (), (), "stop", 0), 0),
]


def test_what_travels_arrives_as_it_was():
    assert exchange.unpack(exchange.pack(ROWS)) == ROWS
    assert exchange.unpack(exchange.pack([])) == []
    small = exchange.pack([replace(ROWS[0], completion=replace(PLAIN, ids=(1,) * 1000, logprobs=(-0.5,) * 1000))])
    fine = exchange.pack([replace(ROWS[0], completion=replace(PLAIN, ids=(1,) * 1000, logprobs=(-0.1,) * 1000))])
    assert len(fine) - len(small) == pytest.approx(4000, abs=50), "float64 only where float32 would round"


def test_apart_nothing_is_left_but_what_everybody_computes_with():
    there = exchange.unpack(exchange.pack([exchange.drop_tokens(t) for t in ROWS]))
    for t, told in zip(ROWS, there, strict=True):
        assert (told.text, told.policy_turns, told.teacher_prompt_ids, told.completion.experts) == ("", (), (), "")
        assert len(told.completion.ids) == len(t.completion.ids) and told.prompt_ids == t.prompt_ids
        assert [*told.completion.logprobs] == [*t.completion.logprobs] or told.completion.logprobs.format == "d"
        assert [*map(bool, told.mask)] == [*t.mask] and told.num_chosen == t.num_chosen
        for name in ("row", "k", "version", "reward", "status", "reason", "parts", "step_rewards", "turns", "cuts", "answer"):
            assert getattr(told, name) == getattr(t, name), name
        if told.completion.ids:
            with pytest.raises(RuntimeError, match="process that does not have it"):
                list(told.completion.ids)
    assert [message["content"] for message in there[2].messages] == ["error: "]
    assert [(c.start, len(c.prompt_ids), len(c.ids)) for c in there[2].contexts] == [(0, 1, 2), (2, 3, 1)]


def test_tokens_that_are_away_equal_the_same_tokens_and_no_others():
    away = exchange.drop_tokens(ROWS[0]).prompt_ids
    assert away == (1, 2) and {(1, 2)} == {away} and away == exchange.drop_tokens(ROWS[1]).prompt_ids and {(1, 2): 0}[away] == 0
    assert away != (2, 1) and {(1, 2, 3)} != {away} and away != exchange.drop_tokens(ROWS[2]).prompt_ids
    assert away[:1] == away[:1] and away[:1] != away[1:] and away[:1] != (1,), "of a part nobody knows the tokens"


def test_a_checkpoint_does_not_know_who_held_what():
    held = Collected([replace(ROWS[0], holders=(1, 0))], [], 0, {})
    assert "holders" not in held.to_json() and Collected.from_json(held.to_json()).trajectories == ROWS[:1]


@pytest.mark.parametrize(("size", "central"), [(2, ""), pytest.param(4, "", marks=pytest.mark.slow), (2, "central")])
def test_a_process_is_sent_the_numbers_of_all_and_the_tokens_of_what_it_trains_on(tmp_path, size, central):
    """Four bytes for each log-prob, of which a token has two where a filter drew, four for each token that is trained on, and
    some hundred for what else is said of a row. As pickled objects all tokens took 20 bytes each.
    """
    ranks.run(size, "rank_trajectories", "share", tmp_path, 8, 4, 1000, central)
    each = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert sum(one["own"] for one in each) == each[0]["tokens"] > 20_000
    for one in each:
        assert one["sent"] <= 4 * one["numbers"] + 4 * one["own"] + 500 * one["rows"], each
