"""One layer of the fused decoder: forward, and backward by hand.

The forward keeps what the backward can't recompute row by row: the residual stream at the two norms, the projections, attention's
output and normaliser. LoRA's share of a linear layer is computed beside it, so that an adapter that is switched off leaves the
model it started from, and half-precision weights do not swallow what it has learned.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from psigrad.models.attention import FusedLayout, PackedLayout
from psigrad.models.fused.activation_cache import Version, version_of
from psigrad.models.fused.packed_weights import PackedWeights
from psigrad.native.kernels import Heads, Kernels
from psigrad.native.processor import fast_bfloat16
from psigrad.native.products import TurnedMatrix

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
# Those of the seven that are applied to the same rows, to stand side by side in the result.
_TOGETHER = ((0, 1, 2), (3,), (4, 5), (6,))
_QKV, _OUT, _GATE_UP, _DOWN = range(4)


class Unsupported(Exception):
    """Why a model can't be fused."""


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """bfloat16 weights are multiplied in bfloat16 where the processor gains by it, else in float32."""
    return torch.bfloat16 if stored == torch.bfloat16 and fast_bfloat16() else torch.float32


class Weights:
    """Tensors in the type that is computed in; each that is stored in another is cast once for every value it takes."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.given = list(given)
        self.dtype = compute_dtype(self.given[0].dtype)
        self._marks: list[Version | None] = [None] * len(self.given)
        self._cast: list[Tensor] = [p.detach() for p in self.given]

    def now(self) -> list[Tensor]:
        """The tensors, in the order they were given in."""
        if all(p.dtype == self.dtype for p in self.given):
            return self.given
        for i, p in enumerate(self.given):
            if self._marks[i] != (mark := version_of(p)):
                self._marks[i], self._cast[i] = mark, p.detach().to(self.dtype)
        return self._cast


@dataclass(frozen=True)
class LoraDelta:
    """What LoRA adds to a linear layer: s·x·Aᵀ·Bᵀ with A [r, in] and B [out, r] (Hu et al. 2021, arXiv:2106.09685)."""

    a: Tensor
    b: Tensor
    scale: float

    def add(self, y: Tensor, x: Tensor) -> None:
        """y ← y + s·x·Aᵀ·Bᵀ."""
        y.addmm_(x @ self.a.t(), self.b.t(), alpha=self.scale)

    def flow(self, dx: Tensor, dy: Tensor) -> None:
        """dx ← dx + s·dy·B·A."""
        dx.addmm_(dy @ self.b, self.a, alpha=self.scale)

    def gradients(self, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Those of A and B."""
        return ((dy @ self.b).t() @ x).mul_(self.scale), (dy.t() @ (x @ self.a.t())).mul_(self.scale)


@dataclass(frozen=True)
class RowSelection:
    """What the rows at a layer's two ends stand for.

    `enter` [S] is each token's row of x: before the first layer a token is but its id, so equal tokens share one. `leave` [W] are
    the tokens whose output is wanted, each once: behind the last layer those that predict a target; of the others it needs the
    keys and values alone. None where each token has a row.
    """

    enter: Tensor | None = None
    leave: Tensor | None = None

    def spread(self, x: Tensor) -> Tensor:
        """A row for every token."""
        return x if self.enter is None else x.index_select(0, self.enter)

    def summed(self, dx: Tensor, count: int) -> Tensor:
        """The gradient of `count` rows from that of the tokens'."""
        return dx if self.enter is None else dx.new_zeros(count, dx.shape[1]).index_add_(0, self.enter, dx)

    def wanted(self, x: Tensor) -> Tensor:
        """The rows of the wanted tokens."""
        return x if self.leave is None else x.index_select(0, self.leave)

    def among(self, dx: Tensor, tokens: int) -> Tensor:
        """The gradient of all tokens' rows from that of the wanted ones, which may be written to."""
        return dx if self.leave is None else dx.new_zeros(tokens, dx.shape[1]).index_copy_(0, self.leave, dx)


