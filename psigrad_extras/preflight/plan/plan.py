"""`psigrad plan METHOD`: the plan of a run, and the warning about a run that may not fit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from psigrad import redaction
from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.intervals import detectable_gain
from psigrad.kernels.kernels import kernels
from psigrad.language.models.backbone import DTYPES
from psigrad.language.models.fused.layer import compute_dtype
from psigrad.language.rewards.resolve import OF_TRL, resolve
from psigrad.records.report.terminal import show_size
from psigrad.runs.machine import device as device_of
from psigrad_extras.preflight.plan.arithmetic import REACHED, Config
from psigrad_extras.preflight.plan.fit import fit
from psigrad_extras.preflight.plan.hardware import busy, machine, named_gpu, parse_bytes
from psigrad_extras.preflight.plan.memory import COPY, count
from psigrad_extras.preflight.plan.placements import ASSUMED, Split, smallest, splits
from psigrad_extras.preflight.plan.predict import ALL, MARGIN, Plan, filling, lengths_of, predict
from psigrad_extras.preflight.settings import PlanConfig

SMALL, HOUR = 50_000_000, 3600
SAMPLERS: tuple[Literal["embedded", "vllm"], ...] = ("embedded", "vllm")
DEFAULT_PROMPTS = 64
"""The default number of held-out prompts, if the dataset has at least ten times as many rows."""


def run(config: Config, asked: PlanConfig) -> str:
    """Return the plan of the run that `config` describes, as text or as JSON."""
    device = device_of(config.run)
    if asked.gpu:
        if device == "cpu":
            raise UserError(f"gpu is {asked.gpu}, but the run is on the CPU; add --device cuda.")
        found = named_gpu(asked.gpu, config.model.dtype)
    else:
        found = machine(device, config.model.dtype, config.run.threads, asked.memory, asked.tflops)
    if not config.micro_batch_tokens and not config.run.max_memory:
        config = filling(config, found)
    lengths, rows, source = lengths_of(config, asked.prompt_length, asked.completion_length)
    if limit := config.run.max_memory:
        config = fit(config, replace(found, memory=parse_bytes(limit)), (lengths, rows))
    if asked.devices:
        found_splits = splits(config, lengths, found, asked.devices, asked.network * 1e9, rows)
        fewest = smallest(config, lengths, found)
        return json.dumps(placements(found_splits)) if asked.json else divisions(found_splits, source, fewest)
    plan = predict(config, lengths, found, dataset=rows)
    return json.dumps(figures(plan)) if asked.json else table(plan, source)


def warning(config: Config) -> str:
    """Return a line of warning if a run may not fit in this machine's memory, or "" if it fits or if that is unknown.

    Lengths are the limits in the settings, or guesses. No row is read, and the network is not used.
    """
    try:
        device = device_of(config.run)
        here = machine(device, config.model.dtype, measure=False)
        lengths, _, _ = lengths_of(config, read=False)
        made = predict(config, lengths, here, quick=True)
        if made.fits:  # this estimate is an upper bound, since plain PyTorch keeps more than the kernels
            return ""
        made = predict(config, lengths, here)
    except ValueError:
        return ""  # wrong settings: the run itself refuses them, with a better sentence
    refuse_copies(made)
    return "" if made.fits else _sentence(made)


def refuse_copies(plan: Plan) -> None:
    """Raise `UserError` if each process samples with a full copy of the model, and that does not fit together with its shard."""
    copy = sum(item.bytes for item in plan.memory.items if item.name == COPY)
    least = sum(item.bytes for item in plan.memory.items if item.phase == "weights")
    if copy and least > plan.machine.memory:
        raise UserError(
            f"For sampling, each process needs a copy of the model ({show_size(copy)}) besides its shard. A device has only "
            f"{show_size(plan.machine.memory)}. Use sampling.sampler=vllm with sampling.tensor_parallel_size."
        )


def warn(config: Config) -> None:
    """Print the warning about memory on stderr, if there is one. Raise `UserError` if full copies for sampling cannot fit."""
    if line := warning(config):
        redaction.say(line)


def foretell(config: Config, ask: Callable[[str], str] | None = None) -> None:
    """Print a line on stderr with the predicted length of the run: steps, tokens and time. A small dataset is read for that.

    If `ask` is given (it asks the user on a terminal) and the settings give no length, the user must confirm a run of more than
    an hour. Raises `UserError` if the user does not, or if the reward does not exist.
    """
    for reward in getattr(config, "reward", ()):
        if isinstance(reward, str) and reward.isidentifier() and reward not in OF_TRL:  # a user's module is not imported
            resolve(reward)
    try:
        data: Any = config.data.dataset
        small = not isinstance(data, str) or (os.path.isfile(data) and os.path.getsize(data) < SMALL)
        lengths, rows, _ = lengths_of(config, read=small)
        here = machine(device_of(config.run), config.model.dtype, config.run.threads, roughly=True)
        work = (made := predict(config, lengths, here, dataset=rows, quick=True)).work
    except (ValueError, OSError):
        return  # wrong settings: the run itself refuses them, with a better sentence
    if not work.steps:
        return
    tokens = work.steps * work.rows * (lengths.prompt + work.members * lengths.completion)
    there = max(made.seconds * work.steps, 1.0)
    # The number of an episode's turns, and the time that its environment takes, are unknown.
    plays = getattr(config, "plays", False)
    apart = ", without evaluations" * (config.evaluation.eval_prompts != 0)
    spent = " per turn" if plays else f", about {seconds(there)} here{_instructions(config)}{apart}" if made.seconds else ""
    steps = f"{work.steps:,} step{'s' * (work.steps != 1)}"
    note = f" {busy(here.kind)}" if made.seconds and not plays else ""
    redaction.say(f"{steps} of {work.rows:,} rows, about {float(f'{tokens:.2g}'):,.0f} tokens{spent}.{note.rstrip()}")
    default = type(config)().run
    unsaid = (config.run.max_steps, config.run.num_train_epochs) == (default.max_steps, default.num_train_epochs)
    long = unsaid and made.seconds * work.steps > HOUR
    if ask is not None and long and not ask("Start? --max-steps shortens the run. [y/N] ").strip().lower().startswith("y"):
        raise UserError("The run was not confirmed, so it did not start; set its length with --max-steps or --num-train-epochs.")


def _instructions(config: Config) -> str:
    """Return the processor's instruction set for matrix products, in brackets; "" on a GPU or without psigrad's kernels."""
    found = kernels() if device_of(config.run) == "cpu" else ""
    return "" if isinstance(found, str) else f" ({found.products.instructions(compute_dtype(DTYPES[config.model.dtype]))})"


def _sentence(plan: Plan) -> str:
    way = next((name for name, other in plan.ways if other.fits), "")
    if way == ALL:
        way = "all of " + ", ".join(name for name, _ in plan.ways if name != ALL)
    advice = f"try {way}" if way else "`psigrad plan` lists what needs memory"
    return f"The run may need {show_size(plan.memory.peak)} of memory, but only {show_size(plan.machine.memory)} exist; {advice}."


_PHASES = {"weights": "", "held": "", "sample": "while sampling", "train": "while training", "load": "while loading"}


def seconds(value: float) -> str:
    """Return a duration in seconds as text: 0.8 s, 12 min, 5.5 h."""
    for unit, scale in (("days", 86400), ("h", 3600), ("min", 60)):
        if value >= 2 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.2g} s"


def tera(value: float) -> str:
    """Return a number in units of 10¹², as text."""
    return f"{value / 1e12:,.0f}" if value >= 1e15 else f"{value / 1e12:.3g}"


def band(value: float) -> str:
    """Return a speed as a range of half an order of magnitude, such as "1,000 to 3,000"."""
    low = 10 ** (math.floor(2 * math.log10(value)) / 2)

    def rounded(x: float) -> str:
        digits = math.floor(math.log10(x))
        return f"{round(x / 10**digits) * 10**digits:,.0f}" if x >= 1 else f"{x:.1g}"

    return f"{rounded(low)} to {rounded(low * math.sqrt(10))}"


def table(plan: Plan, source: str = "") -> str:
    """Return the plan as readable text."""
    rows = [
        (item.name, show_size(item.bytes), " ".join(filter(None, (_PHASES[item.phase], item.note)))) for item in plan.memory.items
    ]
    rows.append(("process", show_size(plan.memory.baseline), "Python, torch and transformers"))
    rows.append(("allocator", show_size(plan.memory.slack), "gaps between blocks of different sizes"))
    wide = max(len(name) for name, _, _ in rows)
    held = f"measured errors are within {MARGIN:.0%}" if plan.machine.kind == "cpu" else "not verified on a GPU"
    lines = [f"{name:<{wide}}  {value:>8}  {note}".rstrip() for name, value, note in rows]
    lines += [
        "",
        f"{'peak':<{wide}}  {show_size(plan.memory.peak):>8}  {_PHASES[plan.memory.phase]}; {held}",
        f"{'memory':<{wide}}  {show_size(plan.machine.memory):>8}  {verdict(plan)}",
        "",
        *_arithmetic(plan, source),
        *_speed(plan),
    ]
    if not plan.fits:
        lines += ["", "What takes less:", *_ways(plan)]
    return "\n".join(lines)


def verdict(plan: Plan) -> str:
    """Return a sentence that says whether the run fits in memory."""
    if plan.fits:
        return "it fits"
    if plan.starved:
        return "vLLM's share of the memory is too small for the model"
    near = plan.memory.peak <= plan.machine.memory
    return "it may not fit: the prediction's error is larger than the remaining memory" if near else "it does not fit"


def _arithmetic(plan: Plan, source: str) -> list[str]:
    work, length = plan.work, plan.work.lengths
    what = "completions" if work.samples else "answers"
    lines = [
        f"lengths    prompts of {length.prompt} tokens (longest {length.longest_prompt}), {what} of {length.completion} "
        f"(longest {length.longest_completion}){'; ' + source if source else ''}",
        f"step       {work.rows} prompts × {work.members} {what} = {work.rows * work.members}, {work.completion_tokens:,} "
        f"tokens; a pass computes {work.tokens:,} (a prompt once for its {what})",
        f"update     {work.passes} × {work.minibatches} optimiser steps, each {plan.share.micro_batches} micro-batches of at "
        f"most {plan.share.micro_tokens:,} tokens; {show_size(plan.memory_per_token)} per token",
    ]
    if plan.share != work:
        placement = plan.config.placement
        lines.append(
            f"placement  {placement.processes} processes with {placement.strategy}; the figures are for one, which trains on "
            f"{plan.share.rows} prompts" + ("" if plan.share.samples or not work.samples else "; other processes sample")
        )
    if work.steps:
        share = f" = {work.epochs:.2g} epochs of {work.dataset:,} rows" if work.dataset else ""
        lines.append(f"run        {work.steps:,} steps, {work.steps * work.updates:,} optimiser steps{share}")
    if work.samples and (prompts := plan.config.evaluation.eval_prompts) != 0:
        even = [float(i % 2) for i in range(prompts or DEFAULT_PROMPTS)]
        asked = f"{len(even)} held-out prompts" if prompts else f"at most {len(even)} held-out prompts"
        lines.append(
            f"verdict    with {asked}, a rise of a 0-or-1 reward from 0.5 by {detectable_gain(even):.2g} shows in 4 of 5 runs"
        )
    return lines


def _speed(plan: Plan) -> list[str]:
    if not plan.seconds:
        return [f"speed      {tera(plan.cost.flops)} TFLOP per step; give --tflops for the time"]
    training, decoding, _ = REACHED[plan.machine.kind]
    lines = [
        f"speed      {band(plan.tokens_per_second)} tokens/s: {tera(plan.cost.flops)} TFLOP per step, about "
        f"{seconds(plan.seconds)}, at {tera(plan.machine.peak)} TFLOP/s of matrix products ({training:.0%} of it while "
        f"training, {decoding:.0%} while decoding)"
    ]
    lines.append("phases     " + ", ".join(f"{name} {seconds(value)}" for name, value in plan.phases.items()))
    if plan.work.steps:
        lines.append(f"           {seconds(plan.seconds * plan.work.steps)} for the run, without evaluation")
    lines += [f"           {note}"] if (note := busy(plan.machine.kind)) else []
    if sampling := samplers(plan):
        best = min(sampling, key=lambda name: sampling[name])
        lines.append(f"samplers   {', '.join(f'{name} {seconds(value)}' for name, value in sampling.items())}; {best} is faster")
    return lines


def samplers(plan: Plan) -> dict[str, float]:
    """Return sampler -> seconds of sampling, for psigrad's sampler and vLLM on a GPU; empty for other samplers and devices."""
    config = plan.config
    if plan.machine.kind == "cpu" or not isinstance(config, OnlineConfig) or config.sampling.sampler not in SAMPLERS:
        return {}
    found: dict[str, float] = {}
    for name in SAMPLERS:
        other = replace(config, sampling=replace(config.sampling, sampler=name))
        found[name] = predict(other, plan.work.lengths, plan.machine, dataset=plan.work.dataset, quick=True).phases["sampling"]
    return found


