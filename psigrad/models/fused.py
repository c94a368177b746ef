"""The decoder of Llama's kin (Llama, Mistral, Qwen2, Qwen3) on a CPU: matrix products by PyTorch, all between by our kernels.

The forward keeps of each layer what the backward can't recompute row by row: the residual stream at its two norms, the
projections, attention's output and normaliser. transformers' own modules are the oracle and the fallback: a model of another
kind, on another device, in float64 or under LoRA runs through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from psigrad.models.attention import FusedLayout, PackedLayout
from psigrad.models.kept import Kept, Known
from psigrad.native.kernels import Heads, Kernels, kernels

KINDS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


class Unlike(Exception):
    """Why a model can't be fused."""


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """bfloat16 weights are multiplied in bfloat16 where the processor gains by it, else in float32.

    Intel's avx512_bf16 without AMX makes no more products per cycle than float32, and oneDNN's bfloat16 was two to three times
    slower there than MKL's float32.
    """
    return torch.bfloat16 if stored == torch.bfloat16 and _fast_bfloat16() else torch.float32


def _fast_bfloat16() -> bool:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in info or ("AuthenticAMD" in info and "avx512_bf16" in info)


class Weights:
    """Tensors in the type that is computed in; half-precision ones are cast once for each value they take."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.given = list(given)
        self.dtype = compute_dtype(self.given[0].dtype)
        self._marks: list[tuple[int, int]] = []
        self._cast: list[Tensor] = []

    def now(self) -> list[Tensor]:
        """The tensors, in the order they were given in."""
        if all(p.dtype == self.dtype for p in self.given):
            return self.given
        marks = [(p.data_ptr(), p._version) for p in self.given]
        if self._marks != marks:
            self._marks, self._cast = marks, [p.detach().to(self.dtype) for p in self.given]
        return self._cast


class Layer:
    """One decoder layer over rows [S, E]."""

    def __init__(self, index: int, module: Any, heads: Heads, native: Kernels) -> None:
        attention, mlp = module.self_attn, module.mlp
        linear = [getattr(attention, name) for name in _ATTENTION] + [getattr(mlp, name) for name in _FEED_FORWARD]
        for child in linear:
            if type(child) is not nn.Linear:
                raise Unlike(f"a {type(child).__name__} stands where a linear layer was expected")
        if any(child.bias is not None for child in linear[4:]):
            raise Unlike("its feed-forward layers have biases")
        self.index, self.heads, self.native = index, heads, native
        # Mistral reads its window from the configuration, Qwen keeps one per layer
        self.window = int(getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)) or 0)
        norms = [module.input_layernorm, module.post_attention_layernorm]
        self.has_head_norms = hasattr(attention, "q_norm")
        if self.has_head_norms:
            norms += [attention.q_norm, attention.k_norm]
        self.biased = [i for i, child in enumerate(linear[:4]) if child.bias is not None]
        given = [child.weight for child in linear] + [norm.weight for norm in norms] + [linear[i].bias for i in self.biased]
        self.weights = Weights(given)
        self.eps = float(norms[0].variance_epsilon)

    def unpacked(self) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor] | None, list[Tensor | None]]:
        """The seven matrices, the two norms, the norms of the heads, the biases of the first four."""
        now = self.weights.now()
        after = 11 if self.has_head_norms else 9
        biases: list[Tensor | None] = [None] * 4
        for place, bias in zip(self.biased, now[after:], strict=True):
            biases[place] = bias
        return now[:7], now[7:9], (now[9], now[10]) if self.has_head_norms else None, biases

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], layout: FusedLayout) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The layer's output, and what `backward` needs besides x."""
        (q, k, v, o, gate, up, down), norms, head_norms, biases = self.unpacked()
        normed = self.native.rms_norm(x, norms[0], self.eps)
        qkv = x.new_empty(len(x), self.heads.row)
        for part, weight, bias in zip(self._parts(qkv), (q, k, v), biases, strict=False):
            _linear(normed, weight, bias, part)
        rotated = self.native.rotary(qkv, head_norms, *angles, self.heads)
        mixed, normaliser = layout.mix(self, rotated, qkv)
        middle = torch.addmm(x, mixed, o.t())
        if biases[3] is not None:
            middle += biases[3]
        normed = self.native.rms_norm(middle, norms[1], self.eps)
        both = x.new_empty(len(x), 2 * len(gate))
        torch.mm(normed, gate.t(), out=both[:, : len(gate)])
        torch.mm(normed, up.t(), out=both[:, len(gate) :])
        return torch.addmm(middle, self.native.swiglu(both), down.t()), (middle, qkv, mixed, normaliser, both)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        kept: tuple[Tensor, ...],
        angles: tuple[Tensor, Tensor],
        layout: PackedLayout,
        learns: Sequence[bool],
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of x and of the weights that learn."""
        (q, k, v, o, gate, up, down), norms, head_norms, biases = self.unpacked()
        middle, qkv, mixed, normaliser, both = kept
        dboth, gated = self.native.swiglu_gradient(both, dy @ down)
        normed = self.native.rms_norm(middle, norms[1], self.eps)
        halves = (dboth[:, : len(gate)], dboth[:, len(gate) :])
        matrices = [None] * 4 + [d.t() @ normed if wanted else None for d, wanted in zip(halves, learns[4:6], strict=True)]
        matrices.append(dy.t() @ gated if learns[6] else None)
        del gated
        dnormed = torch.mm(halves[0], gate).addmm_(halves[1], up)
        dx = dy.clone()
        small: list[Tensor | None] = [None, self.native.rms_norm_gradient(dx, middle, norms[1], dnormed, self.eps)]
        matrices[3] = dx.t() @ mixed if learns[3] else None
        dbias = [dx.sum(0)] if biases[3] is not None else []
        rotated = self.native.rotary(qkv, head_norms, *angles, self.heads)
        spans = layout.spans
        dqkv = self.native.attention_gradient(dx @ o, mixed, normaliser, rotated, qkv, spans, self.heads, self.window)
        dheads = self.native.rotary_gradient(dqkv, qkv, head_norms, *angles, self.heads)
        parts = self._parts(dqkv)
        normed = self.native.rms_norm(x, norms[0], self.eps)
        matrices[:3] = [d.t() @ normed if wanted else None for d, wanted in zip(parts, learns[:3], strict=True)]
        dnormed = torch.mm(parts[0], q).addmm_(parts[1], k).addmm_(parts[2], v)
        small[0] = self.native.rms_norm_gradient(dx, x, norms[0], dnormed, self.eps)
        heads = list(dheads) if self.has_head_norms else []
        first = [parts[i].sum(0) for i in self.biased if i < 3]
        return dx, [*matrices, *small, *heads, *first, *dbias]

    def _parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        wide, narrow = self.heads.queries * self.heads.dim, self.heads.keys * self.heads.dim
        return qkv.split([wide, narrow, narrow], dim=1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class _Through(torch.autograd.Function):
    """A layer, with its gradient by hand."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        layout: PackedLayout,
        known: Known | None,
        *weights: Tensor,
    ) -> Tensor:
        y, kept = layer.forward(x, angles, layout) if known is None else known.layer(layer.index)
        ctx.layer, ctx.angles, ctx.layout = layer, angles, layout
        ctx.save_for_backward(x, *kept, *weights)  # the weights only so that a change in place is noticed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *kept = ctx.saved_tensors[:6]
        learns = ctx.needs_input_grad[5:]
        dx, dweights = ctx.layer.backward(dy.contiguous(), x, tuple(kept), ctx.angles, ctx.layout, learns)
        return None, dx, None, None, None, *dweights