@dataclass(frozen=True)
class Unpacked:
    """A layer's weights in the type that is computed in; of each of its seven matrices there may be a share."""

    matrices: list[Tensor]
    norms: list[Tensor]
    head_norms: tuple[Tensor, Tensor] | None
    biases: list[Tensor | None]
    shares: list[LoraDelta | None]
    native: Kernels
    turned: list[TurnedMatrix] | None = None
    """The matrices once more, those of each of `_TOGETHER` as one."""

    def apply(self, group: int, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """out ← the matrices of a group applied to x, side by side, with their biases and shares, and the residual stream."""
        members = _TOGETHER[group]
        if self.turned is not None:
            self.native.products.through(x, self.turned[group], out, residual)
            if self.plain:
                return out
        parts = out.split([len(self.matrices[i]) for i in members], dim=1)
        for i, part in zip(members, parts, strict=True):
            bias, share = self.biases[i], self.shares[i]
            if self.turned is None:
                self.native.products.linear(x, self.matrices[i], part, bias if residual is None else residual)
            if bias is not None and (residual is not None or self.turned is not None):
                part += bias
            if share is not None:
                share.add(part, x)
        return out

    @property
    def plain(self) -> bool:
        """Whether the matrices are all."""
        return not any(x is not None for x in (*self.biases, *self.shares))

    def flow(self, i: int, dy: Tensor, dx: Tensor) -> Tensor:
        """dx, with what the i-th matrix's share adds to it."""
        if (share := self.shares[i]) is not None:
            share.flow(dx, dy)
        return dx


class Layer:
    """One decoder layer over rows [S, E]."""

    def __init__(self, index: int, module: Any, heads: Heads, native: Kernels) -> None:
        attention, mlp = module.self_attn, module.mlp
        modules = [getattr(attention, name) for name in _ATTENTION] + [getattr(mlp, name) for name in _FEED_FORWARD]
        linear, adapters = zip(*map(_taken_apart, modules), strict=True)
        if any(child.bias is not None for child in linear[4:]):
            raise Unsupported("its feed-forward layers have biases")
        self.index, self.heads, self.native = index, heads, native
        # Mistral reads its window from the configuration, Qwen keeps one per layer, and Llama has none, whatever its file says
        windowed = attention.config if type(attention).__name__ == "MistralAttention" else attention
        self.window = int(getattr(windowed, "sliding_window", None) or 0)
        norms = [module.input_layernorm, module.post_attention_layernorm]
        self.has_head_norms = hasattr(attention, "q_norm")
        if self.has_head_norms:
            norms += [attention.q_norm, attention.k_norm]
        self.biased = [i for i, child in enumerate(linear[:4]) if child.bias is not None]
        given = [child.weight for child in linear] + [norm.weight for norm in norms] + [linear[i].bias for i in self.biased]
        self.adapters = {i: adapter for i, adapter in enumerate(adapters) if adapter is not None}
        given += [weight for adapter in self.adapters.values() for weight in adapter.weights]
        self.weights = Weights(given)
        self.eps = float(norms[0].variance_epsilon)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.weights.dtype

    @property
    def adapted(self) -> bool:
        """Whether it has adapters and they are not switched off. Raises `ValueError` where they are no longer those that it was
        made with.
        """
        for adapter in self.adapters.values():
            if adapter.module.merged or adapter.module.active_adapters != [adapter.name]:
                raise ValueError(
                    f"The adapter {adapter.name!r} has been merged into the weights or another was made active, which the fused "
                    "decoder does not follow; undo it, or set model.decoder = None."
                )
        return any(not adapter.module.disable_adapters for adapter in self.adapters.values())

    def unpacked(self, adapted: bool, panels: PackedWeights | None = None, rows: int = 0) -> Unpacked:
        """The weights of now, turned where `panels` find it worth it for so many rows; without shares unless `adapted`."""
        now = iter(self.weights.now())
        matrices, norms = [next(now) for _ in range(7)], [next(now), next(now)]
        head_norms = (next(now), next(now)) if self.has_head_norms else None
        biases: list[Tensor | None] = [None] * 7
        for i in self.biased:
            biases[i] = next(now)
        shares: list[LoraDelta | None] = [None] * 7
        if adapted:
            for i, adapter in self.adapters.items():
                shares[i] = LoraDelta(next(now), next(now), float(adapter.module.scaling[adapter.name]))
        turned = None
        if panels is not None:
            groups = [[matrices[i] for i in group] for group in _TOGETHER]
            turned = panels.of(self.index, rows, self.weights.given[:7], groups, self.native.products)
        return Unpacked(matrices, norms, head_norms, biases, shares, self.native, turned)

    def addresses(self, panels: PackedWeights, rows: int) -> list[int] | None:
        """Those of its weights without adapters, as `Kernels.decode_layers` takes them, for so many rows; None where its matrices
        are not turned.
        """
        weights = self.unpacked(False, panels, rows)
        if weights.turned is None:
            return None
        heads = [0, 0] if weights.head_norms is None else [x.data_ptr() for x in weights.head_norms]
        return [*(x.data_ptr() for x in weights.norms), *heads, *(x.panels.data_ptr() for x in weights.turned), self.window]

    @property
    def kinds(self) -> tuple[tuple[int, torch.dtype], ...]:
        """Width and type of what `forward` makes of a row."""
        heads, width, inner = self.heads, self.weights.given[3].shape[0], self.weights.given[4].shape[0]
        own = [(n, self.dtype) for n in (width, heads.row, heads.queries * heads.dim, width, 2 * inner)]
        return (*own[:3], (heads.queries, torch.float32), *own[3:])

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], layout: FusedLayout, adapted: bool, ends: RowSelection
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The layer's output, and what `backward` needs besides x: three of every token, then two of the wanted ones."""
        weights = self.unpacked(adapted, layout.panels, len(x))
        normed = self.native.rms_norm(x, weights.norms[0], self.eps)
        qkv = ends.spread(weights.apply(_QKV, normed, x.new_empty(len(x), self.heads.row)))
        rotated = self.native.rotary(qkv, weights.head_norms, *angles, self.heads)
        mixed, normaliser = layout.mix(self, rotated, qkv)
        stream = ends.wanted(ends.spread(x))
        middle = weights.apply(_OUT, ends.wanted(mixed), torch.empty_like(stream), residual=stream)
        normed = self.native.rms_norm(middle, weights.norms[1], self.eps)
        both = weights.apply(_GATE_UP, normed, x.new_empty(len(normed), 2 * len(weights.matrices[4])))
        y = weights.apply(_DOWN, self.native.swiglu(both), torch.empty_like(middle), residual=middle)
        return y, (qkv, mixed, normaliser, middle, both)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        kept: list[Tensor],
        angles: tuple[Tensor, Tensor],
        layout: PackedLayout,
        adapted: bool,
        learns: Sequence[bool],
        ends: RowSelection,
        spend: bool,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of x and of the weights that learn. The list `kept` is emptied, that each tensor may go when it has served;
        with `spend` they are written to as well.
        """
        weights, multiply = self.unpacked(adapted), self.native.products.of
        (q, k, v, o, gate, up, down), norms, head_norms = weights.matrices, weights.norms, weights.head_norms
        qkv, mixed, normaliser, middle, both = kept
        kept.clear()
        matrices: list[Tensor | None] = [None] * 7
        pairs: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * 7

        def learn(i: int, dy: Tensor, x: Tensor) -> None:
            matrices[i] = multiply(dy.t(), x) if learns[i] else None
            if (share := weights.shares[i]) is not None:
                pairs[i] = share.gradients(dy, x)

        dboth, gated = self.native.gradients.swiglu(both, weights.flow(6, dy, multiply(dy, down)), in_place=spend)
        del both
        normed = self.native.rms_norm(middle, norms[1], self.eps)
        halves = (dboth[:, : len(gate)], dboth[:, len(gate) :])
        learn(4, halves[0], normed)
        learn(5, halves[1], normed)
        learn(6, dy, gated)
        del gated
        dnormed = self._summed(halves, (gate, up))
        dnormed = weights.flow(5, halves[1], weights.flow(4, halves[0], dnormed))
        del dboth, halves, normed
        dx = dy.clone()
        small: list[Tensor | None] = [None, self.native.gradients.rms_norm(dx, middle, norms[1], dnormed, self.eps)]
        learn(3, dx, ends.wanted(mixed))
        dbias = [dx.sum(0)] if weights.biases[3] is not None else []
        rotated = self.native.rotary(qkv, head_norms, *angles, self.heads)
        dmixed = ends.among(weights.flow(3, dx, multiply(dx, o)), len(qkv))
        dqkv = self.native.gradients.attention(dmixed, mixed, normaliser, rotated, qkv, layout.spans, self.heads, self.window)
        dheads = self.native.gradients.rotary(dqkv, qkv, head_norms, *angles, self.heads)
        parts = self._parts(ends.summed(dqkv, len(x)))
        dx = ends.summed(ends.among(dx, len(qkv)), len(x))
        normed = self.native.rms_norm(x, norms[0], self.eps)
        dnormed = self._summed(parts, (q, k, v))
        for i, part in enumerate(parts):
            learn(i, part, normed)
            weights.flow(i, part, dnormed)
        small[0] = self.native.gradients.rms_norm(dx, x, norms[0], dnormed, self.eps)
        heads = list(dheads) if self.has_head_norms else []
        first = [parts[i].sum(0) for i in self.biased if i < 3]
        return dx, [*matrices, *small, *heads, *first, *dbias, *itertools.chain(*(pairs[i] for i in self.adapters))]

    def _summed(self, parts: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
        """Σ parts · matrices."""
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
    """Of a linear layer under LoRA: peft's module, the adapter's name in it, its A and B."""

    module: Any
    name: str
    weights: tuple[nn.Parameter, nn.Parameter]


def _taken_apart(child: Any) -> tuple[nn.Linear, Adapter | None]:
    """A linear layer and its adapter. Raises `Unsupported` where it is neither plain nor plain LoRA."""
    if type(child) is nn.Linear:
        return child, None
    kind = f"{type(child).__module__}.{type(child).__name__}"
    if kind != "peft.tuners.lora.layer.Linear":  # by name: who has no adapter need not import peft
        raise Unsupported(f"a {type(child).__name__} stands where a linear layer was expected")
    if type(child.base_layer) is not nn.Linear or child.fan_in_fan_out:
        raise Unsupported(f"LoRA is on a {type(child.base_layer).__name__}")
    if len(child.active_adapters) != 1 or child.merged or child.active_adapters[0] not in child.lora_A:
        raise Unsupported("it has more adapters than one, or one that is merged or not at work")
    (name,) = child.active_adapters
    a, b = child.lora_A[name], child.lora_B[name]
    if name in child.lora_variant or b.bias is not None:
        raise Unsupported("its adapter is a variant of LoRA")
    if type(child.lora_dropout[name]) is not nn.Identity:
        raise Unsupported("its adapter has dropout")
    return child.base_layer, Adapter(child, name, (a.weight, b.weight))
