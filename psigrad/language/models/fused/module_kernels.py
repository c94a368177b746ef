"""CPU kernels for transformers' linear layers, RMS norms and gated feed-forward layers, in models without a fused decoder."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from psigrad.kernels.kernels import Kernels
from psigrad.language.models.fused.caches import PackedWeights, Projection
from psigrad.language.models.fused.families import NormFunction, eps_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


class ModuleKernels:
    """Forward methods that run a network's modules in kernels while `on` is True. The constructor installs them.

    `packed` is the cache of packed weights in decoding steps, otherwise None.
    """

    def __init__(self, network: PreTrainedModel, native: Kernels) -> None:
        self.native, self.on = native, True
        self.packed: PackedWeights | None = None
        self._head = network.get_output_embeddings()  # its products are computed by `logprobs` and `LanguageModel.head`
        replace_forwards(network, self._forward_of)

    def _forward_of(self, module: Any) -> Callable[..., Tensor] | None:
        """Return a forward method that runs a module in kernels; None if there are no kernels for the module."""
        if module is self._head:
            return None
        if type(module) is nn.Linear:
            return self._linear
        if all(type(getattr(module, name, None)) is nn.Linear for name in _FEED_FORWARD) and _is_gated(module):
            return self._feed_forward(type(module).forward)
        offset = norm_offset(module, self.native.rms_norm)
        return None if offset is None else self._norm(type(module).forward, offset)

    def _runs(self, x: Tensor, *weights: Tensor) -> bool:
        """Return True if `on`, and if all tensors are unsharded, on a CPU and of one dtype that the kernels support."""
        plain = all(type(w) in (nn.Parameter, Tensor) and w.dtype == x.dtype and w.device.type == "cpu" for w in weights)
        return self.on and plain and type(x) is Tensor and x.dtype in self.native.dtypes

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias
        if not self._runs(x, weight):
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            made: Tensor = LinearFunction.apply(self, rows, weight, bias)
        else:
            made = self.multiply(rows, weight, bias)
        return made.view(*x.shape[:-1], len(weight))

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return x · weightᵀ + bias, written to `out` if given."""
        out, products = x.new_empty(len(x), len(weight)) if out is None else out, self.native.products
        if self.packed is not None and not torch.is_grad_enabled():
            made = self.packed.of(id(weight), [weight], lambda: [Projection([weight.detach()], bias, None)], products)
            if made is not None:
                return made[0].multiply(x, out, None, products)
        return products.linear(x, weight, out, bias, exact=True)

    def _feed_forward(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(module: Any, x: Tensor) -> Tensor:
            weights = [getattr(module, name).weight for name in _FEED_FORWARD]
            if not self._runs(x, *weights):
                return own(module, x)
            rows = x.reshape(-1, x.shape[-1])
            made: Tensor = _FeedForward.apply(self, rows, *weights)
            return made.view(*x.shape[:-1], len(weights[2]))

        return forward

    def _norm(self, own: Callable[..., Tensor], offset: float) -> Callable[..., Tensor]:
        def forward(module: Any, x: Tensor, *gate: Any, **given: Any) -> Tensor:
            if gate or given or not self._runs(x, module.weight):
                return own(module, x, *gate, **given)
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            made: Tensor = NormFunction.apply(self.native, rows, module.weight, eps_of(module), offset)
            return made.view(x.shape)

        return forward


def replace_forwards(network: nn.Module, forward_of: Callable[[Any], Callable[..., Tensor] | None]) -> None:
    """Replace each module's forward method by `forward_of(module)`, unless `forward_of` returns None."""
    for module in network.modules():
        made = forward_of(module)
        if made is not None:
            owner: Any = module
            owner.forward = types.MethodType(made, module)


@torch.no_grad()
def norm_offset(module: Any, rms_norm: Callable[[Tensor, Tensor, Any, float], Tensor]) -> float | None:
    """Return the offset (0 or 1) with which `rms_norm(x, weight, eps, offset)` gives the outputs of `module`, or None."""
    weight, eps = getattr(module, "weight", None), eps_of(module)
    if "RMSNorm" not in type(module).__name__ or eps is None or weight is None or getattr(module, "bias", None) is not None:
        return None
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    try:
        right = type(module).forward(module, x)
    except (TypeError, AttributeError):  # a norm with a gate
        return None
    near = 8 * torch.finfo(weight.dtype).eps * float(right.abs().max())
    for offset in (0.0, 1.0):
        if float((rms_norm(x, weight.detach(), eps, offset) - right).abs().max()) <= near:
            return offset
    return None


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Return True if `module` has no biases and computes down(silu(gate(x)) · up(x)), which is tested on random x."""
    gate, up, down = (getattr(module, name) for name in _FEED_FORWARD)
    if any(child.bias is not None for child in (gate, up, down)):
        return False
    x = torch.randn(2, gate.in_features, generator=torch.Generator().manual_seed(0)).to(gate.weight.dtype)
    right = type(module).forward(module, x)
    hidden = F.silu(F.linear(x, gate.weight)) * F.linear(x, up.weight)
    return bool(torch.equal(right, F.linear(hidden, down.weight)))


class LinearFunction(torch.autograd.Function):
    """The autograd function of a linear layer that runs in kernels."""

    @staticmethod
    def forward(ctx: Any, parts: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias from `parts.multiply`. `parts` is an object with this method, such as a `ModuleKernels`."""
        ctx.parts = parts
        ctx.save_for_backward(x, weight)
        made: Tensor = parts.multiply(x, weight, bias)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Return a gradient for each input of `forward` that needs one."""
        x, weight = ctx.saved_tensors
        multiply, (_, wants_x, wants_weight, wants_bias) = ctx.parts.native.products.of, ctx.needs_input_grad
        dy = dy.contiguous()
        dx = multiply(dy, weight) if wants_x else None
        return None, dx, multiply(dy.t(), x) if wants_weight else None, dy.sum(0) if wants_bias else None


class _FeedForward(torch.autograd.Function):
    """The autograd function of a feed-forward layer down(silu(gate(x)) · up(x)) that runs in kernels."""

    @staticmethod
    def forward(ctx: Any, parts: ModuleKernels, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        both = x.new_empty(len(x), 2 * len(gate))
        for weight, part in zip((gate, up), both.chunk(2, 1), strict=True):
            parts.multiply(x, weight, out=part)
        ctx.parts = parts
        ctx.save_for_backward(x, both, gate, up, down)
        return parts.multiply(parts.native.gated(both), down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, both, gate, up, down = ctx.saved_tensors
        native, (_, wants_x, *wants) = ctx.parts.native, ctx.needs_input_grad
        multiply, dy = native.products.of, dy.contiguous()
        dboth, hidden = native.gradients.gated(both, multiply(dy, down))
        dgate, dup = dboth.chunk(2, 1)
        dx = None
        if wants_x:
            dx = multiply(dgate, gate)
            multiply(dup, up, dx, base=dx)
        pairs = ((dgate, x), (dup, x), (dy, hidden))
        return None, dx, *(multiply(d.t(), y) if wanted else None for (d, y), wanted in zip(pairs, wants, strict=True))
