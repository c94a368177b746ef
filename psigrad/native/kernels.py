"""The kernels as functions of tensors. float32 or bfloat16 in memory, float32 within; every tensor contiguous in its rows."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from psigrad.native.build import bind, library
from psigrad.native.products import Products, Turned, by_pytorch

_HALF = {torch.float32: 0, torch.bfloat16: 1}
_SIGNATURES = {
    "rms_norm": "tpppiift",
    "rms_norm_gradient": "tpppppiift",
    "rotary": "tppppppiiiiift",
    "rotary_gradient": "tpppppppiiiiift",
    "swiglu": "tppiit",
    "swiglu_gradient": "tppppiit",
    "attention": "tpppppiiipppiiiiift",
    "attention_gradient": "tpippppppiiipppiiiiift",
    "decode": "tpppppiiipppipppppiiiiift",
    "decode_layers": "tpi" + "p" * 10 + "i" * 7 + "ffft",
    "prompt_tables": "tppppiippiiit",
    "few_rows": "ppppiiiiiit",
    "turned": "ppiit",
    "through_panels": "ppppiiiiiit",
    "through_half_panels": "ppppiiiiiit",
    "product": "ppppiiiiiiiiitt",
    "half_product": "ppppiiiiiiiiitt",
    "draw": "tppppiift",
    "gather": "pppiiit",
    "copies": "pppit",
}


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads, the width of one, the epsilon of their norms, and the factor of the scores."""

    queries: int
    keys: int
    dim: int
    eps: float
    scale: float

    @property
    def row(self) -> int:
        """The width of [q | k | v]."""
        return (self.queries + 2 * self.keys) * self.dim


class Spans:
    """Where packed sequences lie: `prefixes` (start, length), and per prefix the `members` (start, length) that continue it.

    A prefix attends to itself causally, a member to its prefix and causally to itself.
    """

    def __init__(self, prefixes: Sequence[tuple[int, int]], members: Sequence[Sequence[tuple[int, int]]]) -> None:
        flat = [m for group in members for m in group]
        counts = torch.tensor([0, *(len(group) for group in members)])
        self.prefixes = torch.tensor(prefixes, dtype=torch.int64).reshape(-1, 2)
        self.members = torch.tensor(flat, dtype=torch.int64).reshape(-1, 2)
        self.first = counts.cumsum(0)
        self.arguments = (self.prefixes.data_ptr(), self.members.data_ptr(), self.first.data_ptr(), len(prefixes))


@dataclass(frozen=True)
class Slots:
    """Sequences being decoded, B slots in G groups that share a prompt. All integers are int64."""

    keys: Tensor
    """[slots, H_kv, capacity, D] of each slot's own tokens."""
    values: Tensor
    places: Tensor
    """[B] where each slot's new token goes."""
    prompt_keys: Tensor
    """[G] addresses of the prompts' keys, and of their values, as `Kernels.prompt_tables` makes them."""
    prompt_values: Tensor
    prompt_lengths: Tensor
    """[G]"""
    members: Tensor
    """[B] slots, group by group."""
    first: Tensor
    """[G + 1] where each group begins in `members`."""


@dataclass(frozen=True)
class Step:
    """A layer in a step of decoding B rows: its weights, its cache, and tensors for what it computes."""

    norms: Sequence[Tensor]
    """Before attention and before the feed-forward part."""
    head_norms: tuple[Tensor, Tensor] | None
    turned: Sequence[Turned]
    """[q | k | v], the output's, [gate | up], down."""
    slots: Slots
    window: int
    made: Sequence[Tensor]
    """y [B, E], qkv [B, row], attention's output [B, H·D] and normaliser [B, H], the middle [B, E], [gate | up] [B, 2·I]."""

    def pointers(self) -> tuple[int, ...]:
        """As `decode_layers` reads them."""
        slots, head_norms = self.slots, self.head_norms or ()
        heads = [x.data_ptr() for x in head_norms] or [0, 0]
        weights = (*(x.data_ptr() for x in self.norms), *heads, *(x.panels.data_ptr() for x in self.turned))
        caches = (x.data_ptr() for x in (slots.keys, slots.values, slots.prompt_keys, slots.prompt_values))
        return (*weights, *caches, slots.keys.shape[2], self.window, *(x.data_ptr() for x in self.made))


