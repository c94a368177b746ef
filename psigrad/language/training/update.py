"""One optimiser step: AdamW with float32 master weights, a schedule that is a pure function of the step, clipping, and a
guard.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from psigrad.config import Optim
from psigrad.language.models.gradients import Sums, in_place
from psigrad.language.models.native.kernels import HalfPrecision, MasterWeight, kernels
from psigrad.processes.parallel.shards import held_of, local_of
from psigrad.processes.parallel.world import ALONE, World, sum_gradients
from psigrad.records.checkpoint import CheckpointError
from psigrad.runs.state import MAX_NONFINITE, NonFiniteError


def learning_rate(optim: Optim, step: int, total: int) -> float:
    """The rate of step `step` (from 0) of `total`: linear warm-up, then linear or cosine decay to 0, or constant."""
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / (optim.warmup_steps + 1)
    progress = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    match optim.lr_scheduler_type:
        case "linear":
            return optim.learning_rate * max(0.0, 1 - progress)
        case "cosine":
            return optim.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        case _:
            return optim.learning_rate


class Optimizer:
    """AdamW over named parameters.

    Half-precision parameters are stepped through float32 copies: a bfloat16 weight swallows any update smaller than 1/256 of
    itself, which is most of them at fine-tuning rates. With `recompute` the gradient of a large head is not stored: its rows are
    made twice, for the norm and for the step. In a `world` of several processes the gradients are summed over them.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optim: Optim, *, recompute: bool = False, world: World = ALONE
    ) -> None:
        self.world = world
        self.parameters, self.optim = dict(parameters), optim
        self.held = {name: held_of(p) for name, p in self.parameters.items()}
        """What this process holds of each parameter: all of it, or the rows of its shard."""
        half = (torch.bfloat16, torch.float16)
        self.masters = {name: nn.Parameter(p.detach().float()) if p.dtype in half else p for name, p in self.held.items()}
        low_precision = {name: p for name, p in self.held.items() if self.masters[name] is not p}
        stepped = {n: p for n, p in low_precision.items() if p.is_contiguous() and steps_natively(p.dtype, p.device.type)}
        self._copied = [(p, self.masters[name]) for name, p in low_precision.items() if name not in stepped]
        self._narrow = {name: self.parameters[name] for name in low_precision}
        betas = (optim.adam_beta1, optim.adam_beta2)
        self.adamw = AdamW(self.masters, betas, optim.adam_epsilon, optim.weight_decay, stepped)
        self.nonfinite = self.updates = 0
        """Steps in a row without a finite gradient; updates of the weights by this object."""
        self.sums = Sums(self.parameters.values(), recompute=recompute and world.size == 1)

    def step(self, losses: Iterable[Callable[[], Tensor]], lr: float) -> float | None:
        """Add up the gradients of `losses` (one micro-batch each) and step at rate `lr`.

        Returns the gradient norm before clipping, or None where it is not finite: then nothing is stepped.
        """
        norms = step_together([(self, lr)], losses)
        return None if norms is None else norms[0]

    def clear(self) -> None:
        """Forget the gradients."""
        self.sums.forget()
        for p in (*self.parameters.values(), *self.held.values(), *self.masters.values()):
            p.grad = None

    @contextlib.contextmanager
    def summing_wide(self) -> Iterator[None]:
        """Inside, gradients of half-precision weights are added up on their float32 masters: a sum in bfloat16 of 1,000
        micro-batches is 3 % off.
        """
        for name in self._narrow:
            self._widen(name)
        names = {p: name for name, p in self._narrow.items()}
        handles = [p.register_post_accumulate_grad_hook(lambda p: self._widen(names[p])) for p in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _widen(self, name: str) -> None:
        """Move what autograd has for a weight to its master."""
        p, master = self.parameters[name], self.masters[name]
        if p.grad is not None:
            own, p.grad = local_of(p.grad), None
            master.grad = own.float() if master.grad is None else master.grad.add_(own)

    def settle(self) -> None:
        """End the backward passes of a step: each gradient stands in one place, on the weight or on its master."""
        self.sums.settle()
        for name, p in self._narrow.items():
            master = self.masters[name]
            if p in self.sums.wide:
                total = self.sums.wide.pop(p)
                master.grad = total if master.grad is None else master.grad.add_(total)
            if master.grad is not None:
                self._widen(name)

    def whole_masters(self) -> list[Tensor]:
        """Where several processes add up the gradients that are not in shards: the same place in each, with a gradient or not."""
        return [self.masters[name] for name, p in self.parameters.items() if self.held[name] is p]

    def norm(self) -> float:
        """The norm of the gradient that was added up, where it will be applied: on the masters, which those of half-precision
        weights are copied to unless the kernels step them. Of gradients in shards it is the norm of the whole.
        """
        shards = [(p, own) for p, own in zip(self.parameters.values(), self.held.values(), strict=True) if own is not p]
        for p, own in shards:
            own.grad = None if p.grad is None else local_of(p.grad)
        for p, master in self._copied:
            if p.grad is not None:
                master.grad = p.grad.float()
        if shards:
            return self._norm_over_ranks()
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        stored = float(nn.utils.get_total_norm(gradients)) if gradients else 0.0
        squares = [float(block.norm()) ** 2 for weight in self.sums.uses for _, block in self.sums.blocks(weight)]
        squares += [self.adamw.squared_norm_bf16()] if self.adamw.low_precision else []
        return math.sqrt(stored**2 + math.fsum(squares)) if squares else stored

    def _norm_over_ranks(self) -> float:
        """As `norm`, from what each process holds; what is not in shards counts once."""
        parts = [0.0, 0.0]
        for name, own in self.held.items():
            gradient = self.masters[name].grad if self.masters[name].grad is not None else own.grad
            if gradient is not None:
                parts[own is self.parameters[name]] += float(gradient.double().pow(2).sum())
        return math.sqrt(float(self.world.all_reduce(torch.tensor(parts[0], dtype=torch.float64))) + parts[1])

    def apply(self, norm: float, lr: float) -> None:
        """Step at rate `lr` along the gradient, whose norm is `norm`, clipped to `max_grad_norm`."""
        self.updates += 1
        most = self.optim.max_grad_norm
        put_off = {name: self.sums.blocks(p) for name, p in self.parameters.items() if p in self.sums.uses}
        self.adamw.step(lr, put_off, shrink=norm / most if 0 < most < norm else 1.0)
        self.sums.forget()
        with torch.no_grad():
            for name in self._narrow:
                if self.masters[name].grad is not None:  # the kernels step the others, weight and master at once
                    self.held[name].copy_(self.masters[name])

    def check(self, step: int) -> None:
        """Raise `NonFiniteError` when too many steps in a row had no finite gradient."""
        if self.nonfinite >= MAX_NONFINITE:
            raise NonFiniteError(
                f"The gradient was not finite for {self.nonfinite} steps in a row, up to step {step}; no such step was applied "
                "and the last checkpoint is sound. Lower the learning rate or look at the rewards in rollouts.jsonl."
            )


def add_up(optimizers: Sequence[Optimizer], losses: Iterable[Callable[[], Tensor]]) -> None:
    """Give the optimisers the gradient of the sum of `losses`, one micro-batch each, in place of what they had."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            optimizer.clear()
            if optimizer.world.size > 1:
                stack.enter_context(optimizer.summing_wide())
        stack.enter_context(in_place(*(optimizer.sums for optimizer in optimizers)))
        for i, loss in enumerate(losses):  # one after the other: what a pass kept may be let go of when the next is asked for
            for optimizer in optimizers if i == 1 else ():
                stack.enter_context(optimizer.summing_wide())
            loss().backward()
    for optimizer in optimizers:
        optimizer.settle()
        sum_gradients(optimizer.world, optimizer.whole_masters())


def step_together(rates: Sequence[tuple[Optimizer, float]], losses: Iterable[Callable[[], Tensor]]) -> list[float] | None:
    """Step several optimisers on the sum of `losses`, each at its rate and clipped by its own norm.

    Returns the norms before clipping, or None where one is not finite: then nothing is stepped, and the first optimiser counts
    it.
    """
    add_up([optimizer for optimizer, _ in rates], losses)
    first = rates[0][0]
    norms = [optimizer.norm() for optimizer, _ in rates]
    if not all(map(math.isfinite, norms)):
        first.nonfinite += 1
        return None
    first.nonfinite = 0
    for (optimizer, lr), norm in zip(rates, norms, strict=True):
        optimizer.apply(norm, lr)
    return norms


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
        self.state = {name: self._fresh(p) for name, p in self.parameters.items()}

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
        return _native().squared_norm(gradients) if gradients else 0.0

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
        _native().step(found, lr, self.betas, self.eps, 1 / shrink)

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

    def _fresh(self, p: Tensor) -> dict[str, Tensor]:
        # fused, torch counts steps on the parameter's device
        moments = {key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in _MOMENTS}
        return {"step": torch.zeros((), device=p.device), **moments}


def _native() -> HalfPrecision:
    native = kernels()
    assert not isinstance(native, str), "without kernels no weight is stepped in low precision"
    return native.half_precision