def _ways(plan: Plan) -> list[str]:
    ways = plan.ways
    if not ways:
        return ["  no setting of psigrad saves memory here; use a smaller model or more memory"]
    wide = max(len(name) for name, _ in ways)
    return [f"  {name:<{wide}}  {show_size(other.memory.peak):>8}{'  fits' if other.fits else ''}" for name, other in ways]


def divisions(found: Sequence[Split], source: str, fewest: int) -> str:
    """Return the ways to divide the devices as text, the best first."""
    best, whole = found[0], found[0].plan
    devices, timed = best.trainers + best.samplers, bool(whole.machine.peak)
    heads = ["train", "sample", "by", "trainer", "sampler", "train s", "sample s", "publish s", "step s", "with lag", ""]
    rows = [heads]
    for s in found:
        seconds_of = [f"{x:.3g}" for x in (s.training, s.sampling, s.publishing, s.seconds(0), s.seconds(1))]
        rows.append(
            [
                str(s.trainers),
                str(s.samplers) if s.samplers else "the same",
                s.strategy,
                show_size(s.plan.memory.peak),
                show_size(s.sampler.peak) if s.sampler is not None else "",
                *(seconds_of if timed else [""] * 5),
                "" if s.fits else "does not fit",
            ]
        )
    wide = [max(len(row[k]) for row in rows) for k in range(len(heads))]
    lines = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [
            f"{devices} devices of {show_size(whole.machine.memory)}; memory per process, seconds per step",
            "",
            *lines,
            "",
            _advice(found, fewest),
            *_arithmetic(replace(whole, share=whole.work), source)[:2],
            *([] if timed else ["speed      give --tflops for the times"]),
            f"assumed    {ASSUMED}.",
        ]
    )


