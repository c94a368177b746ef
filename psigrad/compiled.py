"""The interface to compiled kernels: `psigrad.kernels`, if it is installed and works here.

Training calls this module and imports no kernel. `psigrad.kernels` decides if kernels are used, by the processor, the compiler
and an environment variable.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
    """The seed of the draws that round a weight without a master."""

    @property
    def weight(self) -> Tensor:
        """The tensor that is stepped."""
        found = self.stored if self.master is None else self.master
        assert found is not None
        return found


class OptimizerKernels(Protocol):
    """The kernels of AdamW's step on half-precision weights."""

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        """Return Σ g² over all tensors."""
        ...

    def adamw(self, weights: Sequence[AdamWWeight], lr: float, betas: tuple[float, float], eps: float, scale: float) -> None:
        """Step weights that have a master, with each gradient multiplied by `scale`."""
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
    """The kernels of small ReLU networks whose weights are one flat float32 vector, and of Adam's step on it."""

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


class CompiledKernels(Protocol):
    """The kernels that are used outside language models."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The types of the logits that `draw` takes."""
        ...

    @property
    def half_precision(self) -> OptimizerKernels:
        """The kernels of AdamW's step."""
        ...

    @property
    def towers(self) -> FlatKernels:
        """The kernels of the networks for control."""
        ...

    def draw(self, logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return a token for each row, by the inverse of the cumulative distribution at `u`, and its log-prob."""
        ...


@functools.cache
def kernels() -> CompiledKernels | str:
    """Return the kernels, compiled if necessary, or the reason why there are none."""
    try:
        found: CompiledKernels | str = importlib.import_module("psigrad.kernels.kernels").kernels()
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("psigrad.kernels"):  # another module is missing
            raise
        return "psigrad.kernels is not installed"
    return found
