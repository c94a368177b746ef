"""Forward methods that make transformers' modules launch fewer kernels on a GPU.

One kernel computes an RMS norm; transformers' module launches eight. In a LoRA layer, one kernel computes W·x + s·B·(A·x) from
W·x and A·x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from psigrad.language.models.fused.families import eps_of
from psigrad.language.models.fused.module_kernels import norm_offset, replace_forwards

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GpuParts:
    """Forward methods with fewer kernels. The constructor attaches them to RMS norms and LoRA layers; `on` enables them."""

    def __init__(self, network: PreTrainedModel) -> None:
        self.on = True
        replace_forwards(network, self._forward_of)

    def _forward_of(self, module: Any) -> Callable[..., Tensor] | None:
        """Return a forward method that launches fewer kernels than the module's own; None if there is none."""
        if norm_offset(module, _rms_norm) == 0.0:
            return self._norm(type(module).forward)
        adapts = hasattr(module, "lora_A") and type(getattr(module, "base_layer", None)) is nn.Linear
        return self._adapted(type(module).forward) if adapts else None

    def runs(self, x: Tensor, *weights: Tensor) -> bool:
        """Return True if `on` is set, torch.compile is not tracing, and all tensors are unsharded, on a GPU and of one dtype."""
        plain = all(type(w) in (nn.Parameter, Tensor) and w.dtype == x.dtype for w in weights)
        return self.on and x.is_cuda and plain and not torch.compiler.is_compiling()

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of x, computed in one kernel."""
        return _rms_norm(x, weight, eps)

    def _norm(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(module: Any, x: Tensor, *given: Any, **named: Any) -> Tensor:
            if given or named or not self.runs(x, module.weight):
                return own(module, x, *given, **named)
            return self.norm(x, module.weight, eps_of(module))

        return forward

    def _adapted(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(module: Any, x: Tensor, *given: Any, **named: Any) -> Tensor:
            names = module.active_adapters
            single = len(names) == 1 and names[0] in module.lora_A and names[0] not in module.lora_variant
            if given or named or not single or module.disable_adapters or module.merged:
                return own(module, x, *given, **named)
            (name,) = names
            a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
            weight, bias = module.base_layer.weight, module.base_layer.bias
            plain = type(dropout) is nn.Identity and b.bias is None and not weight.requires_grad
            if not plain or not self.runs(x, weight, a.weight, b.weight):
                return own(module, x)
            made: Tensor = _Adapted.apply(x.reshape(-1, x.shape[-1]), weight, bias, a.weight, b.weight, module.scaling[name])
            return made.view(*x.shape[:-1], -1)

        return forward


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return F.rms_norm(x, weight.shape, weight + offset if offset else weight, eps)


class _Adapted(torch.autograd.Function):
    """The function x · Wᵀ + bias + s · x · Aᵀ · Bᵀ of a LoRA layer with frozen W and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        down = x @ a.t()
        ctx.scaling = scaling
        ctx.save_for_backward(x, down, weight, a, b)
        return torch.addmm(F.linear(x, weight, bias), down, b.t(), alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, down, weight, a, b = ctx.saved_tensors
        nothing = dy.new_empty(1)
        ddown = torch.addmm(nothing, dy, b, beta=0, alpha=ctx.scaling)
        dx = torch.addmm(dy @ weight, ddown, a) if ctx.needs_input_grad[0] else None
        return dx, None, None, ddown.t() @ x, torch.addmm(nothing, dy.t(), down, beta=0, alpha=ctx.scaling), None
