"""One optimiser step: float32 master weights, its rate, clipping, and a guard. What steps is in `optimizers.py`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from psigrad.config import Optim
from psigrad.errors import UserError
from psigrad.optim.gradients import Sums, in_place
from psigrad.optim.low_memory import FrugalAdamW
from psigrad.optim.rules import Adafactor, AdamW, Muon, Stepper, is_hidden_matrix, steps_natively
from psigrad.processes.parallel.shards import copies_of, held_of, local_of
from psigrad.processes.parallel.world import ALONE, World, sum_gradients
from psigrad.runs.callbacks import MAX_NONFINITE, NonFiniteError


def learning_rate(optim: Optim, step: int, total: int) -> float:
    """The rate of step `step` (from 0) of `total`: linear warm-up, then the decay of `lr_scheduler_type`.

    The values are those of transformers' schedule of `total` + 1 steps with `warmup_steps` + 1 of warm-up, without its first
    step, whose rate is 0.
    """
    if step < optim.warmup_steps and optim.lr_scheduler_type not in _OWN_WARM_UP:
        return optim.learning_rate * (step + 1) / (optim.warmup_steps + 1)
    progress = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    match optim.lr_scheduler_type:
        case "linear":
            return optim.learning_rate * max(0.0, 1 - progress)
        case "cosine":
            return optim.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        case "constant":
            return optim.learning_rate
        case other:
            arguments = json.dumps(optim.lr_scheduler_kwargs or {}, sort_keys=True)
            return optim.learning_rate * _factor(other, arguments, optim.warmup_steps, total, optim.learning_rate)(step)


# Their warm-up begins above 0, or is given by lr_scheduler_kwargs.
_OWN_WARM_UP = ("cosine_warmup_with_min_lr", "warmup_stable_decay")


@lru_cache(maxsize=16)
def _factor(name: str, arguments: str, warmup: int, total: int, peak: float) -> Callable[[int], float]:
    """Step -> share of the `peak`, by transformers' `get_scheduler`."""
    import torch
    from transformers.optimization import get_scheduler

    given = {**({"timescale": warmup or 10_000} if name == "inverse_sqrt" else {}), **json.loads(arguments)}
    shift = int(name != "cosine_warmup_with_min_lr")  # which is above 0 from its first step on
    total_for = None if "num_stable_steps" in given else total + shift  # transformers warns of both
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak or 1.0)
    try:
        made = get_scheduler(name, optimizer, warmup + shift, total_for, scheduler_specific_kwargs=given)
        factor: Callable[[int], float] = made.lr_lambdas[0]
        factor(shift), factor(total)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"lr_scheduler_type {name} cannot have lr_scheduler_kwargs {given}: {error}.") from None
    return lambda step: float(factor(step + shift))


def check_schedule(optim: Optim) -> None:
    """Raises `UserError` where the schedule has no such parameters."""
    simple = optim.lr_scheduler_type in ("linear", "cosine", "constant")
    if simple and optim.lr_scheduler_kwargs:
        raise UserError(
            f"lr_scheduler_type {optim.lr_scheduler_type} takes no lr_scheduler_kwargs; cosine_with_min_lr, for one, does."
        )
    learning_rate(optim, optim.warmup_steps, optim.warmup_steps + 100)


