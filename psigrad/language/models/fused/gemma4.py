"""The layers of Gemma 4, and their second input: a per-layer embedding of the token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from psigrad.kernels.kernels import Kernels
from psigrad.language.models.attention import PackedLayout
from psigrad.language.models.fused.families import LayerWeights, NormFunction, Unsupported, eps_of, split_adapter
from psigrad.language.models.fused.layer import INPUT_GATE, INPUT_PROJECTION, Layer, PassArguments, WeightGradients
from psigrad.language.models.fused.module_kernels import LinearFunction
from psigrad.language.models.packing import RowSelection


class Gemma4Layer(Layer):
    """A layer of Gemma 4. It normalises its attention values by an RMS norm without a weight.

    Formula: s·(y + n(W·(gelu(G·y) ⊙ p))), or s·y without an extra input p (see `LayerInputs`). y is the output of `Layer`, s
    a constant, n a norm, and W and G are matrices. A layer without a value matrix uses its keys as values. A layer without
    a key matrix uses the keys and values of an earlier layer, `source`.
    """

    projections = ((("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj"), ("q_proj",)), (("o_proj",),))
    last = ("per_layer_input_gate", "per_layer_projection")
    source: Gemma4Layer | None = None
    reader: Gemma4Layer | None = None
    """The last layer that reads this layer's keys and values."""

    def __init__(self, index: int, module: Any, *given: Any) -> None:
        if getattr(module, "enable_moe_block", False):
            raise Unsupported("the model has experts")
        super().__init__(index, module, *given)
        self.has_keys, self.has_input = len(self.groups[0]) > 1, len(self.groups) > INPUT_GATE
        self.queries, self.values = self.heads.queries * self.heads.dim, self.heads.keys * self.heads.dim
        self._module = module

    def read(self, source: Gemma4Layer) -> None:
        """Make this layer reuse the keys and values of an earlier layer, `source`."""
        self.order, self.source, source.reader = source.order, source, self

    @property
    def kinds(self) -> tuple[tuple[int, torch.dtype], ...]:
        """(width, dtype) of each tensor that `forward` returns; see `Layer.kinds`."""
        out, (width, kind), *rest = super().kinds
        own = [out, (2 * self._linear[-1].in_features, kind)] if self.has_input else []
        return (out, (width if self.has_keys else self.heads.row, kind), *rest, *own)

    def forward(self, x: Tensor, how: PassArguments, selection: RowSelection) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return (the output, tensors for `backward`); see `Layer.forward`.

        With an extra input p, the last three tensors are W·(gelu(G·y) ⊙ p), y and [G·y|p]; the class explains these symbols.
        """
        weights = self._weights(how)
        y, (row, *parts) = super().forward(x, how._replace(ready={self.index: weights}), selection)
        if self.source is not None:
            row = torch.cat([row, how.keys[self.order]], 1)
        if self.has_input:
            p = selection.gather_outputs(how.tokens.gather_inputs(how.inputs[self.index]))
            both = y.new_empty(len(y), 2 * p.shape[1])
            weights.apply(INPUT_GATE, y, both[:, : p.shape[1]])
            both[:, p.shape[1] :] = p
            plain = weights.apply(INPUT_PROJECTION, self.native.gated(both, self.gelu), torch.empty_like(y))
            parts += plain, y, both
            y = self.native.products.add(y, self._norm(plain, weights.norms[-1]))
        return self._scale(y), (row, *parts)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        kept: list[Tensor],
        how: PassArguments,
        learns: Sequence[bool],
        selection: RowSelection,
        overwrite: bool,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients as `Layer.backward` does. If the layer has an extra input p, the list ends with p's gradient."""
        weights, dy = self._weights(how), self._scale(dy)
        how = how._replace(ready={self.index: weights})
        if not self.has_input:
            return super().backward(dy, x, kept, how, learns, selection, overwrite)
        made, tokens = WeightGradients(self, weights, learns), len(kept[0])
        plain, y, both = kept[-3:]
        del kept[-3:]
        dplain = made.before_residual(2, dy, [plain])
        dgated = weights.input_grad(INPUT_PROJECTION, [dplain])
        dboth, gated = self.native.gradients.gated(both, dgated, self.gelu, in_place=overwrite)
        made.learn(INPUT_PROJECTION, [dplain], gated)
        dgate, dp = dboth.chunk(2, 1)
        made.learn(INPUT_GATE, [dgate], y)
        dp = how.tokens.sum_input_grads(selection.scatter_output_grads(dp, tokens), len(how.inputs[self.index]))
        dy = weights.input_grad(INPUT_GATE, [dgate]).add_(dy)
        dx, found = super().backward(dy, x, kept, how, learns, selection, overwrite)
        own = made.in_order([None] * len(self.others))
        return dx, [*(b if a is None else a for a, b in zip(found, own, strict=True)), dp]

    def mix(self, row: Tensor, others: Sequence[Tensor], how: PassArguments) -> tuple[Tensor, Tensor]:
        """Compute attention, and store the keys and values if a later layer reads them; see `Layer.mix`."""
        if self.source is not None:
            row = torch.cat([row, how.keys[self.order]], 1)
        qkv, rotated = self._qkv(row, others, how)
        if self.reader is not None:
            how.keys[self.order] = torch.cat([rotated[:, self.queries :], qkv[:, -self.values :]], 1)
        return how.layout.mix(self, rotated, qkv)

    def mix_gradient(
        self, dout: Tensor, row: Tensor, mixed: Tensor, normaliser: Tensor, others: Sequence[Tensor], how: PassArguments
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return gradients as `Layer.mix_gradient` does. Add the gradients of reused keys and values to `how.key_gradients`."""
        (qkv, rotated), gradients, angles = self._qkv(row, others, how), self.native.gradients, how.angles[self.order]
        assert isinstance(how.layout, PackedLayout)
        drow = gradients.attention(dout, mixed, normaliser, rotated, qkv, how.layout.spans, self.heads, self.window)
        dkeys = drow[:, self.queries :]
        if self.source is not None:
            # The backward pass reaches the last reader first, which overwrites gradients that an aborted pass may have left.
            first = self.source.reader is self
            how.key_gradients[self.order] = dkeys.clone() if first else how.key_gradients[self.order].add_(dkeys)
            given = (drow[:, : self.queries].contiguous(), row[:, : self.queries].contiguous(), [*others, *others], angles)
            return given[0], gradients.rotary(*given, replace(self.heads, keys=0))[:1]
        if self.reader is not None:
            dkeys += how.key_gradients.pop(self.order)
        dothers = gradients.rotary(drow, qkv, others, angles, self.heads)
        plain, dvalues = self._values(row), self._values(drow)
        found = torch.zeros_like(plain)
        gradients.rms_norm(found, plain, plain.new_ones(self.heads.dim), dvalues, self.heads.eps)
        drow[:, -self.values :] = 0
        drow = drow[:, : self.row]  # without the values if they are the keys
        drow[:, -self.values :] += found.view(len(row), -1)
        return drow, dothers

    def _qkv(self, row: Tensor, others: Sequence[Tensor], how: PassArguments) -> tuple[Tensor, Tensor]:
        """Return two tensors: [q|k|v] with normalised values, and the rotated queries and keys.

        `row` is [q|k|v], or [q|k] if keys are the values. `others` are the weights of the query and key norms.
        """
        angles, end = how.angles[self.order], self.queries + self.values
        if self.source is None:
            values = self.native.rms_norm(self._values(row), row.new_ones(self.heads.dim), self.heads.eps)
            qkv = torch.cat([row[:, :end], values.view(len(row), -1)], 1)
            return qkv, self.native.rotary(qkv, others, angles, self.heads)
        # Reused keys are already rotated, and reused values normalised.
        alone = replace(self.heads, keys=0)
        queries = self.native.rotary(row[:, : self.queries].contiguous(), [*others, *others], angles, alone)
        return row, torch.cat([queries, row[:, self.queries : end]], 1)

    def _values(self, row: Tensor) -> Tensor:
        """Return the last columns of `row` as values [S·H_kv, D]. Without a value matrix these columns are the keys."""
        return row[:, -self.values :].contiguous().view(-1, self.heads.dim)

    def _weights(self, how: PassArguments) -> LayerWeights:
        return self.current_weights(how.adapted, how.layout.packed_weights) if how.ready is None else how.ready[self.index]

    def _scale(self, x: Tensor) -> Tensor:
        """Return x times the layer's constant s."""
        return x if (scale := float(self._module.layer_scalar)) == 1.0 else x * scale


class LayerInputs:
    """The layers' extra inputs p = (n(W·x / √E) + e) / √2, with a token's embedding x [E] and its row e in a second table.

    W is a projection, n an RMS norm.
    """

    def __init__(self, base: Any, native: Kernels) -> None:
        self.base, self.native = base, native
        split_adapter(base.per_layer_model_projection)

    def __call__(self, x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """Return each layer's input p [S, P] from the embeddings x [S, E] and the `rows` [S, layers·P] of the second table."""
        base: Any = self.base
        linear, adapter = split_adapter(base.per_layer_model_projection)
        y = self._linear(x, linear.weight)
        if adapter is not None and not adapter.module.disable_adapters:
            a, b = adapter.weights
            y = y + self._linear(self._linear(x, a), b) * adapter.module.scaling[adapter.name]
        norm, count = base.per_layer_projection_norm, len(base.layers)
        y = (y * base.per_layer_model_projection_scale).view(len(x) * count, -1)
        normed: Tensor = NormFunction.apply(self.native, y, norm.weight.to(x.dtype), eps_of(norm), 0.0)
        found = (normed.view(rows.shape) + rows) * float(base.per_layer_input_scale)
        return found.view(len(x), count, -1).unbind(1)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = LinearFunction.apply(self, x, weight.to(x.dtype), None)
        return made

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias."""
        return self.native.products.linear(x, weight, x.new_empty(len(x), len(weight)), bias, exact=True)
