"""Which rows a step trains on and how they share forward passes: pure functions of counters and lengths, no cursor to save."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from psigrad.errors import UserError
from psigrad.seeds import permutation


def order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order [n] in which epoch `epoch` (from 0) visits the rows: a permutation of range(n)."""
    return permutation(n, seed, "order", epoch)


def batch_at(step: int, batch_size: int, n: int, seed: int) -> list[int]:
    """Indices of the `batch_size` rows of step `step` (from 0), out of `n` rows.

    The epochs' orders are laid end to end and cut into batches: no row is dropped at the end of an epoch, and a batch may span
    two epochs (or several, when it is larger than the dataset). Only the arguments decide, so a resumed run needs no cursor.
    """
    if n < 1:
        raise UserError("There are 0 rows to take batches from; give a dataset with at least one row.")
    if batch_size < 1 or step < 0:
        raise UserError(f"Step {step} with batch size {batch_size} is not possible; give a step from 0 and a batch size from 1.")
    start, stop = step * batch_size, (step + 1) * batch_size
    epochs = range(start // n, (stop - 1) // n + 1)
    laid_out = np.concatenate([order(n, seed, epoch) for epoch in epochs])
    offset = epochs[0] * n
    return [int(i) for i in laid_out[start - offset : stop - offset]]


def pack_by_tokens(lengths: Sequence[int], budget: int, ranks: int = 1) -> list[list[int]]:
    """Split rows of these token `lengths` into micro-batches of at most `budget` tokens; every index occurs exactly once.

    For several `ranks`, which take turns in taking one, there are about as many tokens in each.

    First-fit decreasing (Johnson 1973): at most 11/9 of the fewest possible micro-batches, plus one. A row above the budget
    gets a micro-batch of its own. The longest row comes in the first micro-batch, so memory runs out at once or not at all.
    """
    if budget < 1:
        raise UserError(f"A micro-batch of {budget} tokens is not possible; give micro_batch_tokens of at least 1.")
    if ranks > 1 and lengths:
        return _evenly(lengths, budget, ranks)
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = next((b for b, left in enumerate(room) if lengths[index] <= left), None)
        if fit is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[fit].append(index)
            room[fit] -= lengths[index]
    return [sorted(members) for members in bins]


def _evenly(lengths: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """As many micro-batches for each of the ranks, by the smallest budget that gives no more; the fullest come first."""
    tokens = sum(lengths)
    rounds = max(1, math.ceil(len(pack_by_tokens(lengths, budget)) / ranks))
    room = max(1.0, tokens / (rounds * ranks))
    while len(parts := pack_by_tokens(lengths, min(budget, math.ceil(room)))) > rounds * ranks and room < budget:
        room *= 1.03
    return sorted(parts, key=lambda part: -sum(lengths[i] for i in part))


def pack_groups(
    prompts: Sequence[int], completions: Sequence[Sequence[int]], budget: int, ranks: int = 1
) -> list[list[tuple[int, list[int]]]]:
    """Micro-batches of `(group, its completions)` when each group's prompt is computed once for all of its completions.

    `prompts[g]` and `completions[g][k]` are token counts; a group costs its prompt plus its completions. A group is split only
    if it alone is above the budget, or above what each of several `ranks` gets; each part then pays for the prompt again. Every
    (g, k) occurs exactly once.
    """
    most = budget
    if ranks > 1:  # one long group must not be the work of one rank
        tokens = sum(prompts) + sum(map(sum, completions))
        most = min(budget, max(1, math.ceil(tokens / ranks)))
    parts: list[tuple[int, list[int]]] = []
    for g, (prompt, lengths) in enumerate(zip(prompts, completions, strict=True)):
        whole = prompt + sum(lengths) <= most
        split = [list(range(len(lengths)))] if whole else pack_by_tokens(lengths, max(most - prompt, 1))
        parts += [(g, ks) for ks in split]
    costs = [prompts[g] + sum(completions[g][k] for k in ks) for g, ks in parts]
    return [[parts[i] for i in members] for members in pack_by_tokens(costs, budget, ranks)]
