"""The optimiser step: gradients of all micro-batches, their norm, clipping, the finite-gradient guard, and a rule's update.

Rules are in `rules.py`, `low_memory.py` and `flat_rules.py`. Half-precision weights have float32 masters, since a bfloat16 weight
loses any update smaller than 1/256 of itself, which is most of them at fine-tuning rates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from psigrad.compiled import OptimizerKernels
from psigrad.errors import UserError
from psigrad.optim.gradients import Sums, in_place
from psigrad.optim.low_memory import LowMemoryAdamW, has_codes, has_remainder, join, split
from psigrad.optim.rules import Adafactor, AdamW, Muon, StepSize, Update, UpdateRule, adamw_kernels, is_hidden_matrix
from psigrad.processes.parallel.shards import copies_of, held_of, like, local_of
from psigrad.processes.parallel.world import ALONE, World, sum_gradients

if TYPE_CHECKING:
    from psigrad.config import Optim

STATE_FILE = "optimizer.safetensors"
"""The file of a checkpoint that holds `Optimizer.state_dict()`."""


_HALF = (torch.bfloat16, torch.float16)
MAX_NONFINITE = 3
"""The number of consecutive steps without a finite gradient that ends a run."""


class NonFiniteError(UserError):
    """An error: the gradient was not finite for `MAX_NONFINITE` steps in a row, or a weight is not finite."""


class PassOutOfMemoryError(MemoryError):
    """An error: a pass ran out of memory, here or in another process. All processes raise it, and no weight has changed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error. PyTorch's CPU allocator has no exception class for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@dataclass(eq=False)
class Weight:
    """A trainable parameter, its master, and the state of its rule."""

    name: str
    parameter: nn.Parameter
    """The model's parameter; with FSDP it is sharded."""
    local: nn.Parameter
    """The part stored by this process: the parameter itself, or the rows of its shard."""
    master: nn.Parameter
    """The tensor that is stepped: `local`, or a float32 copy of it in half precision.

    If the weight is `uncopied` it is a placeholder of that shape, which takes no memory and only has a gradient.
    """
    uncopied: bool
    """True if the rule steps `local` itself: it is rounded stochastically, or the rule's state holds the rest of its master."""
    kernels: OptimizerKernels | None
    """The kernels that step `local` and the master along a bfloat16 gradient, if they can."""
    rule: UpdateRule
    state: dict[str, Tensor]
    buffer: Tensor | None = None
    """The float32 gradient of the last step with several passes. It is reused, since allocating it again among the activations of
    each step would fragment the heap.
    """

    @property
    def half(self) -> bool:
        """True if the weights are in half precision."""
        return self.master is not self.local

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that is applied."""
        return self.local.grad if self.master.grad is None else self.master.grad

    def tensors(self) -> dict[str, Tensor]:
        """Return the rule's state and the float32 master by kind."""
        return self.state if self.uncopied or not self.half else {**self.state, "master": self.master.detach()}

    def update(self, gradient: Tensor, weight_decay: float) -> Update:
        """Return the rule's view of this step."""
        weight = self.local if self.uncopied else self.master
        decay = weight_decay if weight.dim() > 1 else 0.0
        stored = None if self.uncopied or self.kernels is None else self.local
        return Update(self.name, weight, gradient, self.state, decay, stored)

    def move_gradient(self) -> None:
        """Move the gradient that autograd computed to the master, in float32."""
        if self.parameter.grad is None:
            return
        own, self.parameter.grad = local_of(self.parameter.grad), None
        if self.master.grad is not None:
            self.master.grad.add_(own)
        else:
            self.master.grad = self.buffer = own.float() if self.buffer is None else self.buffer.copy_(own)


