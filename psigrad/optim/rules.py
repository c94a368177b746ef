"""What steps the weights: AdamW (in less memory: `frugal_adamw.py`), Muon for hidden matrices, and Adafactor, each with a state
that knows the parameters' names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, muon
from torch.optim.adamw import adamw

from psigrad.kernels.kernels import HalfPrecision, MasterWeight, kernels
from psigrad.records.checkpoint import CheckpointError


class Stepper(Protocol):
    """Steps parameters along their gradients, and remembers what it needs."""

    weight_decay: float

    def step(self, lr: float, blocks: Mapping[str, Iterable[tuple[slice, Tensor]]] | None = None, *, shrink: float = 1.0) -> None:
        """Step at rate `lr` along the gradients, divided by `shrink`, and along those that come as `blocks` of rows."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers as "kind.<parameter>"."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`. Raises `CheckpointError` where they are of other parameters."""
        ...


_MOMENTS = ("exp_avg", "exp_avg_sq")


def steps_natively(dtype: torch.dtype, device: str) -> bool:
    """Whether an `AdamW` can step weights of this type on this device as `low_precision`."""
    # the kernels are asked for last: they may have to be compiled
    return dtype == torch.bfloat16 and device == "cpu" and not isinstance(kernels(), str)


class AdamW:
    """`torch.optim.AdamW`'s fused step (Loshchilov & Hutter 2019, arXiv:1711.05101) by its functional form, with a state that
    knows the parameters' names. Weight decay acts on matrices only.

    `low_precision` holds bfloat16 weights on a CPU by the name of their float32 master. The kernels step both with the
    gradient of the former.

    torch's class imports the compiler before its first step, which takes over a second and sixty megabytes. And it makes the
    moments at that step, among tensors that come and go: the holes that those leave fit nothing any more, which took a tenth more
    memory where the vocabulary is large. Here they are made first.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        low_precision: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.parameters, self.low_precision = dict(parameters), dict(low_precision or {})
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.state = {name: self._fresh(name, p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, lr: float, blocks: Mapping[str, Iterable[tuple[slice, Tensor]]] | None = None, *, shrink: float = 1.0) -> None:
        """Step at rate `lr` along the gradients that there are, divided by `shrink`, and along those that come as `blocks` of a
        parameter's rows. The division happens as they are read: a pass of its own over them takes as long as a third of the step.
        """
        learning = [name for name, p in self.parameters.items() if p.grad is not None]
        matrices = [name for name in learning if self.parameters[name].dim() > 1]
        others = [name for name in learning if self.parameters[name].dim() <= 1]
        for names, decay in ((matrices, self.weight_decay), (others, 0.0)):
            if names:
                states = [self.state[name] for name in names]
                moments = tuple([state[key] for state in states] for key in _MOMENTS)
                parameters = [self.parameters[name] for name in names]
                gradients = [p.grad for p in parameters if p.grad is not None]
                self._step(lr, decay, parameters, gradients, moments, [state["step"] for state in states], shrink)
        for name, parts in (blocks or {}).items():
            p, state = self.parameters[name], self.state[name]
            steps = state["step"].clone()
            for rows, gradient in parts:
                moments = tuple([state[key][rows]] for key in _MOMENTS)
                self._step(lr, self.weight_decay if p.dim() > 1 else 0.0, [p[rows]], [gradient], moments, [steps.clone()], shrink)
            state["step"] += 1
        low_precision = [name for name, p in self.low_precision.items() if p.grad is not None]
        if low_precision:
            self._step_low_precision(low_precision, lr, shrink)
        # these steps change parameters without counting their versions up, by which others notice
        changed = [self.parameters[name] for name in (*learning, *(blocks or {}), *low_precision)]
        torch.autograd.graph.increment_version(changed + [self.low_precision[name] for name in low_precision])

    def _step(
        self,
        lr: float,
        decay: float,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: tuple[list[Tensor], ...],
        steps: list[Tensor],
        shrink: float,
    ) -> None:
        step: Any = adamw
        step(
            parameters,
            gradients,
            *moments,
            [],
            steps,
            fused=True,
            grad_scale=torch.tensor(shrink, device=parameters[0].device) if shrink != 1.0 else None,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=decay,
            eps=self.eps,
            maximize=False,
        )

    def squared_norm_bf16(self) -> float:
        """Σ g² over the gradients of `low_precision`."""
        gradients = [p.grad for p in self.low_precision.values() if p.grad is not None]
        return native_half_precision().squared_norm(gradients) if gradients else 0.0

    def _step_low_precision(self, names: list[str], lr: float, shrink: float) -> None:
        steps = [self.state[name]["step"] for name in names]
        torch._foreach_add_(steps, 1)
        found = []
        for name, step in zip(names, torch.stack(steps).tolist(), strict=True):
            stored, moments = self.low_precision[name], [self.state[name][key] for key in _MOMENTS]
            assert stored.grad is not None
            decay = self.weight_decay if stored.dim() > 1 else 0.0
            first, second = moments
            found.append(MasterWeight(self.parameters[name], stored, stored.grad.contiguous(), first, second, int(step), decay))
        native_half_precision().step(found, lr, self.betas, self.eps, 1 / shrink)

    def tensors(self) -> dict[str, Tensor]:
        """Moments and step counts as "exp_avg.<name>" and so on."""
        return {f"{key}.{name}": tensor for name, state in self.state.items() for key, tensor in state.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`. Raises `CheckpointError` where they are of other parameters, and then changes nothing."""
        own = self.tensors()
        for key, value in tensors.items():
            name = key.partition(".")[2]
            if key not in own:
                raise CheckpointError(f"The optimiser's state holds {name!r}, which is not a trainable parameter of this run.")
            if lacks := [kind for kind in self.state[name] if f"{kind}.{name}" not in tensors]:
                raise CheckpointError(f"The optimiser's state of {name!r} is incomplete: {', '.join(lacks)} is missing.")
            if value.shape != own[key].shape:
                raise CheckpointError(
                    f"The optimiser's state holds {key!r} of shape {list(value.shape)}; the parameter has {list(own[key].shape)}."
                )
        for key, held in own.items():
            held.copy_(tensors[key]) if key in tensors else held.zero_()

    def _fresh(self, name: str, p: Tensor) -> dict[str, Tensor]:
        # fused, torch counts steps on the parameter's device
        moments = {key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in _MOMENTS}
        return {"step": torch.zeros((), device=p.device), **moments}


def native_half_precision() -> HalfPrecision:
    """The kernels that step weights in low precision."""
    native = kernels()
    assert not isinstance(native, str), "without kernels no weight is stepped in low precision"
    return native.half_precision


_NOT_HIDDEN = re.compile(r"embed|wte|wpe|head|score", re.IGNORECASE)
MOMENTUM = 0.95


def is_hidden_matrix(name: str, p: Tensor) -> bool:
    """Whether Muon steps a parameter: a matrix that is neither an embedding nor a head. Those of an adapter are."""
    return p.dim() == 2 and not _NOT_HIDDEN.search(name)


class Muon:
    """`torch.optim.Muon`'s step on hidden matrices, by its functional form; `rest` steps all other parameters.

    Formula: B ← μB + g;  W ← W − lr·λ·W − 0.2·lr·√max(n, m) · NS(g + μB), with the Newton–Schulz iteration NS, which makes all
    singular values about 1, and μ = 0.95. The factor gives the steps AdamW's size, so that its rates serve (Jordan 2024; Liu et
    al. 2025, arXiv:2502.16982).
    """

    def __init__(self, parameters: Mapping[str, Tensor], rest: AdamW) -> None:
        self.parameters, self.rest = dict(parameters), rest
        self.buffers = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    @property
    def weight_decay(self) -> float:
        """Of all matrices."""
        return self.rest.weight_decay

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        self.rest.weight_decay = value

    @torch.no_grad()
    def step(self, lr: float, blocks: Mapping[str, Iterable[tuple[slice, Tensor]]] | None = None, *, shrink: float = 1.0) -> None:
        """See `Stepper`."""
        self.rest.step(lr, blocks, shrink=shrink)
        learning = {name: p.grad / shrink for name, p in self.parameters.items() if p.grad is not None}
        muon(
            [self.parameters[name] for name in learning],
            list(learning.values()),
            [self.buffers[name] for name in learning],
            lr=lr,
            weight_decay=self.weight_decay,
            momentum=MOMENTUM,
            nesterov=True,
            ns_coefficients=(DEFAULT_A, DEFAULT_B, DEFAULT_C),
            eps=EPS,
            ns_steps=DEFAULT_NS_STEPS,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )

    def tensors(self) -> dict[str, Tensor]:
        """See `Stepper`."""
        return {**self.rest.tensors(), **{f"momentum_buffer.{name}": buffer for name, buffer in self.buffers.items()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Stepper`."""
        own = {f"momentum_buffer.{name}": buffer for name, buffer in self.buffers.items()}
        self.rest.load({key: value for key, value in tensors.items() if not key.startswith("momentum_buffer.")})
        _fill(own, {key: value for key, value in tensors.items() if key.startswith("momentum_buffer.")})


