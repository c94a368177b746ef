"""Update rules of named parameters (AdamW, Muon and Adafactor), and learning rates.

A rule stores no tensors; `Optimizer` stores the state of each parameter. AdamW with less memory is in `low_memory.py`, and the
rules for one flat vector are in `flat_rules.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, muon
from torch.optim.adamw import adamw

from psigrad.compiled import AdamWWeight, OptimizerKernels, kernels
from psigrad.errors import UserError

if TYPE_CHECKING:
    from psigrad.config import Optim


class StepSize(NamedTuple):
    """The learning rate `lr` of a step, the gradient's `norm`, and the limit `max_norm` for clipping it (0: no clipping)."""

    lr: float
    norm: float = 0.0
    max_norm: float = 0.0

    @property
    def divisor(self) -> float:
        """The number by which clipping divides gradients; 1 if the norm is within the limit."""
        return self.norm / self.max_norm if 0 < self.max_norm < self.norm else 1.0


class Update(NamedTuple):
    """The tensors of one parameter in a step. A rule updates `weight` and `state` in place, and may overwrite `gradient`."""

    name: str
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    weight_decay: float
    stored: Tensor | None = None
    """The bfloat16 weight whose float32 master is `weight`, if kernels update both from a bfloat16 gradient; else None."""
    first: int = 0
    """The index of the first element of `weight` in the whole parameter; 0 without shards."""


