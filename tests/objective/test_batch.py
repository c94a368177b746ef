"""A batch and its statistics: what it holds and refuses, and sums over steps and groups."""

from __future__ import annotations

import math

import pytest
import torch
from edge_batches import batch, rows

from psigrad.config.algorithms import resolve
from psigrad.objective import Batch, Totals, terminal
from psigrad.objective.batch import _holes, discounted_sum, rank_in_group, scramble, step_covariance


def test_totals_add_up():
    assert Totals(1, 2, 3) + Totals(4, 5, 6) == Totals(5, 7, 9)


def test_steps_outside_have_no_covariance():
    x, y = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[2.0, 6.0, -9.0]])
    found = step_covariance(x, y, torch.tensor([[True, True, False]]))
    assert found.tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 40, 700])
def test_returns_skip_holes(steps):
    generator = torch.Generator().manual_seed(steps)
    x, mask = torch.randn(5, steps, generator=generator, dtype=torch.float64), torch.rand(5, steps, generator=generator) > 0.4
    expected = torch.zeros_like(x)
    for n in range(5):
        total = 0.0
        for t in reversed(range(steps)):
            if mask[n, t]:
                expected[n, t] = total = float(x[n, t]) + 0.9 * total
    torch.testing.assert_close(discounted_sum(x, mask, 0.9), expected)
    brute = any(bool(mask[n, t]) and not bool(mask[n, t - 1]) for n in range(5) for t in range(1, steps))
    assert _holes(mask) == brute


def test_two_steps_have_a_hole_where_the_first_is_left_out():
    assert _holes(torch.tensor([[False, True]])) and not _holes(torch.tensor([[True, False]]))
    assert not _holes(torch.tensor([[True, True]])) and not _holes(torch.tensor([[False]]))


def test_the_rank_in_a_group_is_counted_from_the_greatest_and_ties_go_by_order():
    """Groups 7: 1, 3, 3 and 2: 5, 0."""
    x, group = torch.tensor([1.0, 5.0, 3.0, 0.0, 3.0]), torch.tensor([7, 2, 7, 2, 7])
    assert rank_in_group(x, group).tolist() == [2, 0, 0, 1, 1]
    x = torch.tensor([1.0, 2.0]).repeat(1 << 17)  # as few comparisons as a sort: a table of all pairs would be 64 GiB
    assert rank_in_group(x, torch.arange(1 << 18) // 8).tolist() == [4, 0, 5, 1, 6, 2, 7, 3] * (1 << 15)


def test_splitmix_is_the_published_one():
    """The first outputs of the reference implementation for the seed 1234567."""
    state, found = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        found.append(z ^ (z >> 31))
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    x = torch.tensor([1, 2, 3, -5, 2**62])
    for before, after in zip(x.tolist(), scramble(x).tolist(), strict=True):
        z = before * 0x9E3779B97F4A7C15 % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        assert after % 2**64 == z ^ (z >> 31)


def test_terminal_puts_the_score_on_the_last_chosen_step() -> None:
    mask = torch.tensor([[True, True, False, False], [True, False, True, False], [False] * 4])
    expected = [[0, 3.0, 0, 0], [0, 0, 4.0, 0], [0, 0, 0, 0]]
    assert terminal(torch.tensor([3.0, 4.0, 5.0]), mask).tolist() == expected


def test_a_batch_holds_no_less_than_float32():
    rows = batch([1, 0], [[0.0, 1.0]] * 2, torch.bfloat16, value=torch.ones(2, 2, dtype=torch.float16))
    assert rows.reward.dtype == rows.logp_old.dtype == rows.value.dtype == torch.float32
    assert batch([1, 0], [[0.0]] * 2, torch.float64).reward.dtype == torch.float64


@pytest.mark.parametrize("field", ["logp_old", "logp_ref", "logp_sampler", "value"])
@pytest.mark.parametrize("bad", [float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_is_refused_by_name(field, bad):
    given = {name: torch.zeros(3, 4) for name in ("logp_ref", "logp_sampler", "value")}
    rows = {"logp_old": torch.zeros(3, 4), **given}
    rows[field] = rows[field].clone()
    rows[field][1, 2] = bad
    with pytest.raises(ValueError, match=rf"The {field} of rows \[1\] is NaN or infinite"):
        resolve("ppo").prepare(batch([1.0, 0.0, 2.0], **rows), resolve("ppo").initial_state())


@pytest.mark.parametrize("field", ["last_value", "metric"])
def test_a_rows_number_that_is_not_finite_is_refused_by_name_unless_the_row_is_padding(field):
    mask = torch.tensor([[True], [True], [False]])
    given = {field: torch.tensor([1.0, math.nan, 0.0])}
    with pytest.raises(ValueError, match=rf"The {field} of rows \[1\] is NaN or infinite"):
        Batch(mask, torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3), **given).check_finite()
    Batch(mask, torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3), **{field: given[field][[0, 2, 1]]}).check_finite()


def test_a_row_without_steps_is_in_nobodys_group():
    """The least int64 is a number that no group has."""
    batch = rows([[1, 0], [0, 0], [0, 1]], group=[5, 5, 7], reward=[[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
    assert batch.group.tolist() == [5, -(2**63), 7] and not batch.is_full
    assert rows([[1, 1]], group=[5], reward=[[1.0, 0.0]]).group.tolist() == [5]
