"""The interface to the compiled kernels of `psigrad.kernels`, if it is installed and works on this machine.

Training code calls this module and never imports a kernel. `psigrad.kernels` decides whether kernels are used: by the processor,
the compiler and an environment variable.
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
    """One weight in a fused AdamW step: it has a float32 `master`, a bfloat16 `stored`, or both, which are updated together."""

    master: Tensor | None
    stored: Tensor | None
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int
    """The number of this step, from 1."""
    weight_decay: float
    scales: tuple[Tensor, Tensor] | None = None
    """The scales of the moments' blocks, if the moments are stored as 8-bit codes; otherwise None."""
    seed: int = 0
    """The seed of the stochastic rounding of a weight without a master."""

    @property
    def weight(self) -> Tensor:
        """The tensor that the optimiser updates: the master, or else the stored weight."""
        found = self.stored if self.master is None else self.master
        assert found is not None
        return found


class OptimizerKernels(Protocol):
    """The kernels of AdamW's step for half-precision weights."""

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        """Return Σ g² over all tensors."""
        ...

    def adamw(self, weights: Sequence[AdamWWeight], lr: float, betas: tuple[float, float], eps: float, scale: float) -> None:
        """Update weights that have a master, with each gradient multiplied by `scale`."""
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
        """Update weights without a master, or with 8-bit moments. `codes` are the tables that convert 8-bit codes to numbers."""
        ...


class FlatKernels(Protocol):
    """The kernels of small ReLU networks for control, and of Adam's step on their weights, which are one flat float32 vector."""

    def forward(self, flat: Tensor, x: Tensor, towers: int, sizes: Sequence[int]) -> Tensor:
        """Return the activations of all layers of `towers` separate networks with these layer sizes on the same inputs `x`."""
        ...

    def backward(self, out: Tensor, flat: Tensor, x: Tensor, hs: Tensor, given: Tensor, sizes: Sequence[int]) -> None:
        """Write the gradient of the weights to `out`, from the activations `hs` and the gradient `given` of the outputs."""
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
        """Update the weights and the moments in place by one step of Adam, with the gradient multiplied by `scale`."""
        ...


class CompiledKernels(Protocol):
    """The kernels of optimisers, sampling and control."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The types of logits that `draw` accepts."""
        ...

    @property
    def half_precision(self) -> OptimizerKernels:
        """The kernels of AdamW's step for half-precision weights."""
        ...

    @property
    def towers(self) -> FlatKernels:
        """The kernels of the small networks for control."""
        ...

    def draw(self, logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Sample a token for each row of logits with the uniform numbers `u`, by the inverse CDF. Return (tokens, log-probs)."""
        ...


@functools.cache
def kernels() -> CompiledKernels | str:
    """Return the kernels, after compiling them if necessary, or a string with the reason why there are none."""
    try:
        found: CompiledKernels | str = importlib.import_module("psigrad.kernels.kernels").kernels()
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("psigrad.kernels"):  # another module is missing
            raise
        return "psigrad.kernels is not installed"
    return found
