"""The optimiser step: sum the gradients of all micro-batches, check and clip their norm, and apply an update rule to the weights.

A half-precision weight usually has a float32 copy, its master, which the rule updates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from psigrad.compiled import OptimizerKernels
from psigrad.errors import UserError
from psigrad.optim.gradients import PassOutOfMemoryError, Sums, in_place, is_out_of_memory
from psigrad.optim.low_memory import LowMemoryAdamW, copy_masters, has_codes, has_remainder, join, split
from psigrad.optim.rules import Adafactor, AdamW, Muon, StepSize, Update, UpdateRule, adamw_kernels, is_hidden_matrix
from psigrad.processes.parallel.shards import first_element, local_of, local_parameter, num_replicas, shard_like
from psigrad.processes.parallel.world import ALONE, World, sum_gradients

if TYPE_CHECKING:
    from psigrad.config import Optim

STATE_FILE = "optimizer.safetensors"
"""The file in a checkpoint with the tensors of `Optimizer.state_dict()`."""

Losses = Iterable[Callable[[], Tensor]]
Read = Callable[[Tensor], Any]  # `to_list`, or a function that also copies other tensors in the same transfer
to_list: Read = methodcaller("tolist")
_HALF = (torch.bfloat16, torch.float16)
MAX_NONFINITE = 3
"""The number of consecutive steps without a finite gradient after which a run ends with an error."""


class NonFiniteError(UserError):
    """Raised if the gradient was not finite for `MAX_NONFINITE` steps in a row, or if a weight is not finite."""


@dataclass(eq=False)
class Weight:
    """A trainable parameter with its update rule and the rule's state. In half precision, it can also have a float32 master."""

    name: str
    parameter: nn.Parameter
    """The model's parameter; with FSDP it is sharded."""
    local: nn.Parameter
    """The part of the parameter that this process stores: the parameter itself, or its shard's rows."""
    master: nn.Parameter
    """The tensor that the rule updates: `local`, or its float32 copy if `local` is in half precision.

    With `no_master`, the rule updates `local`, and this is a placeholder of its shape, without memory, that only has a gradient.
    """
    no_master: bool
    """True if the rule updates a half-precision `local` without a master: by stochastic rounding or a remainder in `state`."""
    kernels: OptimizerKernels | None
    """The kernels that update `local` and its master from a bfloat16 gradient; None if there are none."""
    rule: UpdateRule
    state: dict[str, Tensor]
    first: int = 0
    """The index of the first element of `local` in the whole parameter."""
    buffer: Tensor | None = None
    """The tensor for the float32 sum of gradients in a step with several passes. It is reused in the next step, because a new
    allocation between activations would fragment the heap.
    """

    @property
    def is_half(self) -> bool:
        """True if the weight is in half precision."""
        return self.master is not self.local

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that the next step applies: `master.grad`, or if it is None, `local.grad`."""
        return self.local.grad if self.master.grad is None else self.master.grad

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint stores, by name: the rule's state, and the float32 master as "master" if there is one."""
        return self.state if self.no_master or not self.is_half else {**self.state, "master": self.master.detach()}

    def update(self, gradient: Tensor, weight_decay: float) -> Update:
        """Return the `Update` that the rule receives for this weight in one step. Vectors have no weight decay."""
        weight = self.local if self.no_master else self.master
        decay = weight_decay if weight.dim() > 1 else 0.0
        stored = None if self.no_master or self.kernels is None else self.local
        return Update(self.name, weight, gradient, self.state, decay, stored, self.first)

    def move_gradient(self) -> None:
        """Add the parameter's gradient to the master's gradient in float32, and remove it from the parameter."""
        if self.parameter.grad is None:
            return
        own, self.parameter.grad = local_of(self.parameter.grad), None
        if self.master.grad is not None:
            self.master.grad.add_(own)
        else:
            self.master.grad = self.buffer = own.float() if self.buffer is None else self.buffer.copy_(own)