class Optimizer:
    """Optimiser of named parameters by the rule in `optim.optimizer` or a custom `rule`. Weight decay acts on matrices only.

    `seed` seeds stochastic rounding. `reduces` switches the reduction of shards' gradients on and off, if they are reduced in the
    last pass of a step alone. With `recompute` the gradient of a large head is not stored: its rows are computed twice,
    for the norm and for the step. In a `world` of several processes gradients are summed over them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optim: Optim,
        *,
        rule: UpdateRule | None = None,
        recompute: bool = False,
        world: World = ALONE,
        seed: int = 0,
        reduces: Callable[[bool], None] | None = None,
    ) -> None:
        self.parameters, self.optim, self.world, self.reduces = dict(parameters), optim, world, reduces
        self.weights = {name: _weight(name, p, optim, rule, seed) for name, p in self.parameters.items()}
        self.nonfinite = self.updates = 0
        """The number of consecutive steps without a finite gradient, and the number of weight updates by this object."""
        rows = all(w.rule.by_rows for w in self.weights.values())
        self._half = [w for w in self.weights.values() if w.half]
        self._sharded = [w for w in self.weights.values() if w.local is not w.parameter]
        if self._sharded and not rows:
            what = "bf16_stochastic_round" if optim.bf16_stochastic_round else f"optimizer {optim.optimizer}"
            raise UserError(f"{what} needs whole matrices, and strategy=fsdp shards them. Use strategy=ddp.")
        self.sums = Sums(self.parameters.values(), recompute=recompute and world.size == 1 and rows)
        rules = dict.fromkeys(w.rule for w in self.weights.values())
        self._by_rule = [(each, [w for w in self.weights.values() if w.rule == each]) for each in rules]

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The tensors that are stepped, by name (see `Weight.master`)."""
        return {name: w.master for name, w in self.weights.items()}

    def step(self, losses: Iterable[Callable[[], Tensor]], lr: float) -> float | None:
        """Add up the gradients of `losses` (one micro-batch each) and step at rate `lr`.

        Returns the gradient norm before clipping, or None if it is not finite. In that case nothing is stepped.
        """
        norms = step_together([(self, lr)], losses)
        return None if norms is None else norms[0]

    def clear(self) -> None:
        """Drop all gradients."""
        self.sums.forget()
        for w in self.weights.values():
            w.parameter.grad = w.local.grad = w.master.grad = None

    @property
    def has_buffers(self) -> bool:
        """True if the last step of half-precision weights had several passes."""
        return any(w.buffer is not None for w in self._half)

    @contextlib.contextmanager
    def float32_sums(self) -> Iterator[None]:
        """Add up gradients of half-precision weights on their float32 masters inside this context.

        A sum in bfloat16 of 1,000 micro-batches is 3 % off.
        """
        handles = []
        for w in self._half:
            w.move_gradient()
            handles.append(w.parameter.register_post_accumulate_grad_hook(partial(_moved, w)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def restore_precision(self) -> None:
        """Move the gradients of a single pass from the masters back to the weights, in the weights' precision."""
        for w in self._half:
            if (total := w.master.grad) is not None:
                w.parameter.grad, w.master.grad = total.to(w.parameter.dtype), None
            w.buffer = None

    def settle(self) -> None:
        """End the backward passes of a step: store each gradient in one place, on the weight or on its master."""
        self.sums.settle()
        for w in self._half:
            if w.parameter in self.sums.wide:
                total = self.sums.wide.pop(w.parameter)
                w.master.grad = total if w.master.grad is None else w.master.grad.add_(total)
            if w.master.grad is not None:
                w.move_gradient()

    @property
    def unsharded(self) -> list[nn.Parameter]:
        """The tensors whose gradients several processes sum: the masters of weights that are not sharded."""
        return [w.master for w in self.weights.values() if w.local is w.parameter]

    def norm(self) -> float:
        """Return the gradient's norm, and move the gradient to where the rule reads it.

        That is the master, except for half-precision weights that kernels step. With shards it is the norm of the whole gradient.
        """
        for w in self._sharded:
            w.local.grad = None if w.parameter.grad is None else local_of(w.parameter.grad)
        for w in self._half:
            if w.kernels is None and not w.uncopied and w.local.grad is not None:
                w.master.grad = w.local.grad.float()
        if self._sharded:
            return self._norm_over_ranks()
        by_torch = [w for w in self.weights.values() if w.kernels is None or w.master.grad is not None]
        stored = _total_norm([w.gradient for w in by_torch if w.gradient is not None])
        squares = [float(block.norm()) ** 2 for weight in self.sums.uses for _, block in self.sums.blocks(weight)]
        if found := next((w.kernels for w in self._half if w.kernels is not None), None):
            half = [w.local.grad for w in self._half if w.kernels is not None and w.local.grad is not None]
            squares.append(found.squared_norm(half) if half else 0.0)
        return math.sqrt(stored**2 + math.fsum(squares)) if squares else stored

    def _norm_over_ranks(self) -> float:
        """Return the norm from the parts that each process stores. A weight that is not sharded counts once."""
        parts, learns = [0.0, 0.0], [w for w in self.weights.values() if w.gradient is not None]
        squares = [w.gradient.double().pow(2).sum() for w in learns if w.gradient is not None]
        for w, square in zip(learns, torch.stack(squares).tolist() if squares else [], strict=True):
            parts[w.local is w.parameter] += square / copies_of(w.parameter, self.world.size)
        return math.sqrt(float(self.world.all_reduce(torch.tensor(parts[0], dtype=torch.float64))) + parts[1])

    @torch.no_grad()
    def apply(self, norm: float, lr: float) -> None:
        """Step at rate `lr` along the gradient, whose norm is `norm`, clipped to `max_grad_norm`."""
        self.updates += 1
        step, decay = StepSize(lr, norm, self.optim.max_grad_norm), self.optim.weight_decay
        changed: list[Tensor] = []
        for rule, weights in self._by_rule:
            updates = [w.update(g, decay) for w in weights if (g := w.gradient) is not None]
            if updates:
                rule.step(updates, step)
                changed += [x for u in updates for x in (u.weight, u.stored) if x is not None]
        for weight in [w for w in self.weights.values() if w.parameter in self.sums.uses] if self.sums.uses else ():
            self._step_by_rows(weight, step)
            changed.append(weight.master)
        # Kernels and fused steps do not increment the versions by which other code notices a change.
        torch.autograd.graph.increment_version(changed)
        self.sums.forget()
        for w in self._half:
            if w.master.grad is not None and not w.uncopied:
                w.local.copy_(w.master)

    def _step_by_rows(self, w: Weight, step: StepSize) -> None:
        """Step along a gradient that is not stored, one block of rows at a time."""
        for rows, gradient in self.sums.blocks(w.parameter):
            state = {key: x[rows] if x.dim() else x.clone() for key, x in w.state.items()}
            whole = w.update(gradient, self.optim.weight_decay)
            w.rule.step([whole._replace(weight=w.master[rows], state=state)], step)
        w.state["step"] += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the rules' state and the float32 masters as "kind.<parameter>", sharded if the weights are."""
        weights = self.weights.values()
        return {f"{kind}.{w.name}": like(x, w.parameter) for w in weights for kind, x in w.tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`. The state of an absent parameter becomes 0.

        Raises `UserError` if the state belongs to other parameters or to another rule. In that case nothing is changed.
        """
        tensors, masters = dict(tensors), {f"master.{name}" for name in self.weights}
        for name, w in self.weights.items():  # what another device has stored: a whole master here, and there a part of it
            master, rest = f"master.{name}", f"remainder.{name}"
            if "remainder" in w.state and rest not in tensors and master in tensors:
                tensors[rest] = split(tensors.pop(master))[1]
            elif "remainder" not in w.state and rest in tensors:
                tensors[master] = join(w.local, tensors.pop(rest).to(w.local.device))
        own = {f"{kind}.{w.name}": x for w in self.weights.values() for kind, x in w.tensors().items()}
        for key in tensors:
            kind, _, name = key.partition(".")
            if name not in self.weights:
                raise UserError(f"The optimiser's state holds {name!r}, which is not a trainable parameter of this run.")
            if key not in own.keys() | masters:
                raise UserError(f"The optimiser's state holds {kind!r} of {name!r}, which belongs to another optimizer.")
        for key, value in tensors.items():
            name = key.partition(".")[2]
            if lacks := [k for k in self.weights[name].state if f"{k}.{name}" not in tensors]:
                raise UserError(f"The optimiser's state of {name!r} is incomplete: {', '.join(lacks)} is missing.")
            if key in own and value.shape != own[key].shape:
                shapes = f"shape {list(value.shape)}; the parameter has {list(own[key].shape)}"
                raise UserError(f"The optimiser's state holds {key!r} of {shapes}.")
        for key, x in own.items():
            if key in tensors:
                x.copy_(tensors[key])
            elif key not in masters:
                x.zero_()


def check_gradients(nonfinite: int, step: int) -> None:
    """Raise `NonFiniteError` if `nonfinite`, the number of consecutive steps without a finite gradient until `step`, is
    too big.
    """
    if nonfinite >= MAX_NONFINITE:
        raise NonFiniteError(
            f"The gradient was not finite for {nonfinite} steps in a row, up to step {step}. No such step was applied, and the "
            "last checkpoint is sound. Lower learning_rate, or look at the rewards and the inputs of these steps."
        )


def check_weights(weights: Mapping[str, Tensor], step: int) -> None:
    """Raise `NonFiniteError` if a weight is not finite, since no run should resume from it."""
    if bad := [name for name, x in weights.items() if x.numel() and not _is_finite(x)]:
        raise NonFiniteError(
            f"The weights are not finite after step {step} ({', '.join(bad[:3])}), so they were not saved. The last checkpoint "
            "is sound. Lower learning_rate."
        )


def _is_finite(x: Tensor) -> bool:
    least, most = x.detach().aminmax()  # one pass, without a tensor of that size
    return math.isfinite(float(least)) and math.isfinite(float(most))


def _weight(name: str, parameter: nn.Parameter, optim: Optim, rule: UpdateRule | None, seed: int) -> Weight:
    """Return the parameter with its master and its rule."""
    local = held_of(parameter)
    adamw = rule is None and optim.optimizer in ("adamw", "adamw_8bit")
    half = local.dtype in _HALF
    stochastic = adamw and optim.bf16_stochastic_round and local.dtype == torch.bfloat16
    remainder = adamw and not stochastic and has_remainder(local)
    master = local
    if stochastic or remainder:
        master = nn.Parameter(local.new_empty((), dtype=torch.float32).expand(local.shape))
    elif half:
        master = nn.Parameter(local.detach().float())
    kernels = adamw_kernels(local.dtype, local.device.type) if adamw and half and local.is_contiguous() else None
    rule = rule or _rule(name, master, optim, stochastic, remainder, seed)
    return Weight(name, parameter, local, master, stochastic or remainder, kernels, rule, rule.init(name, master))


def _rule(name: str, p: Tensor, optim: Optim, stochastic: bool, remainder: bool, seed: int) -> UpdateRule:
    """Return the rule of a parameter."""
    betas, eight_bits = (optim.adam_beta1, optim.adam_beta2), optim.optimizer == "adamw_8bit"
    if optim.optimizer == "adafactor":
        return Adafactor()
    if optim.optimizer == "muon" and is_hidden_matrix(name, p):
        return Muon()
    if stochastic or remainder or (eight_bits and has_codes(name, p)):
        return LowMemoryAdamW(betas, optim.adam_epsilon, eight_bits, seed, remainder)
    return AdamW(betas, optim.adam_epsilon)


def _moved(w: Weight, _: Tensor) -> None:
    w.move_gradient()


def _total_norm(gradients: list[Tensor]) -> float:
    if any(g.dtype in _HALF for g in gradients):
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, torch.float32))))
    if len(gradients) == 1:
        return float(torch.linalg.vector_norm(gradients[0]))  # the same result in a tenth of the time
    return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0


def _reduced_once(losses: Iterable[Callable[[], Tensor]], reduces: Callable[[bool], None]) -> Iterator[Callable[[], Tensor]]:
    """Yield the losses, with the reduction of gradients switched off in all passes but the last."""
    held: Callable[[], Tensor] | None = None
    for loss in losses:
        reduces(False)
        if held is not None:
            yield held
        held = loss
    reduces(True)
    if held is not None:
        yield held


def add_up(optimizers: Sequence[Optimizer], losses: Iterable[Callable[[], Tensor]]) -> None:
    """Replace the gradients of the optimisers by the gradient of the sum of `losses`, one micro-batch each.

    Raise `PassOutOfMemoryError` on all processes if one of them runs out of memory, unless a sharded pass needs all of them.
    """
    failed: Exception | None = None
    world = optimizers[0].world
    passes, alone = 0, [optimizer for optimizer in optimizers if optimizer.world.size == 1]
    later = [optimizer for optimizer in alone if not optimizer.has_buffers]
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            optimizer.clear()
            if optimizer not in later:
                stack.enter_context(optimizer.float32_sums())
        stack.enter_context(in_place(*(optimizer.sums for optimizer in optimizers)))
        if optimizers[0].reduces is not None and len(optimizers) == 1:
            losses = _reduced_once(losses, optimizers[0].reduces)
        try:
            for passes, loss in enumerate(losses, 1):  # one by one: the activations of a pass are freed before the next pass
                for optimizer in later if passes == 2 else ():
                    stack.enter_context(optimizer.float32_sums())
                loss().backward()
        except Exception as error:
            if world.lockstep or not is_out_of_memory(error):
                raise
            failed = error
    if failed and world.size == 1:
        raise PassOutOfMemoryError("A pass ran out of memory.") from failed
    for optimizer in alone if passes == 1 else ():
        optimizer.restore_precision()
    for optimizer in optimizers:
        optimizer.settle()
        if sum_gradients(optimizer.world, optimizer.unsharded, failed is not None):
            raise PassOutOfMemoryError("A pass of a process ran out of memory.") from failed


def apply_together(rates: Sequence[tuple[Optimizer, float]]) -> list[float]:
    """Step several optimisers along their gradients, each at its rate and clipped by its own norm.

    If a norm is not finite, nothing is stepped and the first optimiser counts the failure. Returns the norms before clipping.
    """
    norms = [optimizer.norm() for optimizer, _ in rates]
    if not all(map(math.isfinite, norms)):
        rates[0][0].nonfinite += 1
        return norms
    rates[0][0].nonfinite = 0
    for (optimizer, lr), norm in zip(rates, norms, strict=True):
        optimizer.apply(norm, lr)
    return norms


def step_together(rates: Sequence[tuple[Optimizer, float]], losses: Iterable[Callable[[], Tensor]]) -> list[float] | None:
    """Step several optimisers on the sum of `losses` by `apply_together`.

    Returns the norms before clipping, or None if one is not finite.
    """
    add_up([optimizer for optimizer, _ in rates], losses)
    norms = apply_together(rates)
    return norms if all(map(math.isfinite, norms)) else None
