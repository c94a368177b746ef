"""The assignment of rows to forward passes, and the packed or padded layout of a pass's token ids.

A packed pass computes each prefix once, and has no padding. Models that cannot run packed passes use padded ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psigrad.errors import UserError
from psigrad.language.images import FIRST
from psigrad.language.models.attention import PackedLayout, Pieces, on_device
from psigrad.language.models.fused.caches import CacheHit
from psigrad.seeds import permutation


def order(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order [n] in which epoch `epoch` (from 0) visits the rows: a random permutation of range(n)."""
    return permutation(n, seed, "order", epoch)


def batch_at(step: int, batch_size: int, n: int, seed: int) -> list[int]:
    """Return the indices of the `batch_size` rows of step `step` (from 0), out of `n` rows.

    Each epoch visits every row once, in a new random `order`. A batch may span several epochs.
    """
    if n < 1:
        raise UserError("The dataset has no rows to train on; give at least one row.")
    if batch_size < 1 or step < 0:
        raise UserError(f"The step is {step} and the batch size is {batch_size}; they must be at least 0 and 1, respectively.")
    start, stop = step * batch_size, (step + 1) * batch_size
    epochs = range(start // n, (stop - 1) // n + 1)
    laid_out = np.concatenate([order(n, seed, epoch) for epoch in epochs])
    offset = epochs[0] * n
    return [int(i) for i in laid_out[start - offset : stop - offset]]


def pack_by_tokens(lengths: Sequence[int], budget: int, ranks: int = 1) -> list[list[int]]:
    """Split rows of these token `lengths` into micro-batches of at most `budget` tokens; every index occurs exactly once.

    A row that exceeds the budget is a micro-batch of its own. With several `ranks`, which take the micro-batches in turn, each
    rank gets about the same number of tokens.
    """
    if budget < 1:
        raise UserError(f"A micro-batch of {budget} tokens is not possible; give micro_batch_tokens of at least 1.")
    if ranks > 1 and lengths:
        return _evenly(lengths, budget, ranks)
    bins: list[list[int]] = []
    room: list[int] = []
    # first-fit decreasing (Johnson 1973); the longest row is in the first micro-batch, so a lack of memory shows at once
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
    """Split rows into micro-batches with about the same number of tokens, the largest first; see `pack_by_tokens`."""
    tokens = sum(lengths)
    rounds = max(1, math.ceil(len(pack_by_tokens(lengths, budget)) / ranks))
    room = max(1.0, tokens / (rounds * ranks))  # an equal share of all tokens
    while len(parts := pack_by_tokens(lengths, min(budget, math.ceil(room)))) > rounds * ranks and room < budget:
        room *= 1.03
    return sorted(parts, key=lambda part: -sum(lengths[i] for i in part))


def pack_groups(
    prompts: Sequence[int], completions: Sequence[Sequence[int]], budget: int, ranks: int = 1
) -> list[list[tuple[int, list[int]]]]:
    """Return micro-batches of at most `budget` tokens. Each is a list of (g, ks), with ks the indices of completions of group g.

    `prompts[g]` and `completions[g][k]` are token counts. Every (g, k) occurs exactly once. One prompt with one completion may
    exceed `budget`.
    """
    most = budget
    if ranks > 1:  # one long group must not be the work of a single rank
        tokens = sum(prompts) + sum(map(sum, completions))
        most = min(budget, max(1, math.ceil(tokens / ranks)))
    parts: list[tuple[int, list[int]]] = []
    for g, (prompt, lengths) in enumerate(zip(prompts, completions, strict=True)):
        whole = prompt + sum(lengths) <= most
        split = [list(range(len(lengths)))] if whole else pack_by_tokens(lengths, max(most - prompt, 1))
        parts += [(g, ks) for ks in split]
    costs = [prompts[g] + sum(completions[g][k] for k in ks) for g, ks in parts]
    return [[parts[i] for i in members] for members in pack_by_tokens(costs, budget, ranks)]


Ids = Sequence[int]


@dataclass(frozen=True)
class Groups:
    """Completions that share prompts: `completions[b][k]` continues `prompts[b]`.

    With `starts`, a completion continues only the first `starts[b][k]` tokens of its prompt. Its targets are its tokens where
    `masks[b][k]` is True; without `masks`, all. Log-probs are [N, T]: N completions in order, T tokens in the longest.
    """

    prompts: Sequence[Ids]
    completions: Sequence[Sequence[Ids]]
    masks: Sequence[Sequence[Sequence[bool]]] | None = None
    starts: Sequence[Sequence[int]] | None = None
    experts: Sequence[tuple[str, Sequence[str]]] | None = None
    """The experts that routers chose in sampling for the tokens of each prompt and each completion (`experts.RouterRecorder`)."""

    def begin(self) -> list[int]:
        """Return the number of prompt tokens before each of the N completions."""
        if self.starts is not None:
            return [start for group in self.starts for start in group]
        return [len(prompt) for prompt, group in zip(self.prompts, self.completions, strict=True) for _ in group]

    def wanted(self, count: int) -> np.ndarray:
        """Return a mask [count] over the `count` concatenated tokens of all completions: True for targets."""
        if self.masks is None:
            return np.ones(count, dtype=bool)
        return np.fromiter((own for group in self.masks for mask in group for own in mask), dtype=bool, count=count)


@dataclass(frozen=True)
class Rows:
    """Independent rows of tokens. The tokens where `masks` is True are targets. A row's first token must not be one.

    The log-probs are [N, T], T the length of the longest row. The log-prob of token t of row n is at [n, t].
    """

    rows: Sequence[Ids]
    masks: Sequence[Sequence[bool]]

    def __post_init__(self) -> None:
        for n, (row, mask) in enumerate(zip(self.rows, self.masks, strict=True)):
            if len(row) != len(mask):
                raise ValueError(f"Row {n} has {len(row)} tokens and a mask of {len(mask)}; they must be equally long.")
            if mask and mask[0]:
                raise ValueError(
                    f"Row {n} trains on its first token, which nothing precedes; start rows with a prompt or a BOS token."
                )


@dataclass(frozen=True)
class Targets:
    """The M tokens of a forward pass whose log-probs are computed.

    The hidden state at the flat position `rows[m]` predicts the token `ids[m]`, whose log-prob is at [n[m], t[m]] of the result.
    `shape` is the shape (N, T) of the result.
    """

    rows: Tensor
    ids: Tensor
    n: Tensor
    t: Tensor
    shape: tuple[int, int]

    def some(self, indices: Tensor) -> Targets:
        """Return the K targets that `indices` [K] selects."""
        rows, ids, n, t = (x.index_select(0, indices) for x in (self.rows, self.ids, self.n, self.t))
        return Targets(rows, ids, n, t, self.shape)

    def unpack(self, values: Tensor) -> Tensor:
        """Scatter the targets' values [M] to their positions in [N, T], with zeros elsewhere."""
        return values.new_zeros(self.shape).index_put((self.n, self.t), values)


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of a forward pass, [B, S]: one packed row (B = 1) with a `layout`, or padded rows with an `attention_mask`.

    `prefix_ends` are the flat positions of the last token of each prefix.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Targets
    layout: Any = None
    attention_mask: Tensor | None = None
    prefix_ends: Tensor | None = None
    cached: CacheHit | None = None
    """The activations of these tokens from sampling, if they were cached. The forward pass then skips the layers."""
    experts: Tensor | None = None
    """[layers, S, k] the experts that routers must choose; None if routers choose freely."""
    token_hashes: Tensor | None = None
    """[B, S] `lora.hash_tokens` of these tokens, if several processes divide the row and dropout needs them."""
    has_images: bool = False
    """True if an input token belongs to an image."""
    local_targets: Tensor | None = None
    """The indices of this process's targets among those of the row, if several processes divide it (`local_share`)."""


@dataclass(frozen=True)
class RowSelection:
    """The rows that a layer reads and computes for S tokens. None means one row for each token.

    Token s reads the input's row `input_rows[s]`. The output has rows only for the tokens `output_rows` [W].
    """

    input_rows: Tensor | None = None
    output_rows: Tensor | None = None

    def gather_inputs(self, x: Tensor) -> Tensor:
        """Return the input row of every token: x [rows, …] -> [S, …]."""
        return x if self.input_rows is None else x.index_select(0, self.input_rows)

    def sum_input_grads(self, dx: Tensor, count: int) -> Tensor:
        """Return the gradient of the `count` input rows: for each row, the sum of dx [S, …] over the tokens that read it."""
        return dx if self.input_rows is None else dx.new_zeros(count, dx.shape[1]).index_add_(0, self.input_rows, dx)

    def gather_outputs(self, x: Tensor) -> Tensor:
        """Return the rows of the tokens whose output is needed: x [S, …] -> [W, …]."""
        return x if self.output_rows is None else x.index_select(0, self.output_rows)

    def scatter_output_grads(self, dx: Tensor, tokens: int) -> Tensor:
        """Return the gradient [tokens, …]: `dx` [W, …] at `output_rows`, 0 elsewhere. If `output_rows` is None, return `dx`."""
        return dx if self.output_rows is None else dx.new_zeros(tokens, dx.shape[1]).index_copy_(0, self.output_rows, dx)


@dataclass
class _TargetLists:
    rows: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    n: list[int] = field(default_factory=list)
    t: list[int] = field(default_factory=list)

    def add(self, rows: Ids, ids: Ids, n: int, ts: Ids) -> None:
        self.rows += rows
        self.ids += ids
        self.n += [n] * len(ids)
        self.t += ts

    def tensors(self, shape: tuple[int, int], device: torch.device | str) -> Targets:
        known = [0 if token >= FIRST else token for token in self.ids]
        rows, ids, n, t = (on_device(x, device) for x in (self.rows, known, self.n, self.t))
        return Targets(rows, ids, n, t, shape)


def _shape(lengths: Sequence[int]) -> tuple[int, int]:
    return len(lengths), max(lengths, default=0)


def _places(lengths: np.ndarray) -> np.ndarray:
    """Return the position of each token in its own text: 0 … length - 1 for each length in `lengths`, concatenated."""
    places: np.ndarray = np.arange(lengths.sum()) - (lengths.cumsum() - lengths).repeat(lengths)
    return places


def _flat(pieces: Iterable[Ids], count: int) -> np.ndarray:
    """Return all ids of `pieces` in one array. `count` is their total number."""
    return np.fromiter(chain.from_iterable(pieces), dtype=np.int64, count=count)


def _lengths(pieces: Iterable[Sized]) -> np.ndarray:
    return np.array([len(piece) for piece in pieces], dtype=np.int64)


def pack(inputs: Groups | Rows, device: torch.device | str = "cpu") -> ForwardInputs:
    """Return one packed row without padding, in which each prompt appears once."""
    return _pack_groups(inputs, device) if isinstance(inputs, Groups) else _pack_rows(inputs, device)


def _pack_groups(groups: Groups, device: torch.device | str) -> ForwardInputs:
    completions = [ids for group in groups.completions for ids in group]
    before, lengths = _lengths(groups.prompts), _lengths(completions)
    prefix = np.arange(len(before)).repeat(_lengths(groups.completions))
    # a completion's last token predicts nothing
    own, ends, total = np.maximum(lengths - 1, 0), before.cumsum() - 1, int(before.sum())
    begin = np.array(groups.begin(), dtype=np.int64)
    # For every token of the completions: its completion, its position in it, its id, and True if the row contains it.
    n, t, ids = np.arange(len(lengths)).repeat(lengths), _places(lengths), _flat(completions, int(lengths.sum()))
    kept = t < own[n]
    tokens = np.concatenate([_flat(groups.prompts, total), ids[kept]])
    positions = np.concatenate([_places(before), (begin[n] + t)[kept]])
    first = total + own.cumsum() - own
    rows = np.where(t == 0, (ends - before)[prefix[n]] + begin[n], first[n] + t - 1)
    layout = PackedLayout(Pieces(before, own, prefix, begin), torch.device(device))
    wanted = groups.wanted(len(ids))
    targets = _targets((rows[wanted], ids[wanted], n[wanted], t[wanted]), lengths, device)
    return ForwardInputs(
        on_device(tokens[None], device),
        on_device(positions[None], device),
        targets,
        layout=layout,
        prefix_ends=on_device(ends, device),
        has_images=bool(tokens.max(initial=0) >= FIRST),
    )


def _targets(found: tuple[np.ndarray, ...], lengths: np.ndarray, device: torch.device | str) -> Targets:
    # Image tokens come from environments, so their log-probs are unused. Their ids are not in the vocabulary; 0 replaces them.
    rows, ids, n, t = (on_device(x, device) for x in (found[0], np.where(found[1] >= FIRST, 0, found[1]), *found[2:]))
    return Targets(rows, ids, n, t, (len(lengths), int(lengths.max(initial=0))))


def _pack_rows(rows: Rows, device: torch.device | str) -> ForwardInputs:
    lengths = _lengths(rows.rows)
    own = np.maximum(lengths - 1, 0)
    n, t, ids = np.arange(len(lengths)).repeat(lengths), _places(lengths), _flat(rows.rows, int(lengths.sum()))
    wanted, kept = np.fromiter(chain.from_iterable(rows.masks), dtype=bool, count=len(ids)), t < own[n]
    first = own.cumsum() - own
    found = ((first[n] + t - 1)[wanted], ids[wanted], n[wanted], t[wanted])
    layout = PackedLayout(Pieces(own[:0], own, 0 * own, 0 * own), torch.device(device))
    return ForwardInputs(
        on_device(ids[kept][None], device),
        on_device(t[kept][None], device),
        _targets(found, lengths, device),
        layout=layout,
        has_images=bool(ids.max(initial=0) >= FIRST),
    )


def lay_out(inputs: Groups | Rows, device: torch.device, packed: bool) -> ForwardInputs:
    """Return the inputs of a forward pass: one row (`pack`) if `packed` is True, otherwise padded rows (`pad`)."""
    return pack(inputs, device) if packed else pad(inputs, device)


def pad(inputs: Groups | Rows, device: torch.device | str = "cpu") -> ForwardInputs:
    """Return one right-padded batch, for transformers' own forward pass. For `Groups`, a row is a prompt with one completion."""
    sequences, targets = [], _TargetLists()
    if isinstance(inputs, Groups):
        flat = [(p, c) for p, group in zip(inputs.prompts, inputs.completions, strict=True) for c in group]
        pairs = [(p[:start], c) for (p, c), start in zip(flat, inputs.begin(), strict=True)]
        sequences = [[*p, *c] for p, c in pairs]
        shape = _shape([len(c) for _, c in pairs])
        kept = np.split(inputs.wanted(sum(len(c) for _, c in pairs)), np.cumsum([len(c) for _, c in pairs])[:-1])
        found = [np.flatnonzero(own).tolist() for own in kept]
        starts: list[tuple[int, Ids, Sequence[int]]] = [
            (len(p), [c[t] for t in ts], ts) for (p, c), ts in zip(pairs, found, strict=True)
        ]
    else:
        sequences = [list(ids) for ids in inputs.rows]
        shape = _shape([len(ids) for ids in sequences])
        wanted = [[t for t in range(1, len(ids)) if mask[t]] for ids, mask in zip(inputs.rows, inputs.masks, strict=True)]
        starts = [(0, [ids[t] for t in ts], ts) for ids, ts in zip(sequences, wanted, strict=True)]
    width = max(len(s) for s in sequences)
    for n, (offset, ids, ts) in enumerate(starts):
        targets.add([n * width + offset + t - 1 for t in ts], ids, n, ts)
    lengths = on_device([len(s) for s in sequences], device)
    return ForwardInputs(
        on_device([s + [0] * (width - len(s)) for s in sequences], device),
        torch.arange(width, device=device).expand(len(sequences), width),
        targets.tensors(shape, device),
        attention_mask=(torch.arange(width, device=device) < lengths[:, None]).long(),
        has_images=any(token >= FIRST for ids in sequences for token in ids),
    )