class Optimizer:
    """The optimiser of named parameters. Its update rule is `rule`, or by default the one that the setting `optimizer` names.

    `seed` is for stochastic rounding. With `recompute`, a large LM head's gradient is not stored, but computed twice, block by
    block. `reduces` switches FSDP's gradient reduction on (True) or off.
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
        """`nonfinite` counts the steps since the last finite gradient. `updates` counts the updates of the weights."""
        rows = all(w.rule.by_rows for w in self.weights.values())
        self._half = [w for w in self.weights.values() if w.is_half]
        self._sharded = [w for w in self.weights.values() if w.local is not w.parameter]
        if self._sharded and not rows:
            what = "bf16_stochastic_round" if optim.bf16_stochastic_round else f"optimizer {optim.optimizer}"
            raise UserError(f"{what} needs whole matrices, but strategy=fsdp shards them. Use strategy=ddp.")
        self.sums = Sums(self.parameters.values(), recompute=recompute and world.size == 1 and rows)
        rules = dict.fromkeys(w.rule for w in self.weights.values())
        self._by_rule = [(each, [w for w in self.weights.values() if w.rule == each]) for each in rules]

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The `Weight.master` of each parameter, by parameter name."""
        return {name: w.master for name, w in self.weights.items()}

    def step(self, losses: Losses, lr: float, read: Read = to_list) -> float | None:
        """Sum the gradients of the losses (one function per micro-batch), and update the weights with the learning rate `lr`.

        Return the norm before clipping. If it is not finite, change no weight and return None.
        """
        norms = step_together([(self, lr)], losses, read)
        return None if norms is None else norms[0]

    def clear(self) -> None:
        """Drop all gradients."""
        self.sums.clear()
        for w in self.weights.values():
            w.parameter.grad = w.local.grad = w.master.grad = None

    @property
    def has_buffers(self) -> bool:
        """True if a half-precision weight has a `buffer`."""
        return any(w.buffer is not None for w in self._half)

    @contextlib.contextmanager
    def float32_sums(self) -> Iterator[None]:
        """Inside this context, sum the gradients of half-precision weights in float32, in the `.grad` of their masters.

        In bfloat16, a sum over 1,000 micro-batches has an error of 3 %.
        """
        handles = []
        for w in self._half:
            w.move_gradient()
            handles.append(w.parameter.register_post_accumulate_grad_hook(lambda _, w=w: w.move_gradient()))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def restore_precision(self) -> None:
        """Undo `float32_sums` after a step with only one backward pass: convert each gradient to its weight's precision."""
        for w in self._half:
            if (total := w.master.grad) is not None:
                w.parameter.grad, w.master.grad = total.to(w.parameter.dtype), None
            w.buffer = None

    def finish_backward(self) -> None:
        """Complete the gradient sums after a step's last backward pass."""
        self.sums.finish()
        for w in self._half:
            if w.parameter in self.sums.float32:
                total = self.sums.float32.pop(w.parameter)
                w.master.grad = total if w.master.grad is None else w.master.grad.add_(total)
            if w.master.grad is not None:
                w.move_gradient()

    @property
    def unsharded(self) -> list[nn.Parameter]:
        """The masters of the weights that are not sharded. Their gradients must be summed over processes."""
        return [w.master for w in self.weights.values() if w.local is w.parameter]

    def norm(self, read: Read = to_list) -> float:
        """Return the norm of all gradients, which `read` copies to the CPU. Also prepare the gradients for `apply`."""
        for w in self._sharded:
            w.local.grad = None if w.parameter.grad is None else local_of(w.parameter.grad)
        for w in self._half:
            if w.kernels is None and not w.no_master and w.local.grad is not None:
                w.master.grad = w.local.grad.float()
        if self._sharded:
            return self._norm_over_ranks(read)
        by_torch = [w for w in self.weights.values() if w.kernels is None or w.master.grad is not None]
        norms = [_total_norm([w.gradient for w in by_torch if w.gradient is not None])]
        norms += [block.norm() for weight in self.sums.uses for _, block in self.sums.blocks(weight)]
        stored, *rest = [read(norms[0])] if len(norms) == 1 else read(torch.stack([norm.double() for norm in norms]))
        squares = [norm**2 for norm in rest]
        if found := next((w.kernels for w in self._half if w.kernels is not None), None):
            half = [w.local.grad for w in self._half if w.kernels is not None and w.local.grad is not None]
            squares.append(found.squared_norm(half) if half else 0.0)
        return math.sqrt(stored**2 + math.fsum(squares)) if squares else stored

    def _norm_over_ranks(self, read: Read) -> float:
        """Return the gradient norm over all processes' shards; `read` copies it to the CPU. Unsharded weights count once."""
        parts, learns = [0.0, 0.0], [w for w in self.weights.values() if w.gradient is not None]
        squares = [w.gradient.double().pow(2).sum() for w in learns if w.gradient is not None]
        for w, square in zip(learns, read(torch.stack(squares)) if squares else [], strict=True):
            parts[w.local is w.parameter] += square / num_replicas(w.parameter, self.world.size)
        return math.sqrt(float(self.world.all_reduce(torch.tensor(parts[0], dtype=torch.float64))) + parts[1])

    @torch.no_grad()
    def apply(self, norm: float, lr: float) -> None:
        """Clip the gradient, whose norm is `norm`, to `max_grad_norm`, and update the weights with the learning rate `lr`."""
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
        # Caches notice a changed weight by its version counter, which kernels and fused steps do not increment.
        torch.autograd.graph.increment_version(changed)
        self.sums.clear()
        if copied := [(w.local, w.master, w.first) for w in self._half if w.master.grad is not None and not w.no_master]:
            copy_masters(copied)

    def _step_by_rows(self, w: Weight, step: StepSize) -> None:
        """Update a weight whose gradient is not stored. Compute the gradient of one block of rows at a time."""
        for rows, gradient in self.sums.blocks(w.parameter):
            state = {key: x[rows] if x.dim() else x.clone() for key, x in w.state.items()}
            whole = w.update(gradient, self.optim.weight_decay)
            w.rule.step([whole._replace(weight=w.master[rows], state=state)], step)
        w.state["step"] += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the float32 masters and the state of each parameter's update rule. They are sharded if the weights are.

        The names are "<kind>.<parameter>", such as "exp_avg.<parameter>" or "master.<parameter>".
        """
        weights = self.weights.values()
        return {f"{kind}.{w.name}": shard_like(x, w.parameter) for w in weights for kind, x in w.tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state that `state_dict` returned. Raises `UserError` if it does not fit the parameters or their rules."""
        tensors, masters = dict(tensors), {f"master.{name}" for name in self.weights}
        # A checkpoint may be from another device: a CPU stores a master as it is, a GPU as a remainder.
        for name, w in self.weights.items():
            master, rest = f"master.{name}", f"remainder.{name}"
            if "remainder" in w.state and rest not in tensors and master in tensors:
                tensors[rest] = split(tensors.pop(master).reshape(-1))[1].view(w.local.shape)
            elif "remainder" not in w.state and rest in tensors:
                low = tensors.pop(rest).to(w.local.device).reshape(-1)
                tensors[master] = join(w.local.reshape(-1), low, w.first).view(w.local.shape)
        own = {f"{kind}.{w.name}": x for w in self.weights.values() for kind, x in w.tensors().items()}
        for key in tensors:
            name = key.partition(".")[2]
            if name not in self.weights:
                raise UserError(f"The checkpoint's run trained {name!r}, but this run does not; resume with that run's settings.")
            if key not in own.keys() | masters:
                raise UserError(f"{key!r} was saved by another optimizer; set optimizer back to what the run was started with.")
        for key, value in tensors.items():
            name = key.partition(".")[2]
            if lacks := ", ".join(k for k in self.weights[name].state if f"{k}.{name}" not in tensors):
                raise UserError(f"The saved state of {name!r} lacks {lacks}; set optimizer to what the run was started with.")
            if key in own and value.shape != own[key].shape:
                saved, now = list(value.shape), list(own[key].shape)
                raise UserError(f"The saved {key!r} has shape {saved}, not {now}; use the model that the run was started with.")
        for key, x in own.items():
            if key in tensors:
                x.copy_(tensors[key])
            elif key not in masters:
                x.zero_()


