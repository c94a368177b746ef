"""The decoder of Llama's kin (Llama, Mistral, Qwen2, Qwen3) on a CPU: large matrix products by PyTorch, all else by our kernels.

transformers' own modules are the oracle and the fallback: a model of another kind, on another device or in float64 runs through
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from psigrad.models.attention import FusedLayout, PackedLayout
from psigrad.models.fused_layer import Layer, Unlike
from psigrad.models.kept import Kept, Known
from psigrad.native.kernels import Heads, Kernels, kernels

KINDS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")


class _Through(torch.autograd.Function):
    """A layer, with its gradient by hand."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        layout: PackedLayout,
        adapted: bool,
        known: Known | None,
        *weights: Tensor,
    ) -> Tensor:
        y, kept = layer.forward(x, angles, layout, adapted) if known is None else known.layer(layer.index)
        ctx.layer, ctx.angles, ctx.layout, ctx.adapted = layer, angles, layout, adapted
        ctx.save_for_backward(x, *kept, *weights)  # the weights only so that a change in place is noticed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *kept = ctx.saved_tensors[:6]
        learns = ctx.needs_input_grad[6:]
        dx, dweights = ctx.layer.backward(dy.contiguous(), x, tuple(kept), ctx.angles, ctx.layout, ctx.adapted, learns)
        return None, dx, None, None, None, None, *dweights


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
        dw = ctx.native.gradients.rms_norm(dx, x, weight, dy.contiguous(), ctx.eps)
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
        adapted = self.adapted
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters):
            assert isinstance(layout, PackedLayout)
            for layer in self.layers:
                given = (layer, x, angles, layout, adapted, known, *layer.weights.given)
                x = checkpoint(_Through.apply, *given, use_reentrant=False) if self.recompute else _Through.apply(*given)
            x = _Norm.apply(self.native, x, self.base.norm.weight.to(self.dtype), self.eps)
        else:
            if known is not None:
                x, _ = known.layer(len(self.layers) - 1)
            else:
                x = self._run(x, angles, layout, adapted, keep)
            x = self.native.rms_norm(x, self.base.norm.weight.to(self.dtype), self.eps)
        return x.to(self.hf.dtype).view(*shape, -1)

    @property
    def adapted(self) -> bool:
        """Whether adapters are at work; a LoRA model without them is the one it started from."""
        return any(layer.adapted for layer in self.layers)

    def _run(self, x: Tensor, angles: tuple[Tensor, Tensor], layout: FusedLayout, adapted: bool, keep: Kept | None) -> Tensor:
        """The last layer's output, without gradient."""
        layers = []
        for layer in self.layers:
            x, parts = layer.forward(x, angles, layout, adapted)
            if keep is not None:
                layers.append((x, *parts))
        if keep is not None:
            keep.add(layers, self.parameters)
        return x
