"""The C++ kernels as functions of tensors. Tensors are float32 or bfloat16 with contiguous rows; sums are in float32."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psigrad.compiled import AdamWWeight
from psigrad.kernels.build import bind, library
from psigrad.kernels.products import LogProbs, Products, TowerKernels, by_pytorch
from psigrad.kernels.state_kernels import StateKernels

Norms = Sequence[Tensor]
_HALF = {torch.float32: 0, torch.bfloat16: 1}
_SIGNATURES = {
    "rms_norm": "tpppiifft",
    "rms_norm_gradient": "tpppppiifft",
    "rotary": "t" + "p" * 7 + "i" * 7 + "fft",
    "rotary_gradient": "t" + "p" * 8 + "i" * 7 + "fft",
    "gated": "ttppiit",
    "gated_gradient": "ttppppiit",
    "add_rows": "tpppiift",
    "attention": "tpppppiiipppiiiiift",
    "attention_gradient": "tpippppppiiipppiiiiift",
    "decode": "tpppppiiippppippppiiiiift",
    "decode_layers": "tppippppp" + "ii" + "p" * 5 + "iipt",
    "delta_step": "p" * 8 + "i" * 6 + "t",
    "mamba2_step": "p" * 8 + "i" * 5 + "t",
    "scan_chunks": "t" + "p" * 5 + "iii" + "p" * 4 + "i" * 6 + "t",
    "scan_chunks_gradient": "t" + "p" * 8 + "ii" + "ppp" + "iii" + "p" * 4 + "i" * 6 + "t",
    "convolve": "tppipppiiiit",
    "convolve_gradient": "tppppipipppiiiit",
    "prompt_tables": "tppppiippiiit",
    "few_rows": "ppppiiiiiit",
    "pack_matrix": "ppiit",
    "multiply_packed": "ppppiiiiiit",
    "multiply_packed_bf16": "ppppiiiiiit",
    "unpack_codes": "tppit",
    "multiply_codes": "ppppiiiiit",
    "multiply_codes_bf16": "ppppiiiiit",
    "product": "ppppiiiiiiiiitt",
    "product_bf16": "ppppiiiiiiiiitt",
    "instructions": "tp",
    "draw": "tppppiift",
    "sums_of_stretches": "tppiiiift",
    "log_probs": "ppiift",
    "gather": "piit",
    "copies": "pppit",
    "squared_norm": "pppit",
    "round_bf16": "ppiit",
    "adamw_bf16": "ppi" + "f" * 5 + "t",
    "adamw_frugal": "ppip" + "f" * 5 + "t",
    "relu_towers": "ppppiiit",
    "relu_towers_gradient": "ppppppiiiit",
    "adam": "ppppi" + "f" * 8,
}


@dataclass(frozen=True)
class Heads:
    """The sizes of attention: the numbers of query heads and of key heads, and the width `dim` of a head.

    `eps` is the epsilon of the norms of queries and keys, and `scale` the factor of the scores. A norm covers one head; with
    `wide`, all query heads or all key heads. `offset` is added to the norms' weights. The first `turned` numbers of a head
    are rotated (0: all).
    """

    queries: int
    keys: int
    dim: int
    eps: float
    scale: float
    wide: bool = False
    offset: float = 0.0
    turned: int = 0

    @property
    def row(self) -> int:
        """The width of a row [q | k | v], in elements."""
        return (self.queries + 2 * self.keys) * self.dim


class Angles(NamedTuple):
    """The rotary embedding of S rows: `cosine` and `sine`, float32 [S, D] or [S, `Heads.turned`].

    `factors` [S], float32, multiply each row's queries; None: 1.
    """

    cosine: Tensor
    sine: Tensor
    factors: Tensor | None = None


class Spans:
    """The positions of the sequences in a packed row, in the kernels' form.

    `prefixes` are (start, length). `members` has for each prefix the sequences (start, length, base) that continue its first
    `base` tokens. A prefix attends to itself causally. A member attends to the tokens that it continues, and causally to itself.
    """

    def __init__(self, prefixes: Sequence[tuple[int, int]], members: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        flat = [m for group in members for m in sorted(group, key=lambda member: -member[2])]
        counts = torch.tensor([0, *(len(group) for group in members)])
        self.prefixes = torch.tensor(prefixes, dtype=torch.int64).reshape(-1, 2)
        self.members = torch.tensor(flat, dtype=torch.int64).reshape(-1, 3)
        self.first = counts.cumsum(0)
        self.arguments = (self.prefixes.data_ptr(), self.members.data_ptr(), self.first.data_ptr(), len(prefixes))


@dataclass(frozen=True)
class Slots:
    """The key-value cache in a decoding step of B rows, with one new token each. All integers are int64.

    A slot of the cache stores the keys and values of one completion. The rows are in G groups, whose completions share a prompt.
    """

    own: Sequence[Tensor]
    """[2, slots, H_kv, capacity, D] for each layer: the keys and values of each slot's completion. The capacity is a multiple of
    16, and keys are stored in blocks [D, 16].
    """
    addresses: Tensor
    """[layers] the addresses of the tensors in `own`."""
    slots: Tensor
    """[B] the slot of each row."""
    places: Tensor
    """[B] the position of each row's token in its slot."""
    prompts: Tensor
    """[layers, 2, G] the addresses of the prompts' keys and values, which `Kernels.prompt_tables` has written."""
    prompt_lengths: Tensor
    """[G] the lengths of the prompts in tokens."""
    first: Tensor
    """[G + 1] the first row of each group, and then B. The rows of a group are adjacent."""