class UpdateRule(Protocol):
    """An update rule, such as AdamW: a function from weights, gradients and states to new weights and states."""

    @property
    def by_rows(self) -> bool:
        """True if the rows of a weight can be updated separately, one block of rows after another."""

    def init(self, name: str, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state of the parameter `p`, called `name`, as {name of a state tensor: tensor}."""

    def step(self, updates: Sequence[Update], step: StepSize) -> None:
        """Update the weights and states in `updates` in place."""


def adamw_kernels(dtype: torch.dtype, device: str) -> OptimizerKernels | None:
    """Return the kernels that take AdamW steps on weights of this dtype and device; None if there are none."""
    if dtype != torch.bfloat16 or device != "cpu":
        return None  # without loading the kernels, which may have to be compiled
    found = kernels()
    return None if isinstance(found, str) else found.half_precision


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101). It calls the function that `torch.optim.AdamW(fused=True)` calls."""

    betas: tuple[float, float]
    eps: float

    by_rows = True

    def init(self, name: str, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state: step 0 and moments of 0. The fused function needs the step on the parameter's device."""
        moments = {key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=p.device), **moments}

    def step(self, updates: Sequence[Update], step: StepSize) -> None:
        """Update the parameters in `updates` in place."""
        # Both ways clip gradients as they read them: a separate pass over memory would take a third of a step's time.
        half = [u for u in updates if u.stored is not None and u.gradient.dtype == u.stored.dtype]
        plain = [u for u in updates if u.stored is None or u.gradient.dtype != u.stored.dtype]
        for decay in dict.fromkeys(u.weight_decay for u in plain):
            self._by_torch([u for u in plain if u.weight_decay == decay], step, decay)
        if half:
            self._by_kernels(half, step)

    def _by_torch(self, updates: Sequence[Update], step: StepSize, decay: float) -> None:
        # torch's class would import torch's compiler (a second, 60 MB) and, by allocating moments late, fragment the heap.
        fused: Any = adamw
        divisor = step.divisor
        fused(
            [u.weight for u in updates],
            [u.gradient for u in updates],
            [u.state["exp_avg"] for u in updates],
            [u.state["exp_avg_sq"] for u in updates],
            [],
            [u.state["step"] for u in updates],
            fused=True,
            grad_scale=torch.full((), divisor, device=updates[0].weight.device) if divisor != 1.0 else None,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=step.lr,
            weight_decay=decay,
            eps=self.eps,
            maximize=False,
        )

    def _by_kernels(self, updates: Sequence[Update], step: StepSize) -> None:
        counts = [u.state["step"] for u in updates]
        torch._foreach_add_(counts, 1)
        weights = []
        for u, count in zip(updates, torch.stack(counts).tolist(), strict=True):
            moments = (u.state["exp_avg"], u.state["exp_avg_sq"])
            gradient = u.gradient.contiguous()
            weights.append(AdamWWeight(u.weight, u.stored, gradient, *moments, int(count), u.weight_decay, first=u.first))
        native = adamw_kernels(torch.bfloat16, "cpu")
        assert native is not None, "only kernels step weights along half-precision gradients"
        native.adamw(weights, step.lr, self.betas, self.eps, 1 / step.divisor)


_NOT_HIDDEN = re.compile(r"embed|wte|wpe|head|score", re.IGNORECASE)
MOMENTUM = 0.95


def is_hidden_matrix(name: str, p: Tensor) -> bool:
    """Return True if Muon updates the parameter: any matrix, including LoRA's, except embeddings and heads."""
    return p.dim() == 2 and not _NOT_HIDDEN.search(name)


@dataclass(frozen=True)
class Muon:
    """Muon for hidden matrices (Jordan 2024; Liu et al. 2025, arXiv:2502.16982). AdamW's learning rates can be used.

    Formula: B ← μB + (1 − μ)g;  W ← W − lr·λ·W − 0.2·lr·√max(n, m) · NS((1 − μ)g + μB), for a matrix W [n, m] with gradient g,
    momentum B, weight decay λ and μ = 0.95. The Newton–Schulz iteration NS makes all singular values about 1.
    """

    by_rows = False

    def init(self, name: str, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state: a momentum of 0."""
        return {"momentum_buffer": torch.zeros_like(p)}

    def step(self, updates: Sequence[Update], step: StepSize) -> None:
        """Update the matrices in `updates` in place."""
        for decay in dict.fromkeys(u.weight_decay for u in updates):
            group = [u for u in updates if u.weight_decay == decay]
            muon(
                [u.weight for u in group],
                [u.gradient / step.divisor for u in group],
                [u.state["momentum_buffer"] for u in group],
                lr=step.lr,
                weight_decay=decay,
                momentum=MOMENTUM,
                nesterov=True,
                ns_coefficients=(DEFAULT_A, DEFAULT_B, DEFAULT_C),
                eps=EPS,
                ns_steps=DEFAULT_NS_STEPS,
                adjust_lr_fn="match_rms_adamw",
                has_complex=False,
            )


@dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), bit for bit as in transformers' `Trainer`.

    For a matrix, it stores only R and C: running means of the squared gradient in each row and each column.
    Formula: R ← β·R + (1 − β)·mean_cols(g² + 10⁻³⁰),  C likewise with mean_rows, β = 1 − t^−0.8;  u = g / √(R·Cᵀ / mean(R));
             θ ← θ − lr·λ·θ − lr · u / max(1, rms(u)), in step t with gradient g and weight decay λ
    """

    by_rows = False

    def init(self, name: str, p: Tensor) -> dict[str, Tensor]:
        """Return the initial state: step 0, and mean squares of 0 (for a matrix, per row and per column; else per element)."""
        if p.dim() < 2:
            return {"step": torch.zeros(()), "exp_avg_sq": torch.zeros_like(p)}
        rows, columns = p.new_zeros(p.shape[:-1]), p.new_zeros(p.shape[:-2] + p.shape[-1:])
        return {"step": torch.zeros(()), "exp_avg_sq_row": rows, "exp_avg_sq_col": columns}

    def step(self, updates: Sequence[Update], step: StepSize) -> None:
        """Update the parameters in `updates` in place, one after the other."""
        if step.divisor != 1.0:
            torch._foreach_div_([u.gradient for u in updates], step.divisor)
        for u in updates:
            u.state["step"] += 1
            decay, square = 1.0 - math.pow(int(u.state["step"]), -0.8), u.gradient**2 + 1e-30
            if u.weight.dim() < 2:
                mean = u.state["exp_avg_sq"].mul_(decay).add_(square, alpha=1.0 - decay)
                update = mean.rsqrt()
            else:
                rows = u.state["exp_avg_sq_row"].mul_(decay).add_(square.mean(dim=-1), alpha=1.0 - decay)
                columns = u.state["exp_avg_sq_col"].mul_(decay).add_(square.mean(dim=-2), alpha=1.0 - decay)
                scaled = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_()
                update = scaled.unsqueeze(-1) * columns.unsqueeze(-2).rsqrt()
            update.mul_(u.gradient)
            update.div_((update.norm(2) / update.numel() ** 0.5).clamp_(min=1.0)).mul_(step.lr)
            if u.weight_decay != 0:
                u.weight.add_(u.weight, alpha=-u.weight_decay * step.lr)
            u.weight.add_(-update)


def learning_rate(optim: Optim, step: int, total: int) -> float:
    """Return the learning rate of step `step` (from 0) of `total`: linear warm-up, then the decay of `lr_scheduler_type`."""
    if step < optim.warmup_steps and optim.lr_scheduler_type not in _OWN_WARM_UP:
        return optim.learning_rate * (step + 1) / (optim.warmup_steps + 1)
    progress = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    if optim.lr_scheduler_type in DECAYS:
        return decayed(optim.learning_rate, optim.lr_scheduler_type, progress)
    arguments = json.dumps(optim.lr_scheduler_kwargs or {}, sort_keys=True)
    return optim.learning_rate * _factor(optim.lr_scheduler_type, arguments, optim.warmup_steps, total, optim.learning_rate)(step)


DECAYS = ("linear", "cosine", "constant")


def decayed(peak: float, kind: str, progress: float) -> float:
    """Return a decayed learning rate. `progress` is 0 at the start, where the rate is `peak`, and 1 at the end of the decay."""
    match kind:
        case "linear":
            return peak * max(0.0, 1 - progress)
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        case _:
            return peak


# The schedules whose warm-up starts above 0, or is configured by lr_scheduler_kwargs.
_OWN_WARM_UP = ("cosine_warmup_with_min_lr", "warmup_stable_decay")


@lru_cache(maxsize=16)
def _factor(name: str, arguments: str, warmup: int, total: int, peak: float) -> Callable[[int], float]:
    """Return transformers' schedule `name`: a function from a step to the step's learning rate as a share of `peak`.

    `arguments` is lr_scheduler_kwargs as JSON. `warmup` and `total` are numbers of steps.
    """
    from transformers.optimization import get_scheduler

    given = {**({"timescale": warmup or 10_000} if name == "inverse_sqrt" else {}), **json.loads(arguments)}
    # Skip the first step, whose rate is 0, except in the schedule that starts above 0.
    shift = int(name != "cosine_warmup_with_min_lr")
    total_for = None if "num_stable_steps" in given else total + shift  # transformers warns if it gets both
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak or 1.0)
    try:
        made = get_scheduler(name, optimizer, warmup + shift, total_for, scheduler_specific_kwargs=given)
        factor: Callable[[int], float] = made.lr_lambdas[0]
        factor(shift), factor(total)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"lr_scheduler_type {name} cannot have lr_scheduler_kwargs {given}: {error}.") from None
    return lambda step: float(factor(step + shift))


def check_schedule(optim: Optim) -> None:
    """Raise `UserError` if the schedule `lr_scheduler_type` does not accept `lr_scheduler_kwargs`."""
    if optim.lr_scheduler_type in DECAYS and optim.lr_scheduler_kwargs:
        raise UserError(
            f"lr_scheduler_type {optim.lr_scheduler_type} takes no lr_scheduler_kwargs; remove them, or use another schedule, "
            "such as cosine_with_min_lr."
        )
    learning_rate(optim, optim.warmup_steps, optim.warmup_steps + 100)
