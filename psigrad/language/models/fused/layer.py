"""One layer of the fused decoder, forward and backward.

The forward pass stores what the backward pass can't recompute row by row: the residual stream before both norms, the projections,
attention's output and the log-sum-exp of its scores. The product with LoRA's matrices is computed separately from that with the
layer's matrices. Without an adapter the layer then is exactly the original one, and rounding to half precision does not remove
the adapter's small update.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from psigrad.errors import kind_of
from psigrad.kernels.codes import CodedMatrix
from psigrad.kernels.kernels import Heads, Kernels
from psigrad.kernels.processor import fast_bfloat16
from psigrad.kernels.products import Products
from psigrad.language.models.attention import FusedLayout, PackedLayout
from psigrad.language.models.coded_linear import CodedLinear, unpack
from psigrad.language.models.fused.caches import PackedProjection, PackedWeights, Projection, Version, version_of

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
# The seven matrices, grouped by their input. The outputs of a group are stored side by side.
_GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))
_QKV, _OUT, _GATE_UP, _DOWN = range(4)
# The slice of `Layer.addresses` that has the ranks of the adapters.
RANKS = slice(-5, -1)


class Unsupported(Exception):
    """Raised if the fused decoder can't run a model, with the reason as its message."""


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype of a layer's computation: bfloat16 if weights have it and the CPU is faster with it, else float32."""
    return torch.bfloat16 if stored == torch.bfloat16 and fast_bfloat16() else torch.float32


class Weights:
    """Weights, cast to the dtype of a layer's computation. The copies are cached, and made again when a weight changes.

    With `exact`, weights are cast to float32 at each use, and the copies are not cached. Quantised matrices are not cast.
    """

    def __init__(self, given: Sequence[Tensor], exact: bool = False) -> None:
        self.given, self.exact = list(given), exact
        stored = next(p.dtype for p in self.given if p.is_floating_point())
        self.dtype = torch.float32 if exact else compute_dtype(stored)
        self._versions: list[Version | None] = [None] * len(self.given)
        self._cast: list[Tensor] = [p.detach() for p in self.given]

    def now(self) -> list[Tensor]:
        """Return the weights in the dtype of the computation, with their current values, in the given order."""
        if all(p.dtype in (self.dtype, torch.uint8) for p in self.given):
            return self.given
        if self.exact:
            return [p.detach().to(self.dtype) if p.is_floating_point() else p for p in self.given]
        for i, p in enumerate(self.given):
            if p.is_floating_point() and self._versions[i] != (version := version_of(p)):
                self._versions[i], self._cast[i] = version, p.detach().to(self.dtype)
        return self._cast