def _advice(found: Sequence[Split], fewest: int) -> str:
    """Return advice as text: the settings to use or, if nothing fits, what the division that comes closest lacks."""
    training = f"Sharded, the trainer fits on {fewest} device{'s' * (fewest > 1)}."
    training = training if fewest else "The trainer does not fit even on 1,024 devices."
    best = found[0]
    if best.fits:
        chosen = f"placement.processes={best.trainers} placement.strategy={best.strategy}"
        others = f" and {best.samplers} samplers (--cluster, lag=1)" if best.samplers else ""
        return f"Best: {chosen}{others}. {training}"
    near = min(found, key=lambda split: split.lack)
    memory, work = near.plan.machine.memory, near.plan.work
    if starved := near.starved or near.plan.starved:
        config: Any = near.plan.config
        taken = (config.sampling.vllm_memory_alone() if near.samplers else work.engine) * memory
        times = 1 << math.ceil(math.log2(1 + starved / taken))
        where, ways = "vLLM's engine", f"sampling.tensor_parallel_size={times * work.tensor}"
    elif near.plan.memory.peak * (1 + MARGIN) > memory:
        where, ways = "a trainer", ", ".join(name for name, _ in near.plan.ways[:3])
    else:
        where, ways = "a sampler", "sampling.max_decode_batch"
    return f"No division fits, because {where} needs more memory than a device has. To save memory, try {ways}. {training}"


