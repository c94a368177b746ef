"""Linear layers whose matrices are kept in codes of 4 or 8 bits, and never learn: the base of an adapter (QLoRA)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from psigrad.errors import UserError
from psigrad.kernels.codes import CodedMatrix, Kind, can_code, code
from psigrad.kernels.kernels import kernels

CODED_BASE = "quantized_base.json"
"""Beside an adapter that learnt over a base in codes: their kind, and the type of the numbers that were coded. peft has no word
of its own for the former."""
_PARTS = ("scales", "offsets", "levels")


class CodedLinear(nn.Linear):
    """x · Wᵀ + b with W in codes (Dettmers et al. 2023, QLoRA, arXiv:2305.14314). Its `weight` are the codes, of a
    `kind`.
    """

    def __init__(self, matrix: CodedMatrix, bias: nn.Parameter | None, kind: Kind) -> None:
        nn.Module.__init__(self)
        self.kind = kind
        self.out_features, self.in_features = matrix.shape
        self.block = matrix.block
        self.weight = nn.Parameter(matrix.codes, requires_grad=False)
        self.register_parameter("bias", bias)
        for name in _PARTS:
            self.register_buffer(name, getattr(matrix, name), persistent=False)

    @property
    def matrix(self) -> CodedMatrix:
        """The matrix as it stands now, on whatever device."""
        scales, offsets, levels = (getattr(self, name) for name in _PARTS)
        return CodedMatrix(self.weight.data, scales, offsets, levels, (self.out_features, self.in_features), self.block)

    def forward(self, x: Tensor) -> Tensor:
        """x in float32 or bfloat16; its gradient is that of the numbers which the codes stand for."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        native = kernels()
        plain = x.device.type == "cpu" and x.is_contiguous() and not torch.is_grad_enabled()
        if plain and not isinstance(native, str) and x.dtype in native.dtypes:
            rows = x.reshape(-1, self.in_features)
            out = native.products.multiply_codes(rows, [self.matrix], x.new_empty(len(rows), self.out_features), bias)
            return out.view(*x.shape[:-1], -1)
        return nn.functional.linear(x, unpack(self.matrix, x.dtype), bias)


def unpack(matrix: CodedMatrix, dtype: torch.dtype) -> Tensor:
    """The numbers [N, K] of a matrix in codes."""
    native = kernels()
    if matrix.codes.device.type == "cpu" and not isinstance(native, str) and dtype in native.dtypes:
        return native.products.unpack(matrix, dtype)
    return matrix.by_torch(dtype)


def code_linears(network: nn.Module, kind: Kind) -> None:
    """Put the linear layers inside lists of layers in codes, but for those whose rows are not whole blocks. Raises `UserError`
    where that leaves none.
    """
    found = False
    for name, child in list(network.named_modules()):
        inside = any(part.isdigit() for part in name.split("."))
        if inside and type(child) is nn.Linear and can_code(child.weight, kind):
            network.set_submodule(name, CodedLinear(code(child.weight, kind), child.bias, kind))
            found = True
    if not found:
        raise UserError(f"quantize_base is {kind}, and no layer of the model has rows of whole blocks of it; leave it out.")


def coded_as(network: nn.Module) -> Kind | None:
    """How `code_linears` or the loader of a GGUF file coded the layers of a model; None where they are plain."""
    return next((module.kind for module in network.modules() if isinstance(module, CodedLinear)), None)


def uncode_linears(network: nn.Module, dtype: torch.dtype) -> None:
    """The inverse, with the numbers that the codes stand for: to add an adapter to them."""
    for name, child in list(network.named_modules()):
        if isinstance(child, CodedLinear):
            plain = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
            plain.weight, plain.bias = nn.Parameter(unpack(child.matrix, dtype), requires_grad=False), child.bias
            owner, _, last = name.rpartition(".")
            setattr(network.get_submodule(owner), last, plain)
