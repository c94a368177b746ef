"""The kernels of layers with state: one token of each sequence, and whole sequences with their gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class Trees(NamedTuple):
    """Segments of a packed row, each of which continues at most one other. Those of a tree are adjacent, in an order to run."""

    segments: Tensor
    """[n, 4], int64: first token, number of tokens, and the rows of the states before and after the segment (-1: zeros; none)."""
    first: Tensor
    """[trees + 1], int64: the first segment of each tree."""
    states: int
    """The number of rows of the states."""


class StateKernels:
    """The functions of layers with state."""

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def delta_rule(self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Compute one token [N, ...] of each sequence by the gated delta rule (`hf_state.DeltaRule`), and return [N, H, V].

        All tensors are contiguous float32. The states [slots, H, D, V] of the first N slots change in place.
        """
        out, sizes = torch.empty_like(v), (*v.shape[:2], *k.shape[1:], v.shape[2], int(g.dim() == 3))
        self._call.delta_step(*(x.data_ptr() for x in (out, state, q, k, v, g, beta)), *sizes, torch.get_num_threads())
        return out

    def mamba2(self, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """Compute one token [N, ...] of each sequence by Mamba-2 (`hf_state.Mamba2`), and return [N, H, P].

        All tensors are contiguous float32. The states [slots, H, P, states] of the first N slots change in place.
        """
        out, sizes = torch.empty_like(x), (*x.shape[:2], B.shape[1], x.shape[2], B.shape[2])
        self._call.mamba2_step(*(t.data_ptr() for t in (out, state, x, dt, A, B, C)), *sizes, torch.get_num_threads())
        return out

    def chunks(self, inputs: Tensors, states: Tensor, trees: Trees, delta: bool) -> Tensor:
        """Compute whole segments, and return the outputs [S, H, V], float32.

        `inputs` are q, k, v, g and β. For each token and head S ← e^g S, S ← S + k uᵀ and o = Sᵀq. With `delta` u = β (v - Sᵀk),
        and queries and keys are normalised (the gated delta rule); otherwise u = β v (Mamba-2). Queries and keys are [S, H_k, D],
        values [S, H, V], in one dtype and with rows at any distance; g and β [S, H] are contiguous float32. The states
        [rows, H, D, V] (Mamba-2's are [rows, H, V, D]) are read and written as `trees` says.
        """
        out = torch.empty(inputs[2].shape)
        self._call.scan_chunks(_half(inputs[0]), out.data_ptr(), states.data_ptr(), *_chunks(inputs, trees, delta))
        return out

    def chunks_gradient(
        self, dout: Tensor, slopes: Tensor, inputs: Tensors, states: Tensor, trees: Trees, delta: bool
    ) -> list[Tensor]:
        """Return the gradients of the inputs of `chunks`, float32. Those of the states are added to `slopes`.

        `slopes` holds the gradient of the states after their segments at first. `states` are those that `chunks` left.
        """
        q, _, v, g, _ = inputs
        parts = math.gcd(v.shape[1] // q.shape[1], 8) if q.shape[1] < 8 else 1  # several threads for few heads of keys
        queries, keys = torch.empty(2, parts, *q.shape)
        found = [queries, keys, torch.empty(v.shape), torch.empty(g.shape), torch.empty(g.shape)]
        pointers = (x.data_ptr() for x in (*found, slopes, dout, states))
        self._call.scan_chunks_gradient(_half(q), *pointers, parts, len(q), *_chunks(inputs, trees, delta))
        return [queries.sum(0), keys.sum(0), *found[2:]] if parts > 1 else [queries[0], keys[0], *found[2:]]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, silu: bool) -> Tensor:
        """Return [S, C] Σ_k weight_k · x[windows_k] + bias, channel by channel, with or without SiLU behind it.

        `x` [rows, C] has rows at any distance; `weight` [K, C] and `bias` [C] are float32. `windows` [S, K] are int64, and -1
        where there is no row.
        """
        out = x.new_empty(len(windows), x.shape[1])
        self._call.convolve(_half(x), out.data_ptr(), *_convolution(x, weight, bias, windows, silu))
        return out

    def convolve_gradient(
        self, dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, silu: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of x, of the weight [K, C] and of the bias [C], the last two in float32."""
        dx, dweight = x.new_empty(x.shape), torch.zeros_like(weight)
        dbias = None if bias is None else torch.zeros_like(bias)
        pointers = (dx.data_ptr(), dweight.data_ptr(), None if dbias is None else dbias.data_ptr(), dout.data_ptr(), len(x))
        self._call.convolve_gradient(_half(x), *pointers, *_convolution(x, weight, bias, windows, silu))
        return dx, dweight, dbias


def _half(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _chunks(inputs: Tensors, trees: Trees, delta: bool) -> tuple[int, ...]:
    q, k, v, g, beta = inputs
    pointers, rows = (x.data_ptr() for x in (q, k, v)), (x.stride(0) for x in (q, k, v))
    tables = (x.data_ptr() for x in (g, beta, trees.segments, trees.first))
    sizes = (len(trees.first) - 1, v.shape[1], *q.shape[1:], v.shape[2], int(delta))
    return *pointers, *rows, *tables, *sizes, torch.get_num_threads()


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, silu: bool) -> tuple[int | None, ...]:
    pointers = (x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), windows.data_ptr())
    return *pointers, *windows.shape, x.shape[1], int(silu), torch.get_num_threads()