@functools.cache
def kernels() -> Kernels | str:
    """Return the kernels, compiled if necessary, or a string with the reason why there are none."""
    loaded = library()
    return loaded if isinstance(loaded, str) else Kernels(loaded)


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """Compute out ← a · b + base and return out, by `Products.of`, or by PyTorch on a GPU or without kernels."""
    native = kernels() if a.device.type == "cpu" else "a GPU has its own"
    return by_pytorch(a, b, out, base) if isinstance(native, str) else native.products.of(a, b, out, base)


class Kernels:
    """The functions of the compiled library. Its attributes, such as `products` and `gradients`, group further functions."""

    dtypes = tuple(_HALF)
    """The dtypes that the kernels accept; the functions of `products` that may use PyTorch accept any dtype."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._call = bind(loaded, _SIGNATURES)
        self.products, self.gradients = Products(self._call), Gradients(self._call)
        self.log_probs = LogProbs(self._call)
        self.half_precision, self.towers = HalfPrecision(self._call), TowerKernels(self._call)
        self.states = StateKernels(self._call)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return the RMS norm x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension of x [S, E]."""
        out, pointers = torch.empty_like(x), (x.data_ptr(), weight.data_ptr())
        self._call.rms_norm(_HALF[x.dtype], out.data_ptr(), *pointers, *x.shape, eps, offset, torch.get_num_threads())
        return out

    def rotary(self, qkv: Tensor, norms: Norms | None, angles: Angles, heads: Heads) -> Tensor:
        """Return the queries and keys [S, (H + H_kv)·D] in `qkv` [S, row], normalised and then rotated (RoPE).

        `norms` are the weights of the norms of queries and keys, or None.
        """
        out = qkv.new_empty(len(qkv), (heads.queries + heads.keys) * heads.dim)
        self._call.rotary(_HALF[qkv.dtype], out.data_ptr(), *_rotary(qkv, norms, angles, heads))
        return out

    def gated(self, both: Tensor, gelu: bool = False) -> Tensor:
        """Return silu(gate) · up for `both` [S, gate | up]. With `gelu` it is GELU, in the form with tanh, in place of SiLU."""
        rows, width = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, width)
        self._call.gated(_HALF[both.dtype], int(gelu), out.data_ptr(), both.data_ptr(), rows, width, torch.get_num_threads())
        return out

    def attention(self, rotated: Tensor, qkv: Tensor, spans: Spans, heads: Heads, window: int) -> tuple[Tensor, Tensor]:
        """Compute attention of the queries and keys `rotated` and the values in `qkv`, between the tokens that `spans` allows.

        Return its output [S, H·D] and the log-sum-exp of each query's scores [S, H]. `window` 0 means no sliding window.
        """
        out = qkv.new_empty(len(qkv), heads.queries * heads.dim)
        normaliser = torch.empty(len(qkv), heads.queries)
        given = (*_tables(rotated, qkv, heads), *spans.arguments, *_shape(heads, window))
        self._call.attention(_HALF[qkv.dtype], out.data_ptr(), normaliser.data_ptr(), *given)
        return out, normaliser

    def decode(self, rotated: Tensor, qkv: Tensor, slots: Slots, layer: int, heads: Heads, window: int) -> tuple[Tensor, Tensor]:
        """Compute attention of one new token per row in a layer, and append its key and value to the row's slot.

        The token attends to its prompt and to its slot. Return the output [B, H·D] and the log-sum-exp of its scores [B, H].
        """
        normaliser = torch.empty(len(qkv), heads.queries)
        out = qkv.new_empty(len(qkv), heads.queries * heads.dim)
        (keys, values), (prompt_keys, prompt_values) = slots.own[layer], slots.prompts[layer]
        own = (keys.data_ptr(), values.data_ptr(), slots.slots.data_ptr(), slots.places.data_ptr(), keys.shape[2])
        groups = (prompt_keys, prompt_values, slots.prompt_lengths, slots.first)
        given = (*own, *(x.data_ptr() for x in groups), len(slots.prompt_lengths), *_shape(heads, window))
        self._call.decode(_HALF[qkv.dtype], out.data_ptr(), normaliser.data_ptr(), *_tables(rotated, qkv, heads), *given)
        return out, normaliser

    def prompt_tables(self, rotated: Tensor, qkv: Tensor, starts: Tensor, lengths: Tensor, heads: Heads, to: Tensor) -> None:
        """Write the keys and values of prompts in float32, in the order in which `decode` reads them.

        Prompt g has `lengths[g]` rows of `qkv` from `starts[g]`; both are [G]. `to` [2, G] has the addresses to which keys and
        values are written; `table_sizes` gives the sizes. Keys are written by head in blocks of 16 neighbours,
        [H_kv, ⌈L / 16⌉, D, 16]. Values are written by head, [H_kv, L, D], with D padded to a multiple of 16.
        """
        _, *tables = _tables(rotated, qkv, heads)
        pointers = (to[0].data_ptr(), to[1].data_ptr(), *tables[:2], *tables[3:], starts.data_ptr(), lengths.data_ptr())
        self._call.prompt_tables(_HALF[qkv.dtype], *pointers, len(lengths), heads.keys, heads.dim, torch.get_num_threads())

    def decode_layers(
        self,
        x: Tensor,
        weights: Tensor,
        made: Tensor,
        slots: Slots,
        angles: Sequence[Angles],
        heads: Heads,
        *,
        inner: int,
        rank: int,
        eps: float,
        gelu: bool,
        residual: float,
    ) -> None:
        """Compute a decoding step of all decoder layers for x [B, E] in one call, with the numbers of the separate kernels.

        A row of `weights` [layers, …], int64, has the addresses of a layer's weights (0 if absent). In order: the norms before
        attention and before the feed-forward layer, those after them, and those of queries and of keys; the packed matrices
        [q | k | v], output, [gate | up] and down; the bias of [q | k | v]; the tables of quantised matrices; the packed A of each
        matrix's LoRA, then each s·B, then the ranks, which are at most `rank`; the window. `made` [layers, …] has the addresses
        of each layer's results: y [B, E], qkv [B, row], attention's output [B, H·D] and log-sum-exps [B, H], the residual stream
        after attention [B, E], [gate | up] [B, 2·`inner`], and if norms follow them the outputs of attention and of the
        feed-forward layer [B, E]. `angles` are those of each layer, all with the same factors. `residual` multiplies what a layer
        adds to the residual stream.
        """
        rows, width = x.shape
        room = x.new_empty(rows * (width + (heads.queries + heads.keys) * heads.dim + inner + rank))
        sizes = (width, inner, rank, heads.queries, heads.keys, heads.dim, heads.turned or heads.dim, heads.wide, gelu)
        shape = _Shape(*sizes, made.shape[1], eps, heads.eps, heads.scale, heads.offset, residual)
        turns = torch.tensor([[one.cosine.data_ptr(), one.sine.data_ptr()] for one in angles])
        given = (weights.data_ptr(), made.data_ptr(), len(weights), x.data_ptr(), room.data_ptr(), turns.data_ptr())
        own = (slots.addresses.data_ptr(), slots.own[0].shape[1], slots.own[0].shape[3])
        tables = (slots.slots, slots.places, slots.prompts, slots.prompt_lengths, slots.first)
        last = (len(slots.prompt_lengths), rows, ctypes.addressof(shape), torch.get_num_threads())
        factors = None if angles[0].factors is None else angles[0].factors.data_ptr()
        self._call.decode_layers(_HALF[x.dtype], *given, factors, *own, *(y.data_ptr() for y in tables), *last)

    def copy(self, to: Sequence[int], given: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy `sizes[i]` bytes from the address `given[i]` to the address `to[i]`, for each i."""
        count = len(to)
        tables = [(ctypes.c_int64 * count)(*numbers) for numbers in (to, given, sizes)]
        self._call.copies(*tables, count, torch.get_num_threads())

    def gather(self, out: Sequence[Tensor], tables: Tensor, rows: Sequence[Tensor], slab: int) -> None:
        """Gather the rows `rows[i]` [n] of table i into `out[i]` [n, …], for each i.

        A table is stored in slabs of `slab` rows, whose addresses are `tables[i]` [slabs]. Integers are int64.
        """
        wanted = []
        for to, table, places in zip(out, tables, rows, strict=True):
            size = to.element_size() * math.prod(to.shape[1:])
            wanted += [to.data_ptr(), table.data_ptr(), places.data_ptr(), len(to), size]
        self._call.gather((ctypes.c_int64 * len(wanted))(*wanted), len(out), slab, torch.get_num_threads())

    def draw(self, logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Sample a token from each row of logits [B, V]: return the tokens' ids [B] and their log-probs [B].

        The token is the first one whose cumulative probability, under softmax(logits / temperature), exceeds u [B], float64.
        """
        ids, logp = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        pointers = (ids.data_ptr(), logp.data_ptr(), logits.data_ptr(), u.data_ptr())
        self._call.draw(_HALF[logits.dtype], *pointers, *logits.shape, 1 / temperature, torch.get_num_threads())
        return ids, logp


class Gradients:
    """The gradients of the functions of `Kernels` with the same names."""

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def rms_norm(self, dx: Tensor, x: Tensor, weight: Tensor, dy: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Add the gradient of x to `dx` in place, and return the gradient of the weight [E], float32."""
        dw = torch.zeros(weight.shape)
        pointers = (dx.data_ptr(), dw.data_ptr(), x.data_ptr(), weight.data_ptr(), dy.data_ptr())
        self._call.rms_norm_gradient(_HALF[x.dtype], *pointers, *x.shape, eps, offset, torch.get_num_threads())
        return dw

    def rotary(self, gradient: Tensor, qkv: Tensor, norms: Norms | None, angles: Angles, heads: Heads) -> tuple[Tensor, ...]:
        """Turn the gradient of [q' | k' | v] [S, row], q' and k' after `Kernels.rotary`, into that of [q | k | v], in place.

        Return the gradients of the weights of the norms of queries and of keys.
        """
        widths = [heads.dim * (count if heads.wide else 1) for count in (heads.queries, heads.keys)]
        dw, half = torch.zeros(sum(widths)), _HALF[qkv.dtype]
        self._call.rotary_gradient(half, gradient.data_ptr(), dw.data_ptr(), *_rotary(qkv, norms, angles, heads))
        return tuple(dw.split(widths))

    def gated(self, both: Tensor, dy: Tensor, gelu: bool = False, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
        """Return the gradient of `both` [S, gate | up], and `Kernels.gated(both, gelu)` again.

        With `in_place` the results overwrite `both` and `dy`.
        """
        gradient, out = (both, dy) if in_place else (torch.empty_like(both), torch.empty_like(dy))
        pointers = (gradient.data_ptr(), out.data_ptr(), both.data_ptr(), dy.data_ptr())
        self._call.gated_gradient(_HALF[both.dtype], int(gelu), *pointers, *dy.shape, torch.get_num_threads())
        return gradient, out

    def attention(
        self, dout: Tensor, out: Tensor, normaliser: Tensor, rotated: Tensor, qkv: Tensor, spans: Spans, heads: Heads, window: int
    ) -> Tensor:
        """Return the gradient of [q' | k' | v] [S, row] from that of the output, `dout`; q' and k' are in `rotated`."""
        gradient = torch.empty_like(qkv)
        given = (*_tables(rotated, qkv, heads), *spans.arguments, *_shape(heads, window))
        pointers = (gradient.data_ptr(), heads.row, dout.data_ptr(), out.data_ptr(), normaliser.data_ptr())
        self._call.attention_gradient(_HALF[qkv.dtype], *pointers, *given)
        return gradient


def table_sizes(length: int, heads: Heads) -> tuple[int, int]:
    """Return the numbers of elements of the keys and of the values that `Kernels.prompt_tables` writes for a prompt."""
    return heads.keys * -(-length // 16) * 16 * heads.dim, heads.keys * length * -(-heads.dim // 16) * 16


def _tables(rotated: Tensor, qkv: Tensor, heads: Heads) -> tuple[int, ...]:
    """Return pointers to the queries, keys and values, followed by their row strides in elements."""
    size, width = qkv.element_size(), (heads.queries + heads.keys) * heads.dim
    start = rotated.data_ptr()
    pointers = (start, start + heads.queries * heads.dim * size, qkv.data_ptr() + width * size)
    return (*pointers, width, width, heads.row)


def _shape(heads: Heads, window: int) -> tuple[int | float, ...]:
    return (heads.queries, heads.keys, heads.dim, window, heads.scale, torch.get_num_threads())


def _rotary(qkv: Tensor, norms: Norms | None, angles: Angles, heads: Heads) -> tuple[int | float | None, ...]:
    tensors = (qkv, *(norms or (None, None)), *angles)
    tables = (None if x is None else x.data_ptr() for x in tensors)
    sizes = (len(qkv), heads.queries, heads.keys, heads.dim, heads.row, heads.turned or heads.dim, int(heads.wide))
    return (*tables, *sizes, heads.eps, heads.offset, torch.get_num_threads())


_SIZES = ("width", "inner", "rank", "heads", "kv_heads", "dim", "turned", "wide", "gelu", "results")


class _Shape(ctypes.Structure):
    """The sizes and factors of decoder layers, as in decoding.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("eps", "head_eps", "scale", "offset", "residual")),
    )


