"""The settings under which a run stays below a memory limit, by the arithmetic of the plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from psigrad import redaction
from psigrad.config import OnlineConfig
from psigrad.config.fields import device_defaults
from psigrad.errors import UserError
from psigrad.language.models.free_memory import available_memory
from psigrad.processes.parallel import launch
from psigrad.records.report.terminal import show_size
from psigrad.runs.machine import device
from psigrad_extras.preflight.plan.arithmetic import Config, Lengths
from psigrad_extras.preflight.plan.hardware import Machine, machine
from psigrad_extras.preflight.plan.memory import KEPT
from psigrad_extras.preflight.plan.predict import MOST, Plan, filling, lengths_of, predict

C = TypeVar("C", bound=Config)
# The share of the predicted peak that must be free below the limit. The largest measured peak was 1.24 times its prediction.
FREE = 0.25


def fit(config: C, here: Machine | None = None, lengths: tuple[Lengths, int] | None = None) -> C:
    """Return the fastest settings whose predicted memory stays below `run.max_memory`. The training result is the same.

    They are tried in this order: first with all activations kept from sampling, then without, each with the largest micro-batches
    that fit. Then activations are recomputed, and fewer sequences are decoded at once.

    If `micro_batch_tokens` is 0 and no limit is set, the limit is the device's free memory, and `filling` chooses. `here` is
    the machine with the limit as its memory (default: this machine). `lengths` are the lengths and number of the dataset's rows.

    Print the choice. Raises `UserError` if a given limit cannot be met.
    """
    if not config.run.max_memory:
        if config.micro_batch_tokens:
            return config
        where = device(config.run)
        here = replace(machine(where, config.model.dtype, measure=False), memory=free_memory(where))
        asked, config = config, filling(config, here)
        if launch.is_first_rank():
            names, slots = list(device_defaults(type(config), here.kind)), "sampling.max_decode_batch"
            names += [slots] if isinstance(asked, OnlineConfig) and _value(config, slots) != _value(asked, slots) else []
            says = ", ".join(f"{name}={_value(config, name)}" for name in names)
            redaction.say(f"on {where}: {says or f'micro_batch_tokens={config.micro_batch_tokens}'}.")
        return config
    config = config if config.micro_batch_tokens else replace(config, micro_batch_tokens=MOST)
    here = here or machine(device(config.run), config.model.dtype, memory=config.run.max_memory, measure=False)
    longest, rows = lengths or lengths_of(config)[:2]
    plans: list[Plan] = []
    kept = 0.0
    if isinstance(config, OnlineConfig):
        items = predict(replace(config, keep_activations_gb=1e9), longest, here).memory.items
        kept = next((item.bytes for item in items if item.name == KEPT), 0.0)
    for tried in _smaller(config, longest.longest_prompt + longest.longest_completion, kept):
        plans.append(predict(tried, longest, here, dataset=rows))
        if plans[-1].memory.peak * (1 + FREE) <= here.memory:
            _say(tried, plans[-1])
            return tried
    least = min(plans, key=lambda plan: plan.memory.peak)
    way = next((name for name, other in least.ways if other.fits), "a smaller model")
    raise UserError(
        f"max_memory is {config.run.max_memory}, but the run needs about {show_size(least.memory.peak * (1 + FREE))} with the "
        f"smallest micro-batches; raise max_memory, or try {way}."
    )


def free_memory(where: str) -> int:
    """Return the bytes that a run could use on a device now.

    For ranks on one machine, it is the total memory, since free memory depends on how much each has allocated already.
    """
    if where == "cpu":
        return available_memory()
    if launch.is_rank():  # to query free memory, each rank would itself allocate some on GPU 0
        return int(torch.cuda.get_device_properties(where).total_memory)
    return int(torch.cuda.mem_get_info(where)[0])


def _value(config: Config, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), config)


def _smaller(config: C, longest: int, kept: float) -> Iterator[C]:
    """Yield variants of the settings, from fast to slow. `kept` is the size in bytes of the activations kept from sampling."""
    budgets = [config.micro_batch_tokens]
    while budgets[-1] > longest:
        budgets.append(max(longest, budgets[-1] // 2))
    decoded = [config]
    if (sampling := getattr(config, "sampling", None)) is not None:
        counts = [n for n in (128, 32, 8) if n < sampling.max_decode_batch]
        decoded += [replace(config, sampling=replace(sampling, max_decode_batch=n)) for n in counts]
    one: Any
    for one in decoded:
        if kept and one.keep_activations_gb != 0 and not one.model.gradient_checkpointing:
            enough = max(one.keep_activations_gb or 0.0, math.ceil(kept / 1e8) / 10)
            yield from (replace(one, keep_activations_gb=enough, micro_batch_tokens=budget) for budget in budgets)
            one = replace(one, keep_activations_gb=0.0)  # keeping only some activations is useless
        for anew in {config.model.gradient_checkpointing: 0, True: 1}:
            model = replace(config.model, gradient_checkpointing=anew)
            yield from (replace(one, model=model, micro_batch_tokens=budget) for budget in budgets)


def _say(config: Config, plan: Plan) -> None:
    if launch.is_first_rank():
        chosen = [f"micro-batches of {config.micro_batch_tokens} tokens"]
        chosen += ["recomputed activations"] if config.model.gradient_checkpointing else []
        sampling = getattr(config, "sampling", None)
        chosen += [f"{sampling.max_decode_batch} sequences decoded at once"] if sampling else []
        if any(item.name == KEPT for item in plan.memory.items):
            chosen += [f"up to {_value(config, 'keep_activations_gb'):g} GB of activations kept from sampling"]
        redaction.say(f"For {config.run.max_memory}: {', '.join(chosen)}. The predicted peak is {show_size(plan.memory.peak)}.")