class Adafactor:
    """transformers' Adafactor with an outer learning rate, as its `Trainer` makes it: of a matrix it keeps the mean squares of
    the gradient's rows and columns alone (Shazeer & Stern 2018, arXiv:1804.04235). Weight decay acts on matrices only.
    """

    _KINDS = ("step", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")

    def __init__(self, parameters: Mapping[str, Tensor], weight_decay: float) -> None:
        from transformers.optimization import Adafactor as TheirAdafactor

        self.parameters, self.weight_decay = dict(parameters), weight_decay
        groups = [{"params": [p for p in parameters.values() if (p.dim() > 1) is matrix]} for matrix in (True, False)]
        self.inner = TheirAdafactor(groups, lr=0.0, scale_parameter=False, relative_step=False)

    def step(self, lr: float, blocks: Mapping[str, Iterable[tuple[slice, Tensor]]] | None = None, *, shrink: float = 1.0) -> None:
        """See `Stepper`; it takes no blocks."""
        assert not blocks, "Adafactor needs whole gradients"
        for group, decay in zip(self.inner.param_groups, (self.weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        if shrink != 1.0:
            torch._foreach_div_([p.grad for p in self.parameters.values() if p.grad is not None], shrink)
        self.inner.step()

    def tensors(self) -> dict[str, Tensor]:
        """See `Stepper`. A parameter without a gradient so far has nothing to remember."""
        held = {name: self.inner.state[p] for name, p in self.parameters.items() if p in self.inner.state}
        return {f"{kind}.{n}": torch.as_tensor(state[kind]) for n, state in held.items() for kind in self._KINDS if kind in state}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Stepper`."""
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            if name not in self.parameters or kind not in self._KINDS:
                raise CheckpointError(
                    f"The optimiser's state holds {key!r}, which adafactor has not; it is of another optimizer."
                )
            state = self.inner.state[self.parameters[name]]
            state[kind] = int(value) if kind == "step" else value.clone()
            state["RMS"] = 0.0  # measured before it is read


def _fill(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy a state into place. Raises `CheckpointError` where it is another one's."""
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())[0]
        raise CheckpointError(f"The optimiser's state and this run differ in {odd!r}; they are of different parameters.")
    for key, held in own.items():
        held.copy_(tensors[key])