@dataclass(frozen=True)
class LoraDelta:
    """The term that LoRA adds to a linear layer: s·x·Aᵀ·Bᵀ with A [r, in] and B [out, r] (Hu et al. 2021, arXiv:2106.09685)."""

    a: Tensor
    b: Tensor
    """s·B [out, r], already multiplied by the scale s = `scale`."""
    scale: float
    products: Products

    def add(self, y: Tensor, x: Tensor) -> None:
        """Compute y ← y + s·x·Aᵀ·Bᵀ."""
        multiply = self.products.of
        multiply(multiply(x, self.a.t()), self.b.t(), y, base=y)

    def add_input_grad(self, dx: Tensor, dy: Tensor) -> None:
        """Compute dx ← dx + s·dy·B·A."""
        multiply = self.products.of
        multiply(multiply(dy, self.b), self.a, dx, base=dx)

    def gradients(self, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the gradient of A, the gradient of B), from the gradient dy of the output and the input x."""
        multiply = self.products.of
        return multiply(multiply(dy, self.b).t(), x), multiply(dy.t(), multiply(x, self.a.t())).mul_(self.scale)


class PassArguments(NamedTuple):
    """The arguments of a forward pass that are the same in every layer: `angles` are the cosines and sines of the rotary
    embedding, and `adapted` is True if the LoRA adapters are active.
    """

    angles: tuple[Tensor, Tensor]
    layout: FusedLayout
    adapted: bool


@dataclass(frozen=True)
class RowSelection:
    """The rows that a layer reads and writes. None means one row for each of the S tokens.

    `input_rows` [S] is the row of the input x for each token. In the first layer, equal tokens share a row. `output_rows` [W]
    lists each token whose output is needed. In the last layer these are the tokens that predict a target; for the others the
    layer computes only keys and values.
    """

    input_rows: Tensor | None = None
    output_rows: Tensor | None = None

    def gather_inputs(self, x: Tensor) -> Tensor:
        """Return the input row of every token: x [rows, …] -> [S, …]."""
        return x if self.input_rows is None else x.index_select(0, self.input_rows)

    def sum_input_grads(self, dx: Tensor, count: int) -> Tensor:
        """Return the gradient of the `count` input rows. It sums the gradients dx [S, …] of the tokens that share a row."""
        return dx if self.input_rows is None else dx.new_zeros(count, dx.shape[1]).index_add_(0, self.input_rows, dx)

    def gather_outputs(self, x: Tensor) -> Tensor:
        """Return the rows of the tokens whose output is needed: x [S, …] -> [W, …]."""
        return x if self.output_rows is None else x.index_select(0, self.output_rows)

    def scatter_output_grads(self, dx: Tensor, tokens: int) -> Tensor:
        """Scatter the gradient dx [W, …] of the output rows to all S tokens, zeros elsewhere. The result may be dx itself."""
        return dx if self.output_rows is None else dx.new_zeros(tokens, dx.shape[1]).index_copy_(0, self.output_rows, dx)


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights in the dtype of its computation, with the LoRA term of each of its seven matrices (None without one)."""

    matrices: list[Tensor]
    norms: list[Tensor]
    head_norms: tuple[Tensor, Tensor] | None
    biases: list[Tensor | None]
    lora: list[LoraDelta | None]
    native: Kernels
    packed: list[PackedProjection] | None = None
    """The packed matrices of each group of `_GROUPS`; None if they are not packed."""
    decoding: bool = False
    """True in decoding. Products of few rows may then be summed in another order than in training, which is faster."""

    def apply(self, group: int, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """Write to `out` the products of x with each matrix of a group, concatenated, plus biases, LoRA terms and `residual`."""
        if self.packed is not None:
            return self.packed[group].multiply(x, out, residual, self.native.products)
        members = _GROUPS[group]
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
        members = _GROUPS[group]
        heights = [self.matrices[i].shape[0] for i in members]
        biases, deltas = [self.biases[i] for i in members], [self.lora[i] for i in members]
        like, width, bias, low = self.norms[0], self.matrices[members[0]].shape[1], None, None
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

    def add_input_grad(self, i: int, dy: Tensor, dx: Tensor) -> Tensor:
        """Add the gradient through the LoRA term of matrix i to dx in place, and return dx."""
        if (delta := self.lora[i]) is not None:
            delta.add_input_grad(dx, dy)
        return dx


class Layer:
    """One fused decoder layer over rows [S, E]. `window` is its sliding window in tokens; 0: no window."""

    def __init__(self, index: int, module: Any, heads: Heads, window: int, native: Kernels, exact: bool = False) -> None:
        attention, mlp = module.self_attn, module.mlp
        modules = [getattr(attention, name) for name in _ATTENTION] + [getattr(mlp, name) for name in _FEED_FORWARD]
        linear, adapters = zip(*map(_split_adapter, modules), strict=True)
        if any(child.bias is not None for child in linear[4:]):
            raise Unsupported("its feed-forward layers have biases")
        self.index, self.heads, self.window, self.native = index, heads, window, native
        norms = [module.input_layernorm, module.post_attention_layernorm]
        self.has_head_norms = hasattr(attention, "q_norm")
        if self.has_head_norms:
            norms += [attention.q_norm, attention.k_norm]
        self.coded = {i: child.matrix for i, child in enumerate(linear) if isinstance(child, CodedLinear)}
        self.biased = [i for i, child in enumerate(linear[:4]) if child.bias is not None]
        self.adapters = {i: adapter for i, adapter in enumerate(adapters) if adapter is not None}
        self._linear, self._norms = linear, norms
        self.weights = Weights(self._read_weights(), exact)
        self.eps = float(norms[0].variance_epsilon)

    def _read_weights(self) -> list[Tensor]:
        given = [child.weight for child in self._linear] + [norm.weight for norm in self._norms]
        given += [self._linear[i].bias for i in self.biased]
        return given + [weight for adapter in self.adapters.values() for weight in adapter.weights]

    def reread(self) -> None:
        """Read the modules' parameters again. In a sharded model each pass has new tensors, which `Weights` cannot notice."""
        self.weights = Weights(self._read_weights())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layer's computation."""
        return self.weights.dtype

    @property
    def adapted(self) -> bool:
        """True if the layer has LoRA adapters and they are enabled.

        Raises `ValueError` if the adapters have been merged, or if other adapters are active than when this layer was created.
        """
        for adapter in self.adapters.values():
            if adapter.module.merged or adapter.module.active_adapters != [adapter.name]:
                raise ValueError(
                    f"The adapter {adapter.name!r} has been merged into the weights or another was made active, which the fused "
                    "decoder does not follow; undo that, or set model.decoder = None."
                )
        return any(not adapter.module.disable_adapters for adapter in self.adapters.values())

    def current_weights(self, adapted: bool, packed_weights: PackedWeights | None = None) -> LayerWeights:
        """Return the current weights: with the LoRA terms if `adapted`, and packed if the cache `packed_weights` has room."""
        now = iter(self.weights.now())
        matrices: list[Any] = [self.coded.get(i, next(now)) for i in range(7)]
        norms = [next(now), next(now)]
        head_norms = (next(now), next(now)) if self.has_head_norms else None
        biases: list[Tensor | None] = [None] * 7
        for i in self.biased:
            biases[i] = next(now)
        lora: list[LoraDelta | None] = [None] * 7
        if adapted:
            for i, adapter in self.adapters.items():
                scale = float(adapter.module.scaling[adapter.name])
                lora[i] = LoraDelta(next(now), next(now).detach() * scale, scale, self.native.products)
        plain = LayerWeights(matrices, norms, head_norms, biases, lora, self.native)
        made = None
        if packed_weights is not None:
            key, groups, products = (self.index, adapted), range(len(_GROUPS)), self.native.products
            made = packed_weights.of(key, self.weights.given, lambda: [plain.factors(i) for i in groups], products)
        if made is None and self.coded:
            plain = replace(plain, matrices=[unpack(x, self.dtype) if isinstance(x, CodedMatrix) else x for x in matrices])
        return plain if packed_weights is None else replace(plain, packed=made, decoding=True)

    def addresses(self, packed_weights: PackedWeights, adapted: bool) -> list[int] | None:
        """Return the addresses of the layer's weights for `Kernels.decode_layers`.

        Return None if the weights cannot be packed, or if the projection of attention's output has a bias.
        """
        weights = self.current_weights(adapted, packed_weights)
        if weights.packed is None or weights.packed[_OUT].bias is not None:
            return None
        heads = [0, 0] if weights.head_norms is None else [x.data_ptr() for x in weights.head_norms]
        norms, bias = [x.data_ptr() for x in weights.norms], weights.packed[_QKV].bias
        low = [[0, 0] if p.low is None else [x.panels.data_ptr() for x in p.low] for p in weights.packed]
        return [
            *norms,
            *heads,
            *(p.addresses[0] for p in weights.packed),
            0 if bias is None else bias.data_ptr(),
            *(p.addresses[1] for p in weights.packed),
            *(pair[0] for pair in low),
            *(pair[1] for pair in low),
            *(p.rank for p in weights.packed),
            self.window,
        ]

    @property
    def kinds(self) -> tuple[tuple[int, torch.dtype], ...]:
        """(width, dtype) of each tensor that `forward` returns: first of the output, then of the tensors for `backward`."""
        heads, width, inner = self.heads, self._linear[3].out_features, self._linear[4].out_features
        own = [(n, self.dtype) for n in (width, heads.row, heads.queries * heads.dim, width, 2 * inner)]
        return (*own[:3], (heads.queries, torch.float32), *own[3:])

    def forward(self, x: Tensor, how: PassArguments, selection: RowSelection) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return (the layer's output [W, E], the tensors that `backward` needs besides x).

        These tensors are, for every token [S, …], [q|k|v], attention's output and the log-sum-exps of its scores; and for the
        output rows [W, …] the residual stream after attention and [gate|up].
        """
        weights = self.current_weights(how.adapted, how.layout.packed_weights)
        normed = self.native.rms_norm(x, weights.norms[0], self.eps)
        qkv = selection.gather_inputs(weights.apply(_QKV, normed, x.new_empty(len(x), self.heads.row)))
        rotated = self.native.rotary(qkv, weights.head_norms, *how.angles, self.heads)
        mixed, normaliser = how.layout.mix(self, rotated, qkv)
        stream = selection.gather_outputs(selection.gather_inputs(x))
        middle = weights.apply(_OUT, selection.gather_outputs(mixed), torch.empty_like(stream), residual=stream)
        normed = self.native.rms_norm(middle, weights.norms[1], self.eps)
        both = weights.apply(_GATE_UP, normed, x.new_empty(len(normed), 2 * weights.matrices[4].shape[0]))
        y = weights.apply(_DOWN, self.native.swiglu(both), torch.empty_like(middle), residual=middle)
        return y, (qkv, mixed, normaliser, middle, both)

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
        """Return (the gradient of x, the gradients of the layer's `weights` in their order; None for untrained weights).

        `learns` is True for the weights that need a gradient. `kept` has the tensors from `forward`. The list is emptied, so that
        each tensor is freed after its last use. With `overwrite` the gradients may be written into these tensors.
        """
        (angles, layout, adapted), multiply = how, self.native.products.of
        assert isinstance(layout, PackedLayout)
        weights = self.current_weights(adapted)
        (q, k, v, o, gate, up, down), norms, head_norms = weights.matrices, weights.norms, weights.head_norms
        qkv, mixed, normaliser, middle, both = kept
        kept.clear()
        matrices: list[Tensor | None] = [None] * 7
        pairs: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * 7

        def learn(i: int, dy: Tensor, x: Tensor) -> None:
            matrices[i] = multiply(dy.t(), x) if learns[i] else None
            if (delta := weights.lora[i]) is not None:
                pairs[i] = delta.gradients(dy, x)

        dboth, gated = self.native.gradients.swiglu(both, weights.add_input_grad(6, dy, multiply(dy, down)), in_place=overwrite)
        del both
        normed = self.native.rms_norm(middle, norms[1], self.eps)
        dgate_up = (dboth[:, : len(gate)], dboth[:, len(gate) :])
        learn(4, dgate_up[0], normed)
        learn(5, dgate_up[1], normed)
        learn(6, dy, gated)
        del gated
        dnormed = self._sum(dgate_up, (gate, up))
        dnormed = weights.add_input_grad(5, dgate_up[1], weights.add_input_grad(4, dgate_up[0], dnormed))
        del dboth, dgate_up, normed
        dx = dy.clone()
        small: list[Tensor | None] = [None, self.native.gradients.rms_norm(dx, middle, norms[1], dnormed, self.eps)]
        learn(3, dx, selection.gather_outputs(mixed))
        dbias = [dx.sum(0)] if weights.biases[3] is not None else []
        rotated = self.native.rotary(qkv, head_norms, *angles, self.heads)
        dmixed = selection.scatter_output_grads(weights.add_input_grad(3, dx, multiply(dx, o)), len(qkv))
        dqkv = self.native.gradients.attention(dmixed, mixed, normaliser, rotated, qkv, layout.spans, self.heads, self.window)
        dheads = self.native.gradients.rotary(dqkv, qkv, head_norms, *angles, self.heads)
        parts = self._parts(selection.sum_input_grads(dqkv, len(x)))
        dx = selection.sum_input_grads(selection.scatter_output_grads(dx, len(qkv)), len(x))
        normed = self.native.rms_norm(x, norms[0], self.eps)
        dnormed = self._sum(parts, (q, k, v))
        for i, part in enumerate(parts):
            learn(i, part, normed)
            weights.add_input_grad(i, part, dnormed)
        small[0] = self.native.gradients.rms_norm(dx, x, norms[0], dnormed, self.eps)
        heads = list(dheads) if self.has_head_norms else []
        first = [parts[i].sum(0) for i in self.biased if i < 3]
        return dx, [*matrices, *small, *heads, *first, *dbias, *itertools.chain(*(pairs[i] for i in self.adapters))]

    def _sum(self, parts: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
        """Return the sum of the products parts[i] · matrices[i]."""
        multiply = self.native.products.of
        total = multiply(parts[0], matrices[0])
        for part, matrix in zip(parts[1:], matrices[1:], strict=True):
            multiply(part, matrix, total, base=total)
        return total

    def _parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        wide, narrow = self.heads.queries * self.heads.dim, self.heads.keys * self.heads.dim
        parts: tuple[Tensor, ...] = qkv.split([wide, narrow, narrow], dim=1)
        return parts


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a linear layer: peft's module, the adapter's name in it, and the weights (A, B)."""

    module: Any
    name: str
    weights: tuple[nn.Parameter, nn.Parameter]


def _split_adapter(child: Any) -> tuple[nn.Linear, Adapter | None]:
    """Return (the linear layer of a module, the LoRA adapter on it or None).

    Raises `Unsupported` unless the module is a linear layer, or peft's LoRA layer without dropout or variants.
    """
    if type(child) in (nn.Linear, CodedLinear):
        return child, None
    kind = f"{type(child).__module__}.{type(child).__name__}"
    if kind != "peft.tuners.lora.layer.Linear":  # compared by name, so that peft is imported only with an adapter
        raise Unsupported(f"{kind_of(child)} is in the place of a linear layer")
    if type(child.base_layer) not in (nn.Linear, CodedLinear) or child.fan_in_fan_out:
        raise Unsupported(f"LoRA is applied to {kind_of(child.base_layer)}, not to a linear layer")
    if len(child.active_adapters) != 1 or child.merged or child.active_adapters[0] not in child.lora_A:
        raise Unsupported("a linear layer has several adapters, or one that is merged or inactive")
    (name,) = child.active_adapters
    a, b = child.lora_A[name], child.lora_B[name]
    if name in child.lora_variant or b.bias is not None:
        raise Unsupported("its adapter is a variant of LoRA")
    if type(child.lora_dropout[name]) is not nn.Identity:
        raise Unsupported("its adapter has dropout")
    return child.base_layer, Adapter(child, name, (a.weight, b.weight))
