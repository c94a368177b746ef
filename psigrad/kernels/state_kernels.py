"""The kernels of recurrent layers: a decoding step with one token per sequence, and whole sequences with their gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class Trees(NamedTuple):
    """The segments of a packed row, each of which continues at most one other segment, so that they form trees.

    The segments of a tree are adjacent, and each follows the segment that it continues.
    """

    segments: Tensor
    """[n, 4], int64: a segment's first token, its number of tokens, the row of the states that it starts from (-1: zeros), and
    the row to which its final state is written (-1: none).
    """
    first: Tensor
    """[trees + 1], int64: the index of the first segment of each tree, and then the number of segments."""
    states: int
    """The number of rows of the tensor of states."""


class StateKernels:
    """The kernels of recurrent layers, as functions of tensors."""

    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call

    def delta_rule(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        """Compute one token of N sequences by the gated delta rule (`hf_state.DeltaRule`), and return the outputs [N, H, V].

        All tensors are contiguous float32. The states of the N sequences, the first N of `state` [slots, H, D, V] or those at
        `slots` [N], are updated in place.
        """
        out, sizes = torch.empty_like(v), (*v.shape[:2], *k.shape[1:], v.shape[2], int(g.dim() == 3))
        self._call.delta_step(*_pointers(out, state, q, k, v, g, beta, slots), *sizes, torch.get_num_threads())
        return out

    def mamba2(
        self, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        """Compute one token of N sequences by Mamba-2 (`hf_state.Mamba2`), and return the outputs [N, H, P].

        All tensors are contiguous float32. The states of the N sequences, the first N of `state` [slots, H, P, states] or those
        at `slots` [N], are updated in place.
        """
        out, sizes = torch.empty_like(x), (*x.shape[:2], B.shape[1], x.shape[2], B.shape[2])
        self._call.mamba2_step(*_pointers(out, state, x, dt, A, B, C, slots), *sizes, torch.get_num_threads())
        return out

    def chunks(self, inputs: Tensors, states: Tensor, trees: Trees, delta: bool) -> Tensor:
        """Run the recurrence along the segments of a packed row, and return the outputs [S, H, V], float32.

        Formula: for each token and head S ← e^g S, S ← S + k uᵀ and o = Sᵀq. With `delta` (the gated delta rule) u = β (v - Sᵀk),
        and queries and keys are normalised. Otherwise (Mamba-2) u = β v.

        `inputs` are q, k, v, g and β. Queries and keys are [S, H_k, D] and values [S, H, V], in one dtype and with any row
        stride; g and β [S, H] are contiguous float32. `states` is [rows, H, D, V], for Mamba-2 [rows, H, V, D]; `trees` says
        which rows are read and written.
        """
        out = torch.empty(inputs[2].shape)
        self._call.scan_chunks(_half(inputs[0]), out.data_ptr(), states.data_ptr(), *_chunks(inputs, trees, delta))
        return out

    def chunks_gradient(
        self, dout: Tensor, slopes: Tensor, inputs: Tensors, states: Tensor, trees: Trees, delta: bool
    ) -> list[Tensor]:
        """Return the gradients of the inputs of `chunks`, float32, from the gradient `dout` of its outputs.

        On entry `slopes` has the gradients of the states from outside this function. The gradient of the state that a segment
        starts from is added to them. `states` is the tensor that `chunks` has written.
        """
        q, _, v, g, _ = inputs
        parts = math.gcd(v.shape[1] // q.shape[1], 8) if q.shape[1] < 8 else 1  # several threads for few heads of keys
        queries, keys = torch.empty(2, parts, *q.shape)
        found = [queries, keys, torch.empty(v.shape), torch.empty(g.shape), torch.empty(g.shape)]
        pointers = (x.data_ptr() for x in (*found, slopes, dout, states))
        self._call.scan_chunks_gradient(_half(q), *pointers, parts, len(q), *_chunks(inputs, trees, delta))
        return [queries.sum(0), keys.sum(0), *found[2:]] if parts > 1 else [queries[0], keys[0], *found[2:]]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, silu: bool) -> Tensor:
        """Return the depthwise convolution Σ_k weight_k · x[windows_k] + bias, [S, C], followed by SiLU if `silu`.

        `x` [rows, C] may have any row stride; `weight` [K, C] and `bias` [C] are float32. `windows` [S, K] are the int64 indices
        of the rows that each output reads, -1 for none.
        """
        out = x.new_empty(len(windows), x.shape[1])
        self._call.convolve(_half(x), out.data_ptr(), *_convolution(x, weight, bias, windows, silu))
        return out

    def convolve_gradient(
        self, dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, silu: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of x, of the weight [K, C] and of the bias [C] of `convolve`, the last two in float32."""
        dx, dweight = x.new_empty(x.shape), torch.zeros_like(weight)
        dbias = None if bias is None else torch.zeros_like(bias)
        pointers = (dx.data_ptr(), dweight.data_ptr(), None if dbias is None else dbias.data_ptr(), dout.data_ptr(), len(x))
        self._call.convolve_gradient(_half(x), *pointers, *_convolution(x, weight, bias, windows, silu))
        return dx, dweight, dbias


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]


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
