"""A fused layer's weights and their gradients, by group of matrices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from psigrad.kernels.kernels import Kernels
from psigrad.language.models.fused.caches import PackedProjection, Projection
from psigrad.language.models.fused.families import LoraDelta

if TYPE_CHECKING:
    from psigrad.language.models.fused.layer import Layer


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights in its compute dtype. `lora` has the LoRA term for each of the `matrices`, or None.

    `norms` are those of the inputs and of the outputs of attention and of the feed-forward layer; None for an absent one. `mixer`
    are other weights of the mixer, such as the norms of queries and keys, and `feed` those of the feed-forward layer: its router
    and experts. `groups` has the indices of each group's matrices.
    """

    groups: Sequence[Sequence[int]]
    matrices: list[Tensor]
    norms: list[Tensor | None]
    mixer: list[Tensor]
    biases: list[Tensor | None]
    lora: list[LoraDelta | None]
    native: Kernels
    packed: list[PackedProjection] | None = None
    """The packed matrices of each group; None if they are not packed."""
    feed: Sequence[Tensor] = ()
    decoding: bool = False
    """True in decoding. Products of few rows may then be summed in another order than in training, which is faster."""

    def apply(self, group: int, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """Write to `out` the products of x with each matrix of a group, concatenated, plus biases, LoRA terms and `residual`."""
        if self.packed is not None:
            return self.packed[group].multiply(x, out, residual, self.native.products)
        members = self.groups[group]
        parts = out.split([len(self.matrices[i]) for i in members], dim=1)
        for i, part in zip(members, parts, strict=True):
            bias, delta = self.biases[i], self.lora[i]
            base = bias if residual is None else residual
            self.native.products.linear(x, self.matrices[i], part, base, exact=not self.decoding)
            if bias is not None and residual is not None:
                part += bias
            if delta is not None:
                delta.add(part, x)
        return out

    def factors(self, group: int) -> Projection:
        """Return the matrices, biases and LoRA matrices of a group, in the form that `PackedWeights` packs."""
        members = self.groups[group]
        heights = [self.matrices[i].shape[0] for i in members]
        biases, deltas = [self.biases[i] for i in members], [self.lora[i] for i in members]
        like = next(x for x in self.norms if x is not None)
        width, bias, low = self.matrices[members[0]].shape[1], None, None
        if any(b is not None for b in biases):
            bias = torch.cat([like.new_zeros(n) if b is None else b.detach() for b, n in zip(biases, heights, strict=True)])
        if any(delta is not None for delta in deltas):
            a = [like.new_zeros(0, width) if delta is None else delta.a for delta in deltas]
            b = [like.new_zeros(n, 0) if delta is None else delta.b for delta, n in zip(deltas, heights, strict=True)]
            # The kernels sum bfloat16 numbers in pairs. A pair must not span two adapters, which training multiplies separately.
            odd = [len(x) % 2 for x in a]
            a = [nn.functional.pad(x, (0, 0, 0, more)) for x, more in zip(a, odd, strict=True)]
            low = torch.cat(a), torch.block_diag(*(nn.functional.pad(x, (0, more)) for x, more in zip(b, odd, strict=True)))
        return Projection([self.matrices[i] for i in members], bias, low)

    def input_grad(self, group: int, parts: Sequence[Tensor]) -> Tensor:
        """Return the gradient of a group's input from the gradients of its matrices' outputs, `parts`."""
        multiply, total = self.native.products.of, None
        for i, part in zip(self.groups[group], parts, strict=True):
            total = multiply(part, self.matrices[i], total, base=total)
        assert total is not None
        for i, part in zip(self.groups[group], parts, strict=True):
            if (delta := self.lora[i]) is not None:
                delta.add_input_grad(total, part)
        return total


class WeightGradients:
    """The gradients of a layer's weights, with the names in `LayerWeights`, collected during its backward pass."""

    def __init__(self, layer: Layer, weights: LayerWeights, learns: Sequence[bool]) -> None:
        self.layer, self.weights, self.learns = layer, weights, learns
        count = len(weights.matrices)
        self.matrices: list[Tensor | None] = [None] * count
        self.biases: list[Tensor | None] = [None] * count
        self.lora: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * count
        self.norms: list[Tensor | None] = [None] * len(weights.norms)
        self.feed: Sequence[Tensor | None] = ()

    def learn(self, group: int, parts: Sequence[Tensor], x: Tensor) -> None:
        """Compute the gradients of a group's weights from those of its matrices' outputs, `parts`, and its input x."""
        for i, dy in zip(self.layer.groups[group], parts, strict=True):
            self.matrices[i] = self.layer.native.products.of(dy.t(), x) if self.learns[i] else None
            self.biases[i] = None if self.weights.biases[i] is None else dy.sum(0)
            if (delta := self.weights.lora[i]) is not None:
                self.lora[i] = delta.gradients(dy, x)

    def add_through_norm(self, which: int, dx: Tensor, x: Tensor, dnormed: Tensor) -> None:
        """Add to dx the gradient of x from that of its norm; without a norm, from x itself."""
        if self.weights.norms[which] is None:
            dx += dnormed
        else:
            self.norms[which] = self._norm(which, dx, x, dnormed)

    def before_residual(self, which: int, dy: Tensor, plain: list[Tensor]) -> Tensor:
        """Return the gradient of a product whose result, normalised and times `residual`, is added to the residual stream.

        `plain` has the inputs of these norms. The last one is removed.
        """
        dy = dy if self.layer.residual == 1.0 else dy * self.layer.residual
        if self.weights.norms[2 + which] is None:
            return dy
        dx = torch.zeros_like(dy)
        self.norms[2 + which] = self._norm(2 + which, dx, plain.pop(), dy)
        return dx

    def _norm(self, which: int, dx: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        weight, layer = self.weights.norms[which], self.layer
        assert weight is not None
        return layer.native.gradients.rms_norm(dx, x, weight, dy, layer.eps, layer.heads.offset)

    def in_order(self, others: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return all gradients in the order of `Layer.weights`. `others` has the gradients of the mixer's other weights."""
        norms = [one for one, weight in zip(self.norms, self.weights.norms, strict=True) if weight is not None]
        biases = [self.biases[i] for i in self.layer.biased]
        pairs = itertools.chain(*(self.lora[i] for i in self.layer.adapters))
        return [*self.matrices[: len(self.layer._linear)], *norms, *others, *self.feed, *biases, *pairs]