def check_gradients(nonfinite: int, step: int) -> None:
    """Raise `NonFiniteError` if `nonfinite`, the number of consecutive steps without a finite gradient, is `MAX_NONFINITE`."""
    if nonfinite >= MAX_NONFINITE:
        raise NonFiniteError(
            f"The gradient was not finite for {nonfinite} steps in a row, up to step {step}. These steps changed no weight, and "
            "the last checkpoint can be used. Lower learning_rate, or check the rewards and the inputs of these steps."
        )


def check_weights(weights: Mapping[str, Tensor], step: int) -> None:
    """Raise `NonFiniteError` if a weight is not finite. Call it before saving, so that no checkpoint has such a weight."""
    if bad := [name for name, x in weights.items() if x.numel() and not _is_finite(x)]:
        raise NonFiniteError(
            f"The weights are not finite after step {step} ({', '.join(bad[:3])}), so they were not saved. Lower learning_rate "
            "and resume from the last checkpoint."
        )


def _is_finite(x: Tensor) -> bool:
    least, most = x.detach().aminmax()  # one pass over x, without a temporary tensor of its size
    return math.isfinite(float(least)) and math.isfinite(float(most))


def _weight(name: str, parameter: nn.Parameter, optim: Optim, rule: UpdateRule | None, seed: int) -> Weight:
    """Return the `Weight` of a parameter: choose its rule and kernels, make a master if needed, and initialise the state."""
    local = local_parameter(parameter)
    adamw, half = rule is None and optim.optimizer in ("adamw", "adamw_8bit"), local.dtype in _HALF
    stochastic = adamw and optim.bf16_stochastic_round and local.dtype == torch.bfloat16
    remainder = adamw and not stochastic and has_remainder(local)
    master = local
    if stochastic or remainder:
        master = nn.Parameter(local.new_empty((), dtype=torch.float32).expand(local.shape))
    elif half:
        master = nn.Parameter(local.detach().float())
    kernels = adamw_kernels(local.dtype, local.device.type) if adamw and half and local.is_contiguous() else None
    rule = rule or _rule(name, master, optim, stochastic, remainder, seed)
    state = rule.init(name, master)
    return Weight(name, parameter, local, master, stochastic or remainder, kernels, rule, state, first_element(parameter))


