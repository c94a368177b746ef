"""One layer of the fused decoder, forward and backward.

LoRA's matrices are not merged into the layer's matrices. In half precision, merging would round away small updates.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from psigrad.kernels.codes import CodedMatrix
from psigrad.kernels.kernels import Angles, Heads, Kernels
from psigrad.kernels.processor import fast_bfloat16
from psigrad.language.models.attention import FusedLayout, PackedLayout
from psigrad.language.models.coded_linear import CodedLinear, unpack
from psigrad.language.models.fused.caches import PackedWeights, Version, version_of
from psigrad.language.models.fused.families import (
    Family,
    LayerWeights,
    LoraDelta,
    Unsupported,
    at,
    eps_of,
    find,
    first_of,
    split_adapter,
)
from psigrad.language.models.packing import RowSelection

# The matrices are in four groups by their input. Each group has one of these lists of names. Its outputs are stored side by side.
_ATTENTION = ((("q_proj", "k_proj", "v_proj"), ("qkv_proj",)), (("o_proj",), ("out_proj",)))
_GATES = (("gate_proj", "up_proj"), ("gate_up_proj",), ("input_linear",), ("w1", "w3"))
_FEED_FORWARD = (_GATES, (("down_proj",), ("output_linear",), ("w2",)))
_QKV, _OUT, _GATE_UP, _DOWN, INPUT_GATE, INPUT_PROJECTION = range(6)
# The slice of `Layer.addresses` that has the ranks of the adapters.
RANKS = slice(-5, -1)


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """Return a layer's compute dtype: bfloat16 if the `stored` weights are bfloat16 and the CPU is fast with it, else float32."""
    return torch.bfloat16 if stored == torch.bfloat16 and fast_bfloat16() else torch.float32


class Weights:
    """Weights, cast to a layer's compute dtype. Quantised matrices are not cast.

    Without `exact`, a cast copy is cached until its weight changes. With `exact`, weights are cast to float32 at each use.
    """

    def __init__(self, given: Sequence[Tensor], exact: bool = False) -> None:
        self.given, self.exact = list(given), exact
        stored = next(p.dtype for p in self.given if p.is_floating_point())
        self.dtype = torch.float32 if exact else compute_dtype(stored)
        self._versions: list[Version | None] = [None] * len(self.given)
        self._cast: list[Tensor] = [p.detach() for p in self.given]

    def now(self) -> list[Tensor]:
        """Return the current weights in the compute dtype, in the order in which the constructor got them."""
        if all(p.dtype in (self.dtype, torch.uint8) for p in self.given):
            return self.given
        if self.exact:
            return [p.detach().to(self.dtype) if p.is_floating_point() else p for p in self.given]
        for i, p in enumerate(self.given):
            if p.is_floating_point() and self._versions[i] != (version := version_of(p)):
                self._versions[i], self._cast[i] = version, p.detach().to(self.dtype)
        return self._cast


class PassArguments(NamedTuple):
    """The arguments of a forward pass, the same for all layers.

    - `angles`, `keys` (keys and values that later layers reuse) and `key_gradients` are indexed by `Layer.order`.
    - `adapted` is True if LoRA is active. `balanced` is True if the loss includes the routers' load-balancing loss.
    - `inputs[i]` is layer i's extra input (Gemma 4). `tokens` maps tokens to the rows of these inputs.
    - `ready[i]` are the current weights of layer i. If `ready` is None, the layers read their weights.
    """

    angles: Sequence[Angles]
    layout: FusedLayout
    adapted: bool
    keys: dict[int, Tensor]
    key_gradients: dict[int, Tensor]
    inputs: Sequence[Tensor] = ()
    tokens: RowSelection = RowSelection()
    ready: Sequence[LayerWeights] | Mapping[int, LayerWeights] | None = None
    balanced: bool = False


