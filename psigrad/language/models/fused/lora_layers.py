"""LoRA in the fused decoder: the linear layers of peft's modules, and the term that an adapter adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from psigrad.errors import kind_of
from psigrad.kernels.products import Products
from psigrad.language.models.coded_linear import CodedLinear


class Unsupported(Exception):
    """Raised if the fused decoder can't run a model, with the reason as its message."""


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


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a linear layer: peft's module, the adapter's name in it, and the weights (A, B)."""

    module: Any
    name: str
    weights: tuple[nn.Parameter, nn.Parameter]


def split_adapter(child: Any) -> tuple[nn.Linear, Adapter | None]:
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