def placements(found: Sequence[Split]) -> list[dict[str, Any]]:
    """Return the ways to divide the devices as values for JSON, in bytes and seconds."""
    return [
        {
            "trainers": s.trainers,
            "samplers": s.samplers,
            "strategy": s.strategy,
            "trainer_peak": round(s.plan.memory.peak),
            "sampler_peak": round(s.sampler.peak) if s.sampler is not None else None,
            "fits": s.fits,
            "training_seconds": s.training,
            "sampling_seconds": s.sampling,
            "publishing_seconds": s.publishing,
            "step_seconds": s.seconds(0),
            "step_seconds_with_lag": s.seconds(1),
        }
        for s in found
    ]


def figures(plan: Plan) -> dict[str, Any]:
    """Return the plan as values for JSON, in bytes, seconds and FLOPs."""
    work = plan.work
    return {
        "model": {
            "path": plan.config.model.path,
            "parameters": plan.policy.parameters,
            "trained": count(plan.policy.parameters),
            "vocabulary": plan.policy.vocabulary,
        },
        "memory": {
            "items": [
                {"name": item.name, "bytes": round(item.bytes), "phase": item.phase, "note": item.note}
                for item in plan.memory.items
            ],
            "process": plan.memory.baseline,
            "allocator": round(plan.memory.slack),
            "peak": round(plan.memory.peak),
            "peak_while": plan.memory.phase,
            "available": plan.machine.memory,
            "fits": plan.fits,
            "per_token": round(plan.memory_per_token),
        },
        "batch": {
            "prompts": work.rows,
            "completions_per_prompt": work.members,
            "prompt_tokens": work.lengths.prompt,
            "completion_tokens": work.lengths.completion,
            "tokens_per_step": work.completion_tokens,
            "computed_tokens_per_pass": work.tokens,
            "updates_per_step": work.updates,
            "micro_batches_per_update": work.micro_batches,
            "micro_batch_tokens": work.micro_tokens,
            "steps": work.steps,
            "epochs": work.epochs,
        },
        "speed": {
            "flops_per_step": plan.cost.flops,
            "peak_flops": plan.machine.peak,
            "seconds_per_step": plan.seconds,
            "seconds_by_phase": plan.phases,
            "seconds_of_sampling": samplers(plan) if plan.machine.peak else {},
            "tokens_per_second": plan.tokens_per_second,
        },
        "ways": [{"change": name, "peak": round(other.memory.peak), "fits": other.fits} for name, other in plan.ways],
    }