class _Norm(torch.autograd.Function):
    """The last norm."""

    @staticmethod
    def forward(ctx: Any, native: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.native, ctx.eps = native, eps
        ctx.save_for_backward(x, weight)
        return native.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx = torch.zeros_like(x)
        dw = ctx.native.rms_norm_gradient(dx, x, weight, dy.contiguous(), ctx.eps)
        return None, dx, dw, None


class Decoder:
    """A whole decoder, from token ids to hidden states. Raises `Unlike` where the model is of another kind.

    With `recompute` a layer keeps only its input for the backward pass and runs forward again there (gradient checkpointing).
    """

    def __init__(self, hf: PreTrainedModel, recompute: bool = False) -> None:
        native = kernels()
        if isinstance(native, str):
            raise Unlike(native)
        base: Any = hf.base_model
        config = hf.config.get_text_config()
        if type(base).__name__ not in KINDS:
            raise Unlike(f"{type(base).__name__} is none of {', '.join(KINDS)}")
        if hf.device.type != "cpu" or hf.dtype not in (torch.float32, torch.bfloat16):
            raise Unlike(f"it is in {hf.dtype} on {hf.device}")
        if config.hidden_act != "silu":
            raise Unlike(f"its activation is {config.hidden_act}")
        first = base.layers[0].self_attn
        dim = int(first.head_dim)
        heads = Heads(
            queries=first.q_proj.weight.shape[0] // dim if hasattr(first.q_proj, "weight") else 0,
            keys=first.k_proj.weight.shape[0] // dim if hasattr(first.k_proj, "weight") else 0,
            dim=dim,
            eps=float(config.rms_norm_eps),
            scale=float(first.scaling),
        )
        self.native, self.base, self.hf, self.recompute = native, base, hf, recompute
        self.layers = [Layer(i, module, heads, native) for i, module in enumerate(base.layers)]
        self.dtype = self.layers[0].weights.dtype
        self.eps = float(base.norm.variance_epsilon)
        self.parameters: list[nn.Parameter] = list(base.parameters())

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: FusedLayout,
        keep: Kept | None = None,
        known: Known | None = None,
    ) -> Tensor:
        """Hidden states [B, S, E]; ids and positions are [B, S]. Without gradient what the layers computed goes to `keep`; layers
        that are `known` are not run.
        """
        shape = input_ids.shape
        x = self.base.embed_tokens(input_ids).flatten(0, 1).to(self.dtype)
        cosine, sine = self.base.rotary_emb(x.new_empty(1), position_ids.flatten()[None])
        angles = (cosine[0].float().contiguous(), sine[0].float().contiguous())
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters):
            assert isinstance(layout, PackedLayout)
            for layer in self.layers:
                given = (layer, x, angles, layout, known, *layer.weights.given)
                x = checkpoint(_Through.apply, *given, use_reentrant=False) if self.recompute else _Through.apply(*given)
            x = _Norm.apply(self.native, x, self.base.norm.weight.to(self.dtype), self.eps)
        else:
            if known is not None:
                x, _ = known.layer(len(self.layers) - 1)
            else:
                x = self._run(x, angles, layout, keep)
            x = self.native.rms_norm(x, self.base.norm.weight.to(self.dtype), self.eps)
        return x.to(self.hf.dtype).view(*shape, -1)

    def _run(self, x: Tensor, angles: tuple[Tensor, Tensor], layout: FusedLayout, keep: Kept | None) -> Tensor:
        """The last layer's output, without gradient."""
        layers = []
        for layer in self.layers:
            x, parts = layer.forward(x, angles, layout)
            if keep is not None:
                layers.append((x, *parts))
        if keep is not None:
            keep.add(layers, self.parameters)
        return x
