"""Linear layers with frozen weights, quantised to 4 or 8 bits, for the base model of an adapter (QLoRA)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from psigrad import redaction
from psigrad.errors import UserError, reason_of
from psigrad.kernels import codes
from psigrad.kernels.codes import CodedMatrix, Kind, can_code, code
from psigrad.kernels.kernels import kernels

CODED_BASE = "quantized_base.json"
"""The file next to an adapter that was trained on a quantised base. It stores the kind of codes and the base's dtype.

peft's configuration has no field for the kind.
"""
_PARTS = ("scales", "offsets", "levels")


class CodedLinear(nn.Linear):
    """The layer x · Wᵀ + b with a quantised W (Dettmers et al. 2023, QLoRA, arXiv:2305.14314).

    `weight` stores the quantised numbers of W (the codes), and `kind` is their format.
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
        """The quantised matrix W. It is not cached, because moving the layer to another device replaces its tensors."""
        scales, offsets, levels = (getattr(self, name) for name in _PARTS)
        return CodedMatrix(self.weight.data, scales, offsets, levels, (self.out_features, self.in_features), self.block)

    def forward(self, x: Tensor) -> Tensor:
        """Return x · Wᵀ + b for x in float32 or bfloat16. The gradient of x is computed with the dequantised W."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        plain = x.device.type == "cpu" and x.is_contiguous() and not torch.is_grad_enabled()
        native = kernels() if plain else ""
        if not isinstance(native, str) and x.dtype in native.dtypes:
            rows = x.reshape(-1, self.in_features)
            out = native.products.multiply_codes(rows, [self.matrix], x.new_empty(len(rows), self.out_features), bias)
            return out.view(*x.shape[:-1], -1)
        made: Tensor = _Product.apply(x, self.matrix, bias)
        return made


class _Product(torch.autograd.Function):
    """The autograd function x · Wᵀ + b with a frozen quantised W. To save memory, the backward pass dequantises W again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: CodedMatrix, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return nn.functional.linear(x, unpack(matrix, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows = dy.flatten(0, -2)
        dx = (rows @ unpack(ctx.matrix, dy.dtype)).view(*dy.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return dx, None, rows.sum(0) if ctx.needs_input_grad[2] else None


def unpack(matrix: CodedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the matrix [N, K], dequantised to `dtype`."""
    native = kernels() if matrix.codes.device.type == "cpu" else ""
    if not isinstance(native, str) and dtype in native.dtypes:
        return native.products.unpack(matrix, dtype)
    if matrix.codes.device.type == "cuda":
        return _decoder()(matrix.codes, matrix.scales, matrix.offsets, matrix.levels, dtype)[: matrix.shape[0]]
    return matrix.by_torch(dtype)


@functools.cache
def _decoder() -> Callable[..., Tensor]:
    """Return `codes.decode`, compiled for all shapes. Compilation cuts its memory traffic from 30 bytes per weight to about 3.

    If torch.compile fails, the returned function prints the reason once and runs uncompiled.
    """
    current: Callable[..., Tensor] = torch.compile(codes.decode, dynamic=True)

    def decode(*given: Any) -> Tensor:
        nonlocal current
        try:
            return current(*given)
        except torch._dynamo.exc.TorchDynamoException as error:
            redaction.say(
                f"Decoding quantised weights takes ten times as long, because torch.compile failed ({reason_of(error)})."
            )
            current = codes.decode
            return current(*given)

    return decode


def code_linears(network: nn.Module, kind: Kind) -> None:
    """Replace the linear layers in the transformer blocks by quantised layers, in place.

    A layer is skipped if its row length is not a multiple of the codes' block size.
    """
    found = False
    for name, child in list(network.named_modules()):
        inside = any(part.isdigit() for part in name.split("."))
        if inside and type(child) is nn.Linear and can_code(child.weight, kind):
            network.set_submodule(name, CodedLinear(code(child.weight, kind), child.bias, kind))
            found = True
    if not found:
        raise UserError(
            f"quantize_base is {kind}, but no linear layer of the model has a row length that is a multiple of {kind}'s block "
            "size; remove quantize_base."
        )


def coded_as(network: nn.Module) -> Kind | None:
    """Return the quantisation format of a model's layers; None if no layer is quantised."""
    return next((module.kind for module in network.modules() if isinstance(module, CodedLinear)), None)


def uncode_linears(network: nn.Module, dtype: torch.dtype) -> None:
    """Replace quantised layers by `nn.Linear` layers with dequantised weights. An adapter can then be merged into them."""
    for name, child in list(network.named_modules()):
        if isinstance(child, CodedLinear):
            plain = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
            plain.weight, plain.bias = nn.Parameter(unpack(child.matrix, dtype), requires_grad=False), child.bias
            owner, _, last = name.rpartition(".")
            setattr(network.get_submodule(owner), last, plain)