@functools.cache
def kernels() -> Kernels | str:
    """The kernels, compiled if need be, or why there are none."""
    loaded = library()
    return loaded if isinstance(loaded, str) else Kernels(loaded)


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """out ← a · b + base as `Products.of` computes it; by PyTorch on a GPU, and where there are no kernels."""
    native = kernels() if a.device.type == "cpu" else "a GPU has its own"
    return by_pytorch(a, b, out, base) if isinstance(native, str) else native.products.of(a, b, out, base)


class Kernels:
    """The functions of the compiled library."""

    dtypes = tuple(_HALF)
    """What all but `products` take, which takes any."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._call = bind(loaded, _SIGNATURES)
        self.products, self.gradients, self.slabs = Products(self._call), Gradients(self._call), Slabs(self._call)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last of x [S, E]."""
        out = torch.empty_like(x)
        self._call.rms_norm(
            _HALF[x.dtype], out.data_ptr(), x.data_ptr(), weight.data_ptr(), *x.shape, eps, torch.get_num_threads()
        )
        return out

    def rotary(self, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, cosine: Tensor, sine: Tensor, heads: Heads) -> Tensor:
        """Normalised and rotated queries and keys [S, (H + H_kv)·D] of `qkv` [S, row]; cosine and sine are float32 [S, D]."""
        out = qkv.new_empty(len(qkv), (heads.queries + heads.keys) * heads.dim)
        self._call.rotary(_HALF[qkv.dtype], out.data_ptr(), *_rotary(qkv, norms, cosine, sine, heads))
        return out

    def swiglu(self, both: Tensor) -> Tensor:
        """silu(gate) · up of [S, gate | up]."""
        rows, width = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, width)
        self._call.swiglu(_HALF[both.dtype], out.data_ptr(), both.data_ptr(), rows, width, torch.get_num_threads())
        return out

    def attention(self, rotated: Tensor, qkv: Tensor, spans: Spans, heads: Heads, window: int) -> tuple[Tensor, Tensor]:
        """Output [S, H·D] and log-normaliser [S, H] of rotated queries and keys and the values in `qkv`; `window` 0 is none."""
        out = qkv.new_empty(len(qkv), heads.queries * heads.dim)
        normaliser = torch.empty(len(qkv), heads.queries)
        given = (*_tables(rotated, qkv, heads), *spans.arguments, *_shape(heads, window))
        self._call.attention(_HALF[qkv.dtype], out.data_ptr(), normaliser.data_ptr(), *given)
        return out, normaliser

    def decode(self, rotated: Tensor, qkv: Tensor, slots: Slots, heads: Heads, window: int) -> tuple[Tensor, Tensor]:
        """Output [B, H·D] and log-normaliser [B, H] of a new token per slot, which sees its prompt and its own slot; its key and
        value enter the slot.
        """
        normaliser = torch.empty(len(qkv), heads.queries)
        out = qkv.new_empty(len(qkv), heads.queries * heads.dim)
        own = (slots.keys.data_ptr(), slots.values.data_ptr(), slots.places.data_ptr(), slots.keys.shape[2])
        groups = (slots.prompt_keys, slots.prompt_values, slots.prompt_lengths, slots.members, slots.first)
        given = (*own, *(x.data_ptr() for x in groups), len(slots.prompt_lengths), *_shape(heads, window))
        self._call.decode(_HALF[qkv.dtype], out.data_ptr(), normaliser.data_ptr(), *_tables(rotated, qkv, heads), *given)
        return out, normaliser

    def prompt_tables(
        self, rotated: Tensor, qkv: Tensor, starts: Tensor, lengths: Tensor, heads: Heads
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of prompts, each `lengths` [G] rows from `starts` [G] on, as `decode` reads them from one end to the
        other, in float32: keys by head in blocks of 16 neighbours [H_kv, ⌈L / 16⌉, D, 16], values by head [H_kv, L, D] with D
        filled up to a multiple of 16.
        """
        wide = -(-heads.dim // 16) * 16
        shapes = [(heads.keys, -(-length // 16), heads.dim, 16) for length in lengths.tolist()]
        keys = [torch.empty(shape) for shape in shapes]
        values = [torch.empty(heads.keys, length, wide) for length in lengths.tolist()]
        _, *tables = _tables(rotated, qkv, heads)
        pointers = [(ctypes.c_void_p * len(keys))(*(x.data_ptr() for x in made)) for made in (keys, values)]
        given = (*tables[:2], *tables[3:], starts.data_ptr(), lengths.data_ptr(), len(keys), heads.keys, heads.dim)
        self._call.prompt_tables(_HALF[qkv.dtype], *pointers, *given, torch.get_num_threads())
        return list(zip(keys, values, strict=True))

    def decode_layers(self, x: Tensor, steps: Sequence[Step], cosine: Tensor, sine: Tensor, heads: Heads, eps: float) -> None:
        """x [B, E] through layers one after another, by `rms_norm`, `Products.through`, `rotary`, `decode` and `swiglu`: fills
        `made` of each.
        """
        rows, width = x.shape
        inner = steps[0].turned[2].shape[0] // 2
        room = x.new_empty(rows * (width + (heads.queries + heads.keys) * heads.dim + inner))
        size, normed = x.element_size(), room.data_ptr()
        rotated = normed + size * rows * width
        gated = rotated + size * rows * (heads.queries + heads.keys) * heads.dim
        table = [pointer for step in steps for pointer in step.pointers()]
        slots = steps[0].slots
        shared = (slots.places, slots.prompt_lengths, slots.members, slots.first)
        pointers = (x.data_ptr(), normed, rotated, gated, cosine.data_ptr(), sine.data_ptr(), *(y.data_ptr() for y in shared))
        sizes = (len(slots.prompt_lengths), rows, width, inner, heads.queries, heads.keys, heads.dim)
        factors = (eps, heads.eps, heads.scale, torch.get_num_threads())
        self._call.decode_layers(_HALF[x.dtype], (ctypes.c_int64 * len(table))(*table), len(steps), *pointers, *sizes, *factors)

    def draw(self, logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Per row of logits [B, V] the first column whose cumulative probability softmax(logits / temperature) exceeds u, float64
        [B]; and the log of its probability.
        """
        ids, logp = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        pointers = (ids.data_ptr(), logp.data_ptr(), logits.data_ptr(), u.data_ptr())
        self._call.draw(_HALF[logits.dtype], *pointers, *logits.shape, 1 / temperature, torch.get_num_threads())
        return ids, logp


class Slabs:
    """A table of rows that grows, in slabs of equally many: [slab, …] each and contiguous."""

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def write(self, to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """to ← given, tensor by tensor: rows of slabs and what they are to hold. Raises `ValueError` where they are not alike in
        shape and type, or not contiguous.
        """
        for there, here in zip(to, given, strict=True):
            if there.shape != here.shape or there.dtype != here.dtype or not (there.is_contiguous() and here.is_contiguous()):
                raise ValueError(
                    f"Rows {tuple(here.shape)}, {here.dtype}, were to be written to {tuple(there.shape)}, {there.dtype}; they "
                    "must be alike, and contiguous."
                )
        count = len(to)
        pointers = [(ctypes.c_void_p * count)(*(x.data_ptr() for x in tensors)) for tensors in (to, given)]
        sizes = (ctypes.c_int64 * count)(*(x.numel() * x.element_size() for x in given))
        self._call.copies(*pointers, sizes, count, torch.get_num_threads())

    def gather(self, slabs: Sequence[Tensor], rows: Tensor) -> Tensor:
        """The rows at the places `rows` [n], int64."""
        first = slabs[0]
        out = torch.empty(len(rows), *first.shape[1:], dtype=first.dtype)
        pointers = (ctypes.c_void_p * len(slabs))(*(slab.data_ptr() for slab in slabs))
        size = first[0].numel() * first.element_size()
        self._call.gather(out.data_ptr(), pointers, rows.data_ptr(), len(rows), len(first), size, torch.get_num_threads())
        return out


class Gradients:
    """Of the kernels of the same names."""

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def rms_norm(self, dx: Tensor, x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> Tensor:
        """Adds the gradient of x to `dx`, returns that of the weight [E], float32."""
        dw = torch.zeros(weight.shape)
        pointers = (dx.data_ptr(), dw.data_ptr(), x.data_ptr(), weight.data_ptr(), dy.data_ptr())
        self._call.rms_norm_gradient(_HALF[x.dtype], *pointers, *x.shape, eps, torch.get_num_threads())
        return dw

    def rotary(
        self, gradient: Tensor, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, cosine: Tensor, sine: Tensor, heads: Heads
    ) -> Tensor:
        """Turns d[q' | k' | v] [S, row] into d[q | k | v] in place, returns the gradients of the norms' weights [2, D]."""
        dw = torch.zeros(2, heads.dim)
        half = _HALF[qkv.dtype]
        self._call.rotary_gradient(half, gradient.data_ptr(), dw.data_ptr(), *_rotary(qkv, norms, cosine, sine, heads))
        return dw

    def swiglu(self, both: Tensor, dy: Tensor, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
        """The gradient [S, gate | up], and `swiglu(both)` once more; `in_place` they take the places of `both` and `dy`."""
        gradient, out = (both, dy) if in_place else (torch.empty_like(both), torch.empty_like(dy))
        pointers = (gradient.data_ptr(), out.data_ptr(), both.data_ptr(), dy.data_ptr())
        self._call.swiglu_gradient(_HALF[both.dtype], *pointers, *dy.shape, torch.get_num_threads())
        return gradient, out

    def attention(
        self, dout: Tensor, out: Tensor, normaliser: Tensor, rotated: Tensor, qkv: Tensor, spans: Spans, heads: Heads, window: int
    ) -> Tensor:
        """d[q' | k' | v] [S, row]."""
        gradient = torch.empty_like(qkv)
        given = (*_tables(rotated, qkv, heads), *spans.arguments, *_shape(heads, window))
        pointers = (gradient.data_ptr(), heads.row, dout.data_ptr(), out.data_ptr(), normaliser.data_ptr())
        self._call.attention_gradient(_HALF[qkv.dtype], *pointers, *given)
        return gradient


def _tables(rotated: Tensor, qkv: Tensor, heads: Heads) -> tuple[int, ...]:
    """Pointers to queries, keys and values, then the widths of their rows."""
    size, width = qkv.element_size(), (heads.queries + heads.keys) * heads.dim
    start = rotated.data_ptr()
    pointers = (start, start + heads.queries * heads.dim * size, qkv.data_ptr() + width * size)
    return (*pointers, width, width, heads.row)


def _shape(heads: Heads, window: int) -> tuple[int | float, ...]:
    return (heads.queries, heads.keys, heads.dim, window, heads.scale, torch.get_num_threads())


def _rotary(
    qkv: Tensor, norms: tuple[Tensor, Tensor] | None, cosine: Tensor, sine: Tensor, heads: Heads
) -> tuple[int | float | None, ...]:
    weights = (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
    tables = (qkv.data_ptr(), *weights, cosine.data_ptr(), sine.data_ptr())
    return (*tables, len(qkv), heads.queries, heads.keys, heads.dim, heads.row, heads.eps, torch.get_num_threads())
