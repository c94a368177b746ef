"""Order, batches and micro-batches against slow oracles written separately."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psigrad.errors import UserError
from psigrad.language.models.packing import batch_at, order, pack_by_tokens, pack_groups


def slow_batches(steps: int, batch_size: int, n: int, seed: int) -> list[list[int]]:
    """A cursor that walks through one epoch after another."""
    epoch, cursor, batches = 0, 0, []
    for _ in range(steps):
        batch: list[int] = []
        while len(batch) < batch_size:
            if cursor == n:
                epoch, cursor = epoch + 1, 0
            batch.append(int(order(n, seed, epoch)[cursor]))
            cursor += 1
        batches.append(batch)
    return batches


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 90), seed=st.integers(0, 5))
def test_every_step_equals_a_cursor_that_walks_through_the_epochs(n: int, batch_size: int, seed: int) -> None:
    expected = slow_batches(6, batch_size, n, seed)
    backwards = [batch_at(step, batch_size, n, seed) for step in reversed(range(6))]
    assert backwards[::-1] == expected


@pytest.mark.parametrize(("n", "batch_size"), [(12, 4), (10, 4), (7, 10), (5, 1), (1, 3)])
def test_each_row_comes_once_per_epoch(n: int, batch_size: int) -> None:
    epochs = 3 * batch_size
    walk = list(chain.from_iterable(batch_at(step, batch_size, n, 0) for step in range(epochs * n // batch_size)))
    for epoch in range(epochs):
        assert sorted(walk[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_orders_differ_between_epochs_and_seeds_and_repeat_for_the_same_arguments() -> None:
    orders = [tuple(order(50, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert tuple(order(50, 1, 2)) == orders[5]


@pytest.mark.parametrize(("step", "batch_size", "n"), [(0, 4, 0), (0, 0, 5), (-1, 4, 5)])
def test_impossible_batches_are_user_errors(step: int, batch_size: int, n: int) -> None:
    with pytest.raises(UserError):
        batch_at(step, batch_size, n, 0)


LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 80))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    packed = pack_by_tokens(lengths, budget)
    assert Counter(chain.from_iterable(packed)) == Counter(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= budget or len(members) == 1 for members in packed)
    assert all(members for members in packed)
    if lengths:
        assert max(lengths) in [lengths[i] for i in packed[0]]


def test_packing_is_first_fit_decreasing_on_a_case_worked_by_hand() -> None:
    # 7 | 6 | 5 joins neither (7+5, 6+5 > 10) | 4 joins 6 | 3 joins 7 | 2 joins 5 | 12 is above the budget, first and alone
    assert pack_by_tokens([4, 7, 12, 2, 6, 3, 5], 10) == [[2], [1, 5], [0, 4], [3, 6]]


def test_packing_fills_micro_batches_where_the_order_of_arrival_would_not() -> None:
    lengths = [3, 3, 3, 7, 7, 7]
    assert len(pack_by_tokens(lengths, 10)) == 3
    in_order, room = 0, 0
    for length in lengths:
        in_order, room = (in_order, room - length) if length <= room else (in_order + 1, 10 - length)
    assert in_order == 4


def group_cost(part: tuple[int, list[int]], prompts: list[int], completions: list[list[int]]) -> int:
    g, ks = part
    return prompts[g] + sum(completions[g][k] for k in ks)


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=6)), max_size=10),
    budget=st.integers(1, 120),
)
def test_groups_are_whole_unless_they_alone_are_above_the_budget(groups: list[tuple[int, list[int]]], budget: int) -> None:
    prompts, completions = [p for p, _ in groups], [c for _, c in groups]
    packed = pack_groups(prompts, completions, budget)
    wanted = Counter((g, k) for g, lengths in enumerate(completions) for k in range(len(lengths)))
    assert Counter((g, k) for members in packed for g, ks in members for k in ks) == wanted
    parts = Counter(g for members in packed for g, _ in members)
    for g, (prompt, lengths) in enumerate(groups):
        assert parts[g] == 1 or prompt + sum(lengths) > budget
    for members in packed:
        cost = sum(group_cost(part, prompts, completions) for part in members)
        assert cost <= budget or (len(members) == 1 and len(members[0][1]) == 1)


def test_packing_refuses_a_budget_below_one() -> None:
    with pytest.raises(UserError, match="micro_batch_tokens"):
        pack_by_tokens([1], 0)
