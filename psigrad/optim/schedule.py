"""Learning rates over the steps of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache

import torch

from psigrad.config import Optim
from psigrad.errors import UserError


def learning_rate(optim: Optim, step: int, total: int) -> float:
    """Return the rate of step `step` (from 0) of `total`: linear warm-up, then the decay of `lr_scheduler_type`.

    The values are those of transformers' schedule of `total` + 1 steps with `warmup_steps` + 1 of warm-up, without its first
    step, whose rate is 0.
    """
    if step < optim.warmup_steps and optim.lr_scheduler_type not in _OWN_WARM_UP:
        return optim.learning_rate * (step + 1) / (optim.warmup_steps + 1)
    progress = (step - optim.warmup_steps) / max(1, total - optim.warmup_steps)
    if optim.lr_scheduler_type in DECAYS:
        return decayed(optim.learning_rate, optim.lr_scheduler_type, progress)
    arguments = json.dumps(optim.lr_scheduler_kwargs or {}, sort_keys=True)
    return optim.learning_rate * _factor(optim.lr_scheduler_type, arguments, optim.warmup_steps, total, optim.learning_rate)(step)


DECAYS = ("linear", "cosine", "constant")


def decayed(peak: float, kind: str, progress: float) -> float:
    """Return the rate after a share `progress` of the steps, by one of the `DECAYS`."""
    match kind:
        case "linear":
            return peak * max(0.0, 1 - progress)
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        case _:
            return peak


# The warm-up of these starts above 0, or lr_scheduler_kwargs give it.
_OWN_WARM_UP = ("cosine_warmup_with_min_lr", "warmup_stable_decay")


@lru_cache(maxsize=16)
def _factor(name: str, arguments: str, warmup: int, total: int, peak: float) -> Callable[[int], float]:
    """Return a function from the step to its share of the `peak`, by transformers' `get_scheduler`."""
    from transformers.optimization import get_scheduler

    given = {**({"timescale": warmup or 10_000} if name == "inverse_sqrt" else {}), **json.loads(arguments)}
    shift = int(name != "cosine_warmup_with_min_lr")  # that schedule is above 0 from its first step on
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
    """Raise `UserError` if the schedule does not take these parameters."""
    if optim.lr_scheduler_type in DECAYS and optim.lr_scheduler_kwargs:
        raise UserError(
            f"lr_scheduler_type {optim.lr_scheduler_type} takes no lr_scheduler_kwargs. cosine_with_min_lr is one that does."
        )
    learning_rate(optim, optim.warmup_steps, optim.warmup_steps + 100)