def _rule(name: str, p: Tensor, optim: Optim, stochastic: bool, remainder: bool, seed: int) -> UpdateRule:
    """Return a parameter's update rule. `p` is its `Weight.master`, of which only the shape is used."""
    betas, eight_bits = (optim.adam_beta1, optim.adam_beta2), optim.optimizer == "adamw_8bit"
    if optim.optimizer == "adafactor":
        return Adafactor()
    if optim.optimizer == "muon" and is_hidden_matrix(name, p):
        return Muon()
    if stochastic or remainder or (eight_bits and has_codes(name, p)):
        return LowMemoryAdamW(betas, optim.adam_epsilon, eight_bits, seed, remainder)
    return AdamW(betas, optim.adam_epsilon)


def _total_norm(gradients: list[Tensor]) -> Tensor:
    if any(g.dtype in _HALF for g in gradients):
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, torch.float32)))  # type: ignore[no-any-return]
    if len(gradients) == 1:
        # The same result, ten times as fast.
        return torch.linalg.vector_norm(gradients[0])  # type: ignore[no-any-return]
    return nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


def _reduce_last(losses: Losses, reduces: Callable[[bool], None]) -> Iterator[Callable[[], Tensor]]:
    """Yield the losses. Switch FSDP's gradient reduction on (`reduces`) only for the last one, so that it runs once per step."""
    held: Callable[[], Tensor] | None = None
    for loss in losses:
        reduces(False)
        if held is not None:
            yield held
        held = loss
    reduces(True)
    if held is not None:
        yield held


def add_up(optimizers: Sequence[Optimizer], losses: Losses) -> None:
    """Compute the gradient of the sum of the losses (one function per micro-batch) for all parameters of the optimisers.

    Raises `PassOutOfMemoryError` if a process runs out of memory and the weights are not sharded.
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
            losses = _reduce_last(losses, optimizers[0].reduces)
        try:
            for passes, loss in enumerate(losses, 1):  # one by one: the activations of a pass are freed before the next pass
                for optimizer in later if passes == 2 else ():
                    stack.enter_context(optimizer.float32_sums())
                loss().backward()
        except Exception as error:
            if world.lockstep or not is_out_of_memory(error):
                raise
            failed = MemoryError(str(error))  # without the error's frames, which hold the activations of the pass
    if failed and world.size == 1:
        raise PassOutOfMemoryError("A pass ran out of memory.") from failed
    for optimizer in alone if passes == 1 else ():
        optimizer.restore_precision()
    for optimizer in optimizers:
        optimizer.finish_backward()
        if sum_gradients(optimizer.world, optimizer.unsharded, failed is not None):
            raise PassOutOfMemoryError("A process ran out of memory in a forward or backward pass.") from failed


def apply_together(rates: Sequence[tuple[Optimizer, float]], read: Read = to_list) -> list[float]:
    """Update the weights of several optimisers, given as (optimiser, learning rate). Each clips its own gradient norm.

    Return the norms before clipping, which `read` copies to the CPU. If one is not finite, change no weight.
    """
    norms = [optimizer.norm(read) for optimizer, _ in rates]
    if not all(map(math.isfinite, norms)):
        rates[0][0].nonfinite += 1
        return norms
    rates[0][0].nonfinite = 0
    for (optimizer, lr), norm in zip(rates, norms, strict=True):
        optimizer.apply(norm, lr)
    return norms


def step_together(rates: Sequence[tuple[Optimizer, float]], losses: Losses, read: Read = to_list) -> list[float] | None:
    """Compute the gradients of the sum of `losses`, and update the weights of several optimisers at their learning rates.

    Return the norms before clipping. If one is not finite, change no weight and return None.
    """
    add_up([optimizer for optimizer, _ in rates], losses)
    norms = apply_together(rates, read)
    return norms if all(map(math.isfinite, norms)) else None