class Layer:
    """One fused decoder layer over rows [S, E]. `window` is its sliding window in tokens; 0: no window.

    Formula: h = x + r·m₁(mixer(n₁(x))),  y = h + r·m₂(down(act(gate(n₂(h))) · up(n₂(h)))). Without a feed-forward part, y = h.
    n and m are norms, and r is the number `residual`. The mixer is attention; subclasses replace it. `order` is the index of the
    keys and values that attention uses.
    """

    order = -1
    # The names of the mixer's module, of the matrices before and after it, and of its other weights. Some names are alternatives.
    mixer: tuple[str, ...] = ("self_attn", "mixer")
    projections: Sequence[Sequence[Sequence[str]]] = _ATTENTION
    # The same names for the feed-forward layer. `last` names the matrices at the layer's end. `sparse` is True if it has experts.
    feed_forward: Sequence[Sequence[Sequence[str]]] = _FEED_FORWARD
    feed_others: Sequence[str] = ()
    last: Sequence[str] = ()
    sparse = False
    others: Sequence[str] = ("q_norm.weight", "q_layernorm.weight", "k_norm.weight", "k_layernorm.weight")

    def __init__(
        self, index: int, module: Any, heads: Heads, family: Family, config: Any, native: Kernels, exact: bool = False
    ) -> None:
        mixer, mlp = (first_of(module, names) for names in (self.mixer, ("mlp", "shared_mlp", "feed_forward")))
        has_experts = hasattr(mixer if mlp is None else mlp, "experts")
        if getattr(module, "block_sparse_moe", None) is not None or has_experts != self.sparse:
            raise Unsupported("the model has experts")
        self.feeds, feed = mlp is not None, [] if mlp is None else self.feed_forward
        groups = [find(mixer, names) for names in self.projections] + [find(mlp, names) for names in feed]
        groups += [find(module, ((name,),)) for name in self.last if hasattr(module, name)]
        ends = [0, *itertools.accumulate(map(len, groups))]
        self.groups = [tuple(range(a, b)) for a, b in itertools.pairwise(ends)]
        linear, adapters = zip(*map(split_adapter, itertools.chain(*groups)), strict=True)
        if any(child.bias is not None for child in linear[ends[_GATE_UP] :]):
            raise Unsupported("feed-forward layers have biases")
        self.index, self.heads, self.native = index, heads, native
        self.window, self.gelu = family.window(config, index) or 0, family.gelu
        self.residual = float(getattr(module, "residual_multiplier", 1.0))
        norms: list[Any] = [name and getattr(module, name, None) for name in (*family.before, *family.after)]
        self._norms = [None if isinstance(norm, nn.Identity) else norm for norm in norms]
        self.eps = next(eps_of(norm) for norm in self._norms if norm is not None)
        self.coded = {i: child.matrix for i, child in enumerate(linear) if isinstance(child, CodedLinear)}
        self.biased = [i for i, child in enumerate(linear) if child.bias is not None]
        self.adapters = {i: adapter for i, adapter in enumerate(adapters) if adapter is not None}
        self._linear, self._mixer, self._mlp = linear, mixer, mlp
        self.others = [path for path in self.others if at(mixer, path) is not None]
        self.row, self.width = (sum(linear[i].out_features for i in self.groups[group]) for group in (_QKV, _OUT))
        self.weights = Weights(self._read_weights(), exact)

    def _read_weights(self) -> list[Tensor]:
        given = [child.weight for child in self._linear] + [norm.weight for norm in self._norms if norm is not None]
        given += [at(self._mixer, path) for path in self.others] + [at(self._mlp, path) for path in self.feed_others]
        biases = [self._linear[i].bias for i in self.biased]
        return given + biases + [weight for adapter in self.adapters.values() for weight in adapter.weights]

    def reread(self) -> None:
        """Read the parameters of transformers' modules again. A sharded model has new parameter tensors in each pass."""
        self.weights = Weights(self._read_weights())

    @property
    def dtype(self) -> torch.dtype:
        """The layer's compute dtype."""
        return self.weights.dtype

    @property
    def adapted(self) -> bool:
        """True if LoRA adapters of the layer are enabled. Raises `ValueError` if one is merged or not the only active adapter."""
        for adapter in self.adapters.values():
            if adapter.module.merged or adapter.module.active_adapters != [adapter.name]:
                raise ValueError(
                    f"The adapter {adapter.name!r} is merged into the weights, or another adapter is active. The fused decoder "
                    "supports neither. Unmerge this adapter and make it active, or set model.decoder = None."
                )
        return any(not adapter.module.disable_adapters for adapter in self.adapters.values())

    def current_weights(self, adapted: bool, packed_weights: PackedWeights | None = None) -> LayerWeights:
        """Return the current weights, with LoRA terms if `adapted`. They are packed if the cache `packed_weights` has room."""
        now, count = iter(self.weights.now()), len(self._linear)
        matrices: list[Any] = [self.coded.get(i, next(now)) for i in range(count)]
        norms = [None if norm is None else next(now) for norm in self._norms]
        mixer, feed = [next(now) for _ in self.others], [next(now) for _ in self.feed_others]
        biases: list[Tensor | None] = [None] * count
        for i in self.biased:
            biases[i] = next(now)
        lora: list[LoraDelta | None] = [None] * count
        if adapted:
            for i, adapter in self.adapters.items():
                scale = float(adapter.module.scaling[adapter.name])
                lora[i] = LoraDelta(next(now), next(now).detach() * scale, scale, self.native.products)
        plain = self._expand(LayerWeights(self.groups, matrices, norms, mixer, biases, lora, self.native, feed=feed))
        made, groups, products = None, range(len(plain.groups)), self.native.products
        if packed_weights is not None and self.coded and packed_weights.dequantises:
            made = packed_weights.of((self.index, adapted, "dequantised"), self.weights.given,
                                     lambda: [self._dequantise(plain).factors(i) for i in groups], products)  # fmt: skip
        if packed_weights is not None and made is None:
            key = (self.index, adapted)
            made = packed_weights.of(key, self.weights.given, lambda: [plain.factors(i) for i in groups], products)
        if made is None and self.coded:
            plain = self._dequantise(plain)
        return plain if packed_weights is None else replace(plain, packed=made, decoding=True)

    def _dequantise(self, plain: LayerWeights) -> LayerWeights:
        """Return `plain` with its quantised matrices dequantised to the compute dtype."""
        return replace(plain, matrices=[unpack(x, self.dtype) if isinstance(x, CodedMatrix) else x for x in plain.matrices])

    def _expand(self, plain: LayerWeights) -> LayerWeights:
        """Return `plain` unchanged. Subclasses add the matrices that are not in linear layers, such as the experts'."""
        return plain

    def addresses(self, packed_weights: PackedWeights, adapted: bool) -> list[int] | None:
        """Return the addresses of the layer's weights for `Kernels.decode_layers`; None if that kernel cannot run the layer."""
        weights = self.current_weights(adapted, packed_weights)
        if weights.packed is None or weights.packed[_OUT].bias is not None:
            return None
        heads = [x.data_ptr() for x in weights.mixer] or [0, 0]
        norms, bias = [0 if x is None else x.data_ptr() for x in weights.norms], weights.packed[_QKV].bias
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
    def inner(self) -> int:
        """The width of the feed-forward layer."""
        return int(self._linear[self.groups[_DOWN][0]].in_features)

    @property
    def kinds(self) -> tuple[tuple[int, torch.dtype], ...]:
        """(width, dtype) of each tensor that `forward` returns: the output, then the tensors for `backward`."""
        after = [self.width for norm in self._norms[2:] if norm is not None]
        own = [(n, self.dtype) for n in (self.width, self.row, self._linear[self.groups[_OUT][0]].in_features, *after)]
        return (*own[:3], (self.scores, torch.float32), *(self.feed_kinds if self.feeds else ()), *own[3:])

    @property
    def feed_kinds(self) -> list[tuple[int, torch.dtype]]:
        """(width, dtype) of the tensors that `feed` returns for `feed_gradient`."""
        return [(self.width, self.dtype), (2 * self.inner, self.dtype)]

    def forward(self, x: Tensor, how: PassArguments, selection: RowSelection) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return (the layer's output [W, E], the tensors that `backward` needs besides x). `selection` picks the W output tokens.

        The first three tensors have a row for each of S tokens, the others a row per output token.
        """
        weights = self.current_weights(how.adapted, how.layout.packed_weights) if how.ready is None else how.ready[self.index]
        plain: list[Tensor] = []
        row = selection.gather_inputs(weights.apply(_QKV, self._norm(x, weights.norms[0]), x.new_empty(len(x), self.row)))
        mixed, normaliser = self.mix(row, weights.mixer, how)
        out = selection.gather_outputs(self.gate(row, mixed))
        middle = self._join(_OUT, weights, out, selection.gather_outputs(selection.gather_inputs(x)), plain)
        y, own = self.feed(middle, weights, plain) if self.feeds else (middle, ())
        return y, (row, mixed, normaliser, *own, *plain)

    def _join(self, group: int, weights: LayerWeights, x: Tensor, base: Tensor, plain: list[Tensor]) -> Tensor:
        """Return base + r·m(p) with p = x·Wᵀ and W the matrix of `group`. If there is a norm m, append p to `plain`."""
        norm, out = weights.norms[2 + group // 2], torch.empty_like(base)
        if norm is None and self.residual == 1.0:
            return weights.apply(group, x, out, residual=base)
        weights.apply(group, x, out)
        if norm is not None:
            plain.append(out)
        return self.native.products.add(base, self._norm(out, norm), self.residual)

    def feed(self, middle: Tensor, weights: LayerWeights, plain: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return (the layer's output, tensors for `feed_gradient`) from the residual stream `middle`. For `plain` see `_join`."""
        normed = self._norm(middle, weights.norms[1])
        both = weights.apply(_GATE_UP, normed, middle.new_empty(len(normed), 2 * self.inner))
        return self._join(_DOWN, weights, self.native.gated(both, self.gelu), middle, plain), (middle, both)

    @property
    def scores(self) -> int:
        """The number of log-sum-exps that `mix` returns per token: one per query head."""
        return self.heads.queries

    def mix(self, row: Tensor, others: Sequence[Tensor], how: PassArguments) -> tuple[Tensor, Tensor]:
        """Return the mixer's output [S, …] and the log-sum-exps of its scores [S, `scores`], from its projections `row` [S, …].

        In this class, `row` is [q|k|v], and `others` are the weights of the query and key norms.
        """
        rotated = self.native.rotary(row, others, how.angles[self.order], self.heads)
        return how.layout.mix(self, rotated, row)

    def gate(self, row: Tensor, mixed: Tensor) -> Tensor:
        """Return the input of the output projection. Here it is `mixed`. Some subclasses multiply it by a gate from `row`."""
        return mixed

    def mix_gradient(
        self, dout: Tensor, row: Tensor, mixed: Tensor, normaliser: Tensor, others: Sequence[Tensor], how: PassArguments
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return (the gradient of `row`, the gradients of `others`) from `dout`, the gradient of the result of `gate`.

        `mixed` and `normaliser` are the two results of `mix`.
        """
        angles, layout = how.angles[self.order], how.layout
        assert isinstance(layout, PackedLayout)
        rotated = self.native.rotary(row, others, angles, self.heads)
        drow = self.native.gradients.attention(dout, mixed, normaliser, rotated, row, layout.spans, self.heads, self.window)
        return drow, self.native.gradients.rotary(drow, row, others, angles, self.heads)[: len(others)]

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
        """Return (the gradient of x, a list of the gradients of `weights`). A frozen matrix has None in place of a gradient.

        `learns[i]` is True if weight i needs a gradient. `kept` has the tensors from `forward`; the list is emptied.
        If `overwrite` is True, gradients may overwrite the tensors.
        """
        weights = self.current_weights(how.adapted) if how.ready is None else how.ready[self.index]
        made = WeightGradients(self, weights, learns)
        row, mixed, normaliser = (kept.pop(0) for _ in range(3))
        dx = self.feed_gradient(dy, kept, made, overwrite) if self.feeds else dy.clone()
        dout = made.before_residual(0, dx, kept)
        made.learn(_OUT, [dout], selection.gather_outputs(self.gate(row, mixed)))
        dmixed = selection.scatter_output_grads(weights.input_grad(_OUT, [dout]), len(row))
        drow, dothers = self.mix_gradient(dmixed, row, mixed, normaliser, weights.mixer, how)
        parts = self._split(_QKV, selection.sum_input_grads(drow, len(x)))
        dx = selection.sum_input_grads(selection.scatter_output_grads(dx, len(row)), len(x))
        made.learn(_QKV, parts, self._norm(x, weights.norms[0]))
        made.add_through_norm(0, dx, x, weights.input_grad(_QKV, parts))
        return dx, made.in_order(dothers)

    def feed_gradient(self, dy: Tensor, kept: list[Tensor], made: WeightGradients, overwrite: bool) -> Tensor:
        """Return the gradient of `feed`'s input from the gradient `dy` of its output. Add the gradients of the weights to `made`.

        For `kept` and `overwrite` see `backward`.
        """
        middle, both, weights = kept.pop(0), kept.pop(0), made.weights
        dout = made.before_residual(1, dy, kept)
        dboth, gated = self.native.gradients.gated(both, weights.input_grad(_DOWN, [dout]), self.gelu, in_place=overwrite)
        del both
        parts = self._split(_GATE_UP, dboth)
        made.learn(_GATE_UP, parts, self._norm(middle, weights.norms[1]))
        made.learn(_DOWN, [dout], gated)
        del gated, dout
        dnormed = weights.input_grad(_GATE_UP, parts)
        del dboth, parts
        dx = dy.clone()
        made.add_through_norm(1, dx, middle, dnormed)
        return dx

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return the RMS norm of x, or x itself if `weight` is None."""
        return x if weight is None else self.native.rms_norm(x, weight, self.eps, self.heads.offset)

    def _split(self, group: int, rows: Tensor) -> tuple[Tensor, ...]:
        """Split `rows` [S, outputs of all matrices of a group] into one tensor per matrix. `group` is an index, such as _QKV."""
        return tuple(rows.split([self._linear[i].out_features for i in self.groups[group]], dim=1))


class WeightGradients:
    """The gradients of a layer's weights, collected during its backward pass. The attributes are named as in `LayerWeights`."""

    def __init__(self, layer: Layer, weights: LayerWeights, learns: Sequence[bool]) -> None:
        self.layer, self.weights, self.learns = layer, weights, learns
        count = len(weights.matrices)
        self.matrices: list[Tensor | None] = [None] * count
        self.biases: list[Tensor | None] = [None] * count
        self.lora: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * count
        self.norms: list[Tensor | None] = [None] * len(weights.norms)
        self.feed: Sequence[Tensor | None] = ()

    def learn(self, group: int, parts: Sequence[Tensor], x: Tensor) -> None:
        """Store the gradients of the weights in `group`. `parts` has the gradient of each matrix's output, and x is the input."""
        for i, dy in zip(self.layer.groups[group], parts, strict=True):
            self.matrices[i] = self.layer.native.products.of(dy.t(), x) if self.learns[i] else None
            self.biases[i] = None if self.weights.biases[i] is None else dy.sum(0)
            if (delta := self.weights.lora[i]) is not None:
                self.lora[i] = delta.gradients(dy, x)

    def add_through_norm(self, which: int, dx: Tensor, x: Tensor, dnormed: Tensor) -> None:
        """Compute the gradient of x from that of norm(x), `dnormed`; add it to `dx`. Store the gradient of the norm's weight."""
        if self.weights.norms[which] is None:
            dx += dnormed
        else:
            self.norms[which] = self._norm(which, dx, x, dnormed)

    def before_residual(self, which: int, dy: Tensor, plain: list[Tensor]) -> Tensor:
        """Return the gradient of p in `Layer._join` from the gradient `dy` of its result.

        If there is a norm, p is popped from `plain`.
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
        """Return all gradients in the order of `Layer.weights`. `others` has the gradients of the weights in `Layer.others`."""
        norms = [one for one, weight in zip(self.norms, self.weights.norms, strict=True) if weight is not None]
        biases = [self.biases[i] for i in self.layer.biased]
        pairs = itertools.chain(*(self.lora[i] for i in self.layer.adapters))
        return [*self.matrices[: len(self.layer._linear)], *norms, *others, *self.feed, *biases, *pairs]
