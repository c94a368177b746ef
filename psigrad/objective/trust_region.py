"""TRPO's step: the largest improvement of a linear model of the objective within a ball of mean KL divergence.

    max_s gᵀs  subject to  ½·sᵀFs ≤ δ:   s = √(2δ / xᵀFx)·x with Fx = g; g the gradient, F the Fisher information matrix

Source: Schulman et al. 2015, TRPO, arXiv:1502.05477, sections 5, 6 and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def conjugate_gradients(product: Product, b: Tensor, steps: int, tolerance: float = 1e-10) -> Tensor:
    """Return x with A·x ≈ b for a symmetric positive definite matrix A. `product` is the function v -> A·v.

    The iteration stops after `steps` rounds, or when |b − A·x|² ≤ tolerance · |b|².

    Source: Hestenes and Stiefel 1952.
    """
    x, r, p = torch.zeros_like(b), b.clone(), b.clone()
    rr = r @ r
    least = tolerance * float(rr)
    for _ in range(steps):
        if float(rr) <= least:
            break
        along = product(p)
        alpha = rr / (p @ along)
        x, r = x + alpha * p, r - alpha * along
        new = r @ r
        p, rr = r + (new / rr) * p, new
    return x


def fisher_product(kl: Tensor, parameters: Tensor, damping: float) -> Product:
    """Return the function v -> (F + damping·I)·v, with F the Hessian of the scalar `kl` with respect to `parameters`.

    At the current parameters `kl` must be 0, its minimum.
    """
    (gradient,) = torch.autograd.grad(kl, parameters, create_graph=True)

    def product(v: Tensor) -> Tensor:
        (hessian_v,) = torch.autograd.grad(gradient @ v, parameters, retain_graph=True)
        return hessian_v + damping * v

    return product


@dataclass(frozen=True)
class TrustRegionStep:
    """The outcome of a trust-region step."""

    shift: Tensor
    """The vector to add to the parameters; zeros if no step length was accepted."""
    improvement: float
    """The increase of the surrogate objective."""
    kl: float
    """Mean KL(old‖new) after the step."""
    tries: int
    """Number of step lengths tried; 0 if the curvature sᵀFs along the step is not positive."""


def step(
    gradient: Tensor,
    product: Product,
    measure: Callable[[Tensor], tuple[float, float]],
    *,
    max_kl: float,
    cg_steps: int = 15,
    shrink: float = 0.8,
    tries: int = 10,
) -> TrustRegionStep:
    """Return the trust-region step along F⁻¹·g, with g the `gradient` of the objective to maximise.

    `product` is v -> F·v for the Fisher matrix F. `measure(shift)` returns (improvement, mean KL) of the policy with `shift`
    added to its parameters. The step is multiplied by `shrink` until it improves the objective with a KL of at most `max_kl`.
    """
    direction = conjugate_gradients(product, gradient, cg_steps)
    curvature = float(direction @ product(direction))
    if not curvature > 0:
        return TrustRegionStep(torch.zeros_like(gradient), 0.0, 0.0, 0)
    full = (2 * max_kl / curvature) ** 0.5 * direction
    for i in range(tries):
        shift = shrink**i * full
        improvement, kl = measure(shift)
        if improvement > 0 and kl <= max_kl:
            return TrustRegionStep(shift, improvement, kl, i + 1)
    return TrustRegionStep(torch.zeros_like(gradient), 0.0, 0.0, tries)
