"""Batch sizes under the names of TRL and verl, which count otherwise, as ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from psigrad.config.nested import Given
from psigrad.errors import UserError

# How much a step computes, from which `batches_of` computes ours.
BATCH = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
    *("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
)


def batches_of(known: set[str], said: set[str], others: Mapping[str, Given], number: Callable[[str], Any]) -> list[Given]:
    """Our batch sizes out of TRL's (of a device, in samples) and verl's (of all devices, in prompts)."""
    theirs = {name: _whole(others[name]) for name in BATCH if name in others}
    if not theirs:
        return []
    online, size = "prompts_per_step" in known, next(iter(theirs))
    ours = "prompts_per_step" if online else "batch_size"
    if ours in said:
        raise UserError(f"{size} and {ours} both say how large a step is; give one of them.")
    source = others[size].source
    devices = max(int(number("placement.processes")), int(os.environ.get("WORLD_SIZE", 1)))
    if "data.train_batch_size" in theirs or "actor_rollout_ref.actor.ppo_mini_batch_size" in theirs:
        rows = theirs.get("data.train_batch_size") or int(number(ours))
        mini = theirs.get("actor_rollout_ref.actor.ppo_mini_batch_size", rows)
        if rows % mini:
            raise UserError(f"ppo_mini_batch_size {mini} does not divide train_batch_size {rows}; give one that does.")
        return [Given(ours, rows, source), *([Given("num_minibatches", rows // mini, source)] if online else [])]
    rows, accumulated = theirs.get("per_device_train_batch_size", 8), theirs.get("gradient_accumulation_steps", 1)
    if not online:
        return [Given(ours, rows * accumulated * devices, source)]
    return _generation_batch(theirs, rows * devices, accumulated, int(number("num_generations")), source)


def _generation_batch(theirs: Mapping[str, int], at_once: int, accumulated: int, group: int, source: str) -> list[Given]:
    """Prompts and minibatches of a step of TRL's online trainers, which count completions."""
    rounds = theirs.get("steps_per_generation", accumulated)
    completions = theirs.get("generation_batch_size", at_once * rounds)
    update = at_once * accumulated
    sum_of = f"{completions} completions a step"
    if "generation_batch_size" not in theirs:
        sum_of = f"{at_once} completions at once × {rounds} = {completions} a step"
    if completions % group:
        raise UserError(
            f"The batch sizes make {sum_of}, which is no multiple of num_generations {group}; change one of them, or give "
            "prompts_per_step, the prompts of a step over all devices."
        )
    if completions % update:
        raise UserError(
            f"The batch sizes make {sum_of} and {update} an update; give steps_per_generation as a multiple of "
            "gradient_accumulation_steps, or prompts_per_step and num_minibatches."
        )
    return [Given("prompts_per_step", completions // group, source), Given("num_minibatches", completions // update, source)]


def _whole(given: Given) -> int:
    if isinstance(given.value, bool) or not isinstance(given.value, int) or given.value < 1:
        raise UserError(f"{given.name} is {given.value!r}; expected a whole number of at least 1.")
    return given.value