class Optimizer:
    """AdamW, Muon or Adafactor (`optim.optimizer`) over named parameters.

    Half-precision parameters are stepped through float32 copies: a bfloat16 weight swallows any update smaller than 1/256 of
    itself, which is most of them at fine-tuning rates. With `bf16_stochastic_round` they are rounded by chance (by `seed`) and
    have no copy: what stands in `masters` then only has their shape, to hold a gradient in float32. With `recompute` the
    gradient of a large head is not stored: its rows are made twice, for the norm and for the step. In a `world` of several
    processes the gradients are summed over them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optim: Optim,
        *,
        recompute: bool = False,
        world: World = ALONE,
        seed: int = 0,
    ) -> None:
        self.world = world
        self.parameters, self.optim = dict(parameters), optim
        self.held = {name: held_of(p) for name, p in self.parameters.items()}
        """What this process holds of each parameter: all of it, or the rows of its shard."""
        half = (torch.bfloat16, torch.float16)
        rounds = optim.bf16_stochastic_round and optim.optimizer in ("adamw", "adamw_8bit")
        self.bare = {name: p for name, p in self.held.items() if rounds and p.dtype == torch.bfloat16}
        """Weights without a master."""
        copies = {name: p.detach().float() for name, p in self.held.items() if p.dtype in half and name not in self.bare}
        places = {name: p.new_empty((), dtype=torch.float32).expand(p.shape) for name, p in self.bare.items()}
        new_masters = {name: nn.Parameter(x) for name, x in (copies | places).items()}
        self.masters = {name: new_masters.get(name, p) for name, p in self.held.items()}
        low_precision = {name: p for name, p in self.held.items() if self.masters[name] is not p}
        stepped = {n: p for n, p in low_precision.items() if p.is_contiguous() and steps_natively(p.dtype, p.device.type)}
        stepped = stepped if optim.optimizer in ("adamw", "adamw_8bit") else {}
        self._copied = [(p, self.masters[name]) for name, p in low_precision.items() if name not in stepped]
        self._narrow = {name: self.parameters[name] for name in low_precision}
        self.rooms: dict[str, Tensor] = {}
        """Where the last step of several passes summed the gradients of `_narrow`. They are kept: made anew among the activations
        of each step they leave holes, in which a run's memory grows.
        """
        plain = optim.optimizer == "adamw" and not self.bare
        if not plain and any(own is not self.parameters[name] for name, own in self.held.items()):
            what = "bf16_stochastic_round" if self.bare else f"optimizer {optim.optimizer}"
            raise UserError(f"{what} needs whole matrices, and strategy=fsdp shards them; take strategy=ddp.")
        self.rule = self._make_rule(stepped, seed)
        self.nonfinite = self.updates = 0
        """Steps in a row without a finite gradient; updates of the weights by this object."""
        self.sums = Sums(self.parameters.values(), recompute=recompute and world.size == 1 and plain)

    def _make_rule(self, stepped: Mapping[str, Tensor], seed: int) -> Stepper:
        """What the settings name; weights that the kernels step (`stepped`) and the seed of their rounding are AdamW's."""
        optim, parameters, betas = self.optim, self.masters, (self.optim.adam_beta1, self.optim.adam_beta2)
        if optim.optimizer == "adafactor":
            return Adafactor(parameters, optim.weight_decay)
        if optim.optimizer == "muon":
            hidden = {name: p for name, p in parameters.items() if is_hidden_matrix(name, p)}
            rest = {name: p for name, p in parameters.items() if name not in hidden}
            return Muon(hidden, AdamW(rest, betas, optim.adam_epsilon, optim.weight_decay))
        rule = (parameters, betas, optim.adam_epsilon, optim.weight_decay, stepped)
        if optim.optimizer == "adamw_8bit" or self.bare:
            return FrugalAdamW(*rule, eight_bits=optim.optimizer == "adamw_8bit", bare=self.bare, seed=seed)
        return AdamW(*rule)

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
            if master.grad is not None:
                master.grad.add_(own)
            else:
                master.grad = self.rooms[name] = self.rooms[name].copy_(own) if name in self.rooms else own.float()

    def narrow(self) -> None:
        """Give the weights the gradients of a single pass, which stand on the masters in their precision."""
        for name, p in self._narrow.items():
            if (total := self.masters[name].grad) is not None:
                p.grad, self.masters[name].grad = total.to(p.dtype), None
        self.rooms = {}

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
        squares += [self.rule.squared_norm_bf16()] if isinstance(self.rule, AdamW) and self.rule.low_precision else []
        return math.sqrt(stored**2 + math.fsum(squares)) if squares else stored

    def _norm_over_ranks(self) -> float:
        """As `norm`, from what each process holds; what is not in shards counts once."""
        parts = [0.0, 0.0]
        for name, own in self.held.items():
            gradient = self.masters[name].grad if self.masters[name].grad is not None else own.grad
            if gradient is not None:
                square = float(gradient.double().pow(2).sum()) / copies_of(self.parameters[name], self.world.size)
                parts[own is self.parameters[name]] += square
        return math.sqrt(float(self.world.all_reduce(torch.tensor(parts[0], dtype=torch.float64))) + parts[1])

    def apply(self, norm: float, lr: float) -> None:
        """Step at rate `lr` along the gradient, whose norm is `norm`, clipped to `max_grad_norm`."""
        self.updates += 1
        most = self.optim.max_grad_norm
        put_off = {name: self.sums.blocks(p) for name, p in self.parameters.items() if p in self.sums.uses}
        self.rule.step(lr, put_off, shrink=norm / most if 0 < most < norm else 1.0)
        self.sums.forget()
        with torch.no_grad():
            for name in self._narrow:
                if self.masters[name].grad is not None and name not in self.bare:  # the kernels step weight and master at once
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
    passes, narrow = 0, [optimizer for optimizer in optimizers if optimizer.world.size == 1]
    later = [optimizer for optimizer in narrow if not optimizer.rooms]
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            optimizer.clear()
            if optimizer not in later:
                stack.enter_context(optimizer.summing_wide())
        stack.enter_context(in_place(*(optimizer.sums for optimizer in optimizers)))
        for passes, loss in enumerate(losses, 1):  # one by one: what a pass kept may be let go of when the next is asked for
            for optimizer in later if passes == 2 else ():
                stack.enter_context(optimizer.summing_wide())
            loss().backward()
    for optimizer in narrow if passes == 1 else ():
        optimizer.narrow()
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
