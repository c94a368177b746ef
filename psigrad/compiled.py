"""The seam to compiled kernels: `psigrad.kernels`, if it is installed and works here.

Training asks this module and imports no kernel. Whether kernels are used (a processor, a compiler, an environment variable) is
decided in `psigrad.kernels`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdamWWeight:
    """One weight in a fused step: a float32 `master`, a bfloat16 `stored`, or both, which are written together."""

    master: Tensor | None
    stored: Tensor | None
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int
    """The number of this step, from 1."""
    weight_decay: float
    scales: tuple[Tensor, Tensor] | None = None
    """The scales of the blocks, if the moments are 8-bit codes."""
    seed: int = 0
    """Seed of the draws that round a weight without a master."""

    @property
    def weight(self) -> Tensor:
        """The tensor that is stepped."""
        found = self.stored if self.master is None else self.master
        assert found is not None
        return found


class OptimizerKernels(Protocol):
    """AdamW's step on half-precision weights."""

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        """Return Σ g² over all tensors."""
        ...

    def adamw(self, weights: Sequence[AdamWWeight], lr: float, betas: tuple[float, float], eps: float, scale: float) -> None:
        """Step weights that have a master, with each gradient times `scale`."""
        ...

    def adamw_low_memory(
        self,
        weights: Sequence[AdamWWeight],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        scale: float,
        codes: Sequence[Tensor],
    ) -> None:
        """Step weights without a master or with moments in 8-bit `codes`."""
        ...


class FlatKernels(Protocol):
    """Small ReLU networks whose weights are one flat float32 vector, and Adam's step on it."""

    def forward(self, flat: Tensor, x: Tensor, towers: int, sizes: Sequence[int]) -> Tensor:
        """Return the activations of all layers."""
        ...

    def backward(self, out: Tensor, flat: Tensor, x: Tensor, hs: Tensor, given: Tensor, sizes: Sequence[int]) -> None:
        """Write the gradient to `out`."""
        ...

    def adam(
        self,
        weights: Tensor,
        gradient: Tensor,
        moments: tuple[Tensor, Tensor],
        betas: tuple[float, float],
        rate: float,
        correction: float,
        epsilon: float,
        scale: float,
    ) -> None:
        """Take a step of Adam."""
        ...


class LogProbKernels(Protocol):
    """Log-probs of chosen tokens, with the bits that sampling gives them."""

    def sum_stretches(self, sums: Tensor, logits: Tensor, temperature: float) -> None:
        """Sum the exponentials of each stretch of logits."""
        ...

    def of(self, logits: Tensor, sums: Tensor, temperature: float) -> Tensor:
        """Return the log-probs of tokens with these logits."""
        ...


class CompiledKernels(Protocol):
    """The kernels that are used outside of the fused decoder."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The types of the logits that `draw` takes."""
        ...

    @property
    def half_precision(self) -> OptimizerKernels:
        """AdamW's step."""
        ...

    @property
    def towers(self) -> FlatKernels:
        """The networks of control."""
        ...

    @property
    def log_probs(self) -> LogProbKernels:
        """Log-probs of chosen tokens."""
        ...

    @property
    def products(self) -> Any:
        """Matrix products."""
        ...

    def draw(self, logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return a token for each row, by the inverse of the cumulative distribution at `u`, and its log-prob."""
        ...


STRETCH = 1024
"""Logits of a row whose exponentials are summed together; a constant of the kernels."""


@functools.cache
def _provider() -> Any:
    """Return the module that has the kernels, or None."""
    try:
        return importlib.import_module("psigrad.kernels.kernels")
    except ModuleNotFoundError:
        return None


def kernels() -> CompiledKernels | str:
    """Return the kernels, compiled if necessary, or the reason why there are none."""
    found: CompiledKernels | str = "psigrad.kernels is not installed" if _provider() is None else _provider().kernels()
    return found


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """Return a · b + base, in `out` if it is given: by the kernels on a CPU, otherwise by PyTorch."""
    found = kernels() if a.device.type == "cpu" else ""
    product: Tensor = multiply_by_torch(a, b, out, base) if isinstance(found, str) else found.products.of(a, b, out, base)
    return product


def multiply_by_torch(a: Tensor, b: Tensor, out: Tensor | None = None, base: Tensor | None = None) -> Tensor:
    """Return a · b + base by PyTorch."""
    import torch

    if base is None:
        return torch.mm(a, b, out=out) if out is not None else torch.mm(a, b)
    if base is out:
        return base.addmm_(a, b)
    return torch.addmm(base, a, b, out=out) if out is not None else torch.addmm(base, a, b)
