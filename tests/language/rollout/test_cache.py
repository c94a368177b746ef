"""The cache of keys and values by hand: room that grows, what one step sees, and slots that move into gaps."""

from __future__ import annotations

import torch

from psigrad.language.rollout.samplers.cache import GROWTH, KVCache

LAYER = ("attention", 0, 0)


def filled(lengths: list[int]) -> KVCache:
    """Each slot's keys are the number of its sequence."""
    cache = KVCache(len(lengths), longest=1000)
    cache.lengths, cache.shifts = torch.tensor(lengths), torch.arange(len(lengths))
    keys, values = cache.reserve(LAYER, torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 5), max(lengths))
    for slot in range(len(lengths)):
        keys[slot], values[slot] = slot, -slot
    cache.store_states(("recurrence", 0, 0), slice(None), torch.arange(len(lengths))[:, None])
    return cache


def test_room_grows_by_a_half_at_least_keeps_what_it_held_and_ends_at_the_longest():
    cache, k, v = filled([4, 4]), torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 5)
    rooms = [cache.reserve(LAYER, k, v, tokens)[1].shape for tokens in (4, 4 + GROWTH, 200, 900)]
    assert rooms == [(2, 2, room, 5) for room in (4 + GROWTH, 4 + GROWTH, 300, 1000)]
    keys, values = cache.layers[LAYER]
    assert keys[1, :, :68].eq(1).all() and values[1, :, :68].eq(-1).all() and not keys[1, :, 68:].any()


def test_the_last_sequences_move_into_the_gaps():
    cache = filled([3, 5, 2, 7])
    assert cache.remove(torch.tensor([True, False, True, False])).tolist() == [3, 1]
    assert cache.lengths.tolist() == [7, 5] and cache.shifts.tolist() == [3, 1] and cache.active == 2
    assert cache.layers[LAYER][0][:2, 0, :7, 0].tolist() == [[3.0] * 7, [1.0] * 7]
    assert cache.states["recurrence", 0, 0][:2].tolist() == [[3], [1]]


def test_a_step_sees_its_own_sequence_within_the_window():
    step = filled([1, 3]).decode()
    assert step.positions.tolist() == [1, 4], "the second one's positions are shifted by 1"
    assert step.mask(None)[:, 0, 0].tolist() == [[True, True, False, False], [True] * 4]
    assert step.mask(2)[:, 0, 0].tolist() == [[True, True, False, False], [False, False, True, True]]