class HalfPrecision:
    """The kernels of AdamW in mixed precision.

    They read gradients in bfloat16 without a float32 copy, and write weight and master together. A step passes over memory twice,
    PyTorch's five times.
    """

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        """Return Σ g² over all tensors, summed in an order that does not depend on the number of threads."""
        gradients = [g.contiguous() for g in gradients]
        out, counts = ctypes.c_double(), [g.numel() for g in gradients]
        pointers = (ctypes.c_void_p * len(counts))(*(g.data_ptr() for g in gradients))
        sizes = (ctypes.c_int64 * len(counts))(*counts)
        self._call.squared_norm(ctypes.byref(out), pointers, sizes, len(counts), torch.get_num_threads())
        return out.value

    def dither(self, stored: Tensor, master: Tensor, first: int) -> None:
        """Write the float32 numbers `master` to `stored`, rounded by `low_memory.dither`. Both tensors must be contiguous."""
        self._call.round_bf16(stored.data_ptr(), master.data_ptr(), master.numel(), first, torch.get_num_threads())

    def adamw(self, weights: Sequence[AdamWWeight], lr: float, betas: tuple[float, float], eps: float, scale: float) -> None:
        """Take a step of AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), with each gradient multiplied by `scale`.

        Formula: m ← β₁·m + (1 - β₁)·g, v ← β₂·v + (1 - β₂)·g², θ ← (1 - η·λ)·θ - η·m̂ / (√v̂ + ε). Each weight must have a
        master, and all tensors must be contiguous.
        """
        table = []
        for w in weights:
            assert w.master is not None and w.stored is not None
            table += [x.data_ptr() for x in (w.master, w.stored, w.gradient, w.exp_avg, w.exp_avg_sq)] + [
                w.master.numel(),
                w.first,
            ]
        rates = (1 - betas[0], betas[1], 1 - betas[1], eps, scale)
        tables = ((ctypes.c_int64 * len(table))(*table), _factors(weights, lr, betas))
        self._call.adamw_bf16(*tables, len(weights), *rates, torch.get_num_threads())

    def adamw_low_memory(
        self,
        weights: Sequence[AdamWWeight],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        scale: float,
        codes: Sequence[Tensor],
    ) -> None:
        """Take a step of AdamW, like `adamw`, for weights without a master or with moments in 8-bit codes.

        For each moment, `codes` has the levels of its codes, the middles between them, and a table that speeds up the search for
        the nearest level (see adamw.cpp).
        """
        table = []
        for w in weights:
            tensors = (w.master, w.stored, w.gradient, w.exp_avg, w.exp_avg_sq, *(w.scales or (None, None)))
            table += [0 if x is None else x.data_ptr() for x in tensors]
            table += [w.weight.numel(), w.gradient.dtype == torch.bfloat16, w.seed, w.first]
        tables = ((ctypes.c_int64 * len(table))(*table), _factors(weights, lr, betas))
        known = (ctypes.c_int64 * len(codes))(*(x.data_ptr() for x in codes))
        rates = (1 - betas[0], betas[1], 1 - betas[1], eps, scale)
        self._call.adamw_frugal(*tables, len(weights), known, *rates, torch.get_num_threads())


def _factors(weights: Sequence[AdamWWeight], lr: float, betas: tuple[float, float]) -> Any:
    """Return 1 - η·λ, η / (1 - β₁ᵗ) and 1 / √(1 - β₂ᵗ) of each weight, as C floats."""
    found = []
    for w in weights:
        corrections = (1 - betas[0] ** w.step, (1 - betas[1] ** w.step) ** 0.5)
        found += [1 - lr * w.weight_decay, lr / corrections[0], 1 / corrections[1]]
    return (ctypes.c_float * len(found))(*found)
