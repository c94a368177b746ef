"""The interface to the compiled kernels of `psigrad.kernels`, for code that must also work without them.

Optimisers, control and sampling call this module and import no kernel. The processor, the compiler and an environment variable
determine if kernels are used; `psigrad.kernels` checks them.
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
    """One weight for the AdamW kernels, with its gradient and moments.

    The weight is a float32 tensor `master`, a bfloat16 tensor `stored`, or both. If there are both, the step writes both.
    """

    master: Tensor | None
    stored: Tensor | None
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int
    """The number of this step, from 1."""
    weight_decay: float
    scales: tuple[Tensor, Tensor] | None = None
    """The scales of the blocks of both moments, if the moments are 8-bit codes."""
    seed: int = 0
    """The seed of the random numbers that round a weight without a master."""
    first: int = 0
    """The index of the first element in the whole parameter. The rounding of a master depends on it (`dither`)."""

    @property
    def weight(self) -> Tensor:
        """The tensor that the step updates: the master if there is one, otherwise the stored weight."""
        found = self.stored if self.master is None else self.master
        assert found is not None
        return found


class OptimizerKernels(Protocol):
    """The kernels of AdamW steps on half-precision weights."""

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        """Return Σ g² over all tensors."""

    def dither(self, stored: Tensor, master: Tensor, first: int) -> None:
        """Write the float32 numbers `master` to the bfloat16 tensor `stored`, rounded by `psigrad.optim.low_memory.dither`."""

    def adamw(self, weights: Sequence[AdamWWeight], lr: float, betas: tuple[float, float], eps: float, scale: float) -> None:
        """Take a step of AdamW on weights with a master and a stored copy. Each gradient is first multiplied by `scale`."""

    def adamw_low_memory(
        self,
        weights: Sequence[AdamWWeight],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        scale: float,
        codes: Sequence[Tensor],
    ) -> None:
        """Take a step of AdamW on weights without a master, or whose moments are 8-bit codes; `codes` are lookup tables."""


class FlatKernels(Protocol):
    """The kernels of small ReLU networks whose weights are one flat float32 vector, and of Adam's step on this vector."""

    def forward(self, flat: Tensor, x: Tensor, towers: int, sizes: Sequence[int]) -> Tensor:
        """Return the outputs of all layers of `towers` networks for the inputs `x`.

        `flat` are the networks' weights, and `sizes` the widths of their layers.
        """

    def backward(self, out: Tensor, flat: Tensor, x: Tensor, hs: Tensor, given: Tensor, sizes: Sequence[int]) -> None:
        """Write the gradient of the weights to `out`.

        `hs` is the result of `forward`, and `given` is the loss's gradient with respect to the last layer's outputs.
        """

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
        """Take a step of Adam in place. `scale` multiplies the gradient, and `correction` the moving average of its square."""


class CompiledKernels(Protocol):
    """The compiled kernels that this module's callers use."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of logits that `draw` accepts."""

    @property
    def half_precision(self) -> OptimizerKernels:
        """The kernels of AdamW steps on half-precision weights."""

    @property
    def towers(self) -> FlatKernels:
        """The kernels of the small networks in psigrad.control."""

    def draw(self, logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Sample a token from each row of `logits`. Return (the tokens, their log-probs).

        The token is the first one whose cumulative probability exceeds the uniform number `u` of the row.
        """


@functools.cache
def kernels() -> CompiledKernels | str:
    """Return the kernels, compiled if necessary, or a string with the reason why there are none."""
    try:
        found: CompiledKernels | str = importlib.import_module("psigrad.kernels.kernels").kernels()
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("psigrad.kernels"):  # another module is missing
            raise
        return "psigrad.kernels is not installed"
    return found


def gpu_kernels(x: Tensor) -> Any | None:
    """Return the module `psigrad.kernels.triton_kernels` if its kernels run on x's GPU and this is the current GPU, else None."""
    import torch

    found = triton_kernels() if x.is_cuda else ""
    return found if not isinstance(found, str) and x.device.index == torch.cuda.current_device() else None


@functools.cache
def triton_kernels() -> Any | str:
    """Return the module `psigrad.kernels.triton_kernels`, or a string with the reason why its kernels do not run on this GPU."""
    import torch

    try:
        found: Any = importlib.import_module("psigrad.kernels.triton_kernels")
        found.log_probs(torch.zeros(1, 2, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda"), 1.0)
    except Exception as error:  # no Triton, no C compiler, a GPU that Triton does not know: each has errors of its own
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found
