"""psigrad and TRL on models and lengths of real training: `python benchmarks/real.py [R1 R7 …] [--pairs 7]`.

A pair is one step of each side. It is stored at once, so that an interrupted benchmark continues where it stopped. Each of TRL's
settings (rows per forward pass; float32 weights under autocast, or bfloat16 weights) gets one pair. The best one gets the others.
The weights come from the hub's cache. If they are not there, random weights of the same shape are used.

The exit status is 1 if a goal is missed. For a ratio, this means that the upper end of its 95 % interval is below the goal.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from beside_trl import beside
from huggingface_hub import try_to_load_from_cache
from plan import planned
from resumable import ask
from timed.inputs import prepare
from timed.workload import Workload, read_shape

from psigrad.errors import UserError
from psigrad.intervals import over_seeds
from psigrad_extras.preflight.plan.hardware import Machine

FILE = Path(__file__).parent / "results" / "real.jsonl"
SMOL = "HuggingFaceTB/SmolLM2-135M"


@dataclass(frozen=True)
class Real:
    """A workload on a model of the hub, or on one of its shape. The goals are `faster` (TRL's seconds divided by psigrad's),
    `smaller` (psigrad's memory divided by TRL's) and `first_step` (seconds from the start of psigrad's process to the end of its
    first step). `trl` lists the settings of TRL to try: (rows per forward pass, True for bfloat16 weights). `apart`: 24 GiB do
    not hold both sides at once. `random`: use random weights even if the hub's are in the cache.

    One in `ends` tokens ends the text (0: only the model's own end tokens). Completions of random weights are then about as
    unequal in length as those of a trained model.
    """

    work: Workload
    hub: str
    ends: int = 96
    faster: float | None = None
    smaller: float | None = None
    first_step: float | None = None
    trl: tuple[tuple[int, bool], ...] = ((16, False), (32, False), (16, True))
    apart: bool = False
    random: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration, with its end tokens."""
        found = read_shape(self.hub.rpartition("/")[2])
        own = found["eos_token_id"]
        return found | {"eos_token_id": [own, *range(96, found["vocab_size"], self.ends)] if self.ends else own}


# Goals: the seconds of a phase, as a multiple of its floor.
PHASES = {"sample": 1.8, "forward-backward": 1.4}
# Standard deviation of the logarithms of prompt lengths: a sixth of the prompts has 1.5 times the median length or more.
SPREAD = 0.4
_R1 = Real(
    Workload("R1", "SmolLM2-135M, 16 × 8, prompts of about 64 tokens, at most 64 more", prompt_tokens=64, spread=SPREAD),
    SMOL,
    faster=14.0,
    smaller=0.6,
    first_step=8.0,
)
_R2 = Real(
    Workload(
        "R2",
        "Qwen3-0.6B's shape, 2 × 4, prompts of about 128 tokens, at most 64 more",
        prompts=2,
        generations=4,
        prompt_tokens=128,
        spread=SPREAD,
    ),
    "Qwen/Qwen3-0.6B",
    faster=9.0,
    smaller=0.9,
    trl=((4, False), (8, False), (8, True)),
    apart=True,
)


def _hybrid(name: str, model: str, hub: str, **other: Any) -> Real:
    """Return R2 with a model that has recurrent layers."""
    work = replace(_R2.work, name=name, says=f"{model}'s shape, 2 × 4, prompts of about 128 tokens, at most 64 more", **other)
    return replace(_R2, work=work, hub=hub, faster=4.0, smaller=None)


def _like_r2(name: str, says: str, *, faster: float | None = None, smaller: float | None = None, **other: Any) -> Real:
    return replace(_R2, work=replace(_R2.work, name=name, says=says, **other), faster=faster, smaller=smaller)


WORKS = {
    real.work.name: real
    for real in (
        _R1,
        _R2,
        _like_r2("R2L", "R2 by LoRA of rank 16", lora_rank=16, faster=6.0, smaller=0.6),
        replace(
            _like_r2("R3", "R2 with prompts of about 1,024 tokens, 2 × 8", prompt_tokens=1024, generations=8, faster=15.0),
            trl=((2, False), (2, True)),  # with 4 rows TRL's process takes more than 21 GiB, and Linux kills it
        ),
        replace(
            _like_r2("R4", "R2L over a base in 4 bits (nf4)", lora_rank=16, quantize_base="nf4"),
            trl=((4, False), (4, True)),  # with 8 rows it is killed as well
        ),
        Real(
            Workload(
                "R5",
                "SmolLM2-135M's shape, 4 × 8 episodes of 4 turns of at most 64 tokens, answered by parts of the prompt",
                prompts=4,
                prompt_tokens=48,
                spread=SPREAD,
                turns=4,
            ),
            SMOL,
            ends=24,
            trl=((8, False), (16, False), (16, True)),
            random=True,  # so that turns end
        ),
        Real(
            Workload(
                "R6",
                "Gemma-3-270M's shape, 4 × 8, prompts of about 64 tokens, at most 64 more",
                prompts=4,
                prompt_tokens=64,
                spread=SPREAD,
            ),
            "google/gemma-3-270m",
            trl=((8, False), (8, True)),
        ),
        Real(
            Workload("R7", "SFT of SmolLM2-135M, 16 rows of about 104 tokens", "sft", prompt_tokens=64, spread=SPREAD),
            SMOL,
            ends=0,
            faster=5.0,
            smaller=0.5,
        ),
        replace(
            _hybrid("R8", "Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B"),
            trl=((4, True),),  # with float32 weights TRL's process takes 21 GB even with 2 rows
        ),
        replace(
            _hybrid("R8L", "By LoRA of rank 16, Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B", lora_rank=16),
            trl=((4, False), (4, True)),  # with 4 rows TRL's process takes 17 GB
        ),
        _hybrid("R9", "LFM2-350M", "LiquidAI/LFM2-350M"),
        replace(
            _hybrid("R10", "Granite-4-hybrid-350M", "ibm-granite/granite-4.0-h-350m"),
            trl=((4, False), (4, True)),  # with 4 rows TRL's process takes 20 GB
        ),
    )
}
# Packages that only TRL's process needs. `make bench-real` installs them here.
PACKAGES = Path(__file__).parents[1] / ".trl-packages"

Pair = dict[str, Any]
Measure = Callable[[Workload, int, Callable[[Pair], None]], None]


def measure(real: Real, dtype: str, threads: int, work: Workload, pairs: int, keep: Callable[[Pair], None]) -> None:
    """Measure `pairs` pairs of steps, and pass each to `keep`."""

    def make(work: Workload, folder: Path) -> None:
        source = folder / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(real.config))
        cached = not real.random and isinstance(try_to_load_from_cache(real.hub, "model.safetensors"), str)
        prepare(work, real.hub if cached else str(source), folder)

    def foretell(folder: Path, rate: Machine) -> dict[str, Any]:
        if work.turns > 1:  # a plan does not include the environment's tokens
            return {}
        made = planned(work, folder, dtype, rate)
        return {"plan": {"mb": made.memory.peak / 2**20, "seconds": made.seconds}}

    work, packages = replace(work, steps=pairs), str(PACKAGES) if work.quantize_base else ""
    beside(work, dtype, threads, make=make, keep=keep, foretell=foretell, packages=packages, apart=real.apart)


def lacks(real: Real) -> str:
    """Return why a workload cannot be measured here, or an empty text if it can."""
    coded = real.work.quantize_base
    if coded and not (find_spec("bitsandbytes") or PathFinder.find_spec("bitsandbytes", [str(PACKAGES)])):
        return f"TRL's base in {coded} needs bitsandbytes, which is not installed; `make bench-real` installs it"
    return ""


def complete(real: Real, found: list[Pair], pairs: int, take: Measure, keep: Callable[[Pair], None]) -> None:
    """Measure pairs until there is one for each setting of TRL, and `pairs` for its best one. `found` is extended."""

    def noted(setting: tuple[int, bool], pair: Pair) -> None:
        found.append({"workload": real.work.name, "trl_setting": list(setting), **pair})
        keep(found[-1])

    for setting in real.trl:
        if not of_setting(found, setting):
            take(_with(real.work, setting), 1, partial(noted, setting))
    while (missing := pairs - len(of_setting(found, best := best_of(found)))) > 0:  # with more pairs, another one may be best
        take(_with(real.work, best), missing, partial(noted, best))


def _with(work: Workload, setting: tuple[int, bool]) -> Workload:
    return replace(work, micro_batch=setting[0], half_weights=setting[1])


def of_setting(found: Sequence[Pair], setting: tuple[int, bool]) -> list[Pair]:
    """Return the pairs in which TRL had this setting."""
    return [pair for pair in found if tuple(pair["trl_setting"]) == setting]


def best_of(found: Sequence[Pair]) -> tuple[int, bool]:
    """Return the setting with which TRL's cost, relative to psigrad's, is lowest."""
    settings = {tuple(pair["trl_setting"]) for pair in found}
    return min(settings, key=lambda setting: statistics.median(p["trl"] / p["ours"] for p in of_setting(found, setting)))


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean and its 95 % interval, by Student's t of the logarithms; (0, ∞) for a single ratio."""
    mean, low, high = over_seeds(math.log(ratio) for ratio in ratios)
    return (math.exp(mean), math.exp(low), math.exp(high)) if len(ratios) > 1 else (math.exp(mean), 0.0, math.inf)


def judge(real: Real, found: Sequence[Pair]) -> tuple[list[str], bool]:
    """Return the lines to print, and True if a goal is missed."""
    best = best_of(found)
    taken = of_setting(found, best)
    settings = f"TRL by {best[0]} rows, {'bfloat16' if best[1] else 'float32'} weights, {len(taken)} pairs"
    lines = [f"{real.work.name}  {real.work.says} ({settings})"]
    missed = [_ratio(lines, [pair["trl"] / pair["ours"] for pair in taken], "times as fast", real.faster)]
    share = max(p["ours_mb"] for p in taken) / max(p["trl_mb"] for p in taken)
    missed.append(_most(lines, f"{share:.2f} of TRL's memory", share, real.smaller))
    first = statistics.median(pair["ours_first"] for pair in taken)
    others = statistics.median(pair["trl_first"] for pair in taken)
    missed.append(_most(lines, f"{first:.1f} s to the end of the first step (TRL {others:.1f})", first, real.first_step))
    for who, name in (("ours", "psigrad"), ("trl", "TRL")):
        seconds, tokens = (statistics.median(pair[f"{who}_{what}"] for pair in taken) for what in ("seconds", "tokens"))
        peak = max(pair[f"{who}_mb"] for pair in taken)
        speed = f"{tokens / seconds:.0f} tokens/s, " if tokens else ""  # TRL's SFT does not report its tokens
        lines.append(f"    {name}: {seconds:.2f} s a step, {speed}at most {peak:.0f} MiB")
    if plan := taken[-1].get("plan"):
        own = {"mb": max(p["ours_mb"] for p in taken), "seconds": statistics.median(p["ours_seconds"] for p in taken)}
        for what, unit, goal in (("mb", "MiB", 0.1), ("seconds", "s", 0.25)):
            off = abs(plan[what] / own[what] - 1)
            missed.append(_most(lines, f"the plan says {plan[what]:.4g} {unit}, {off:.0%} off", off, goal))
    for phase in taken[0]["phases"]:
        missed.append(_phase(lines, phase, taken))
    return lines, any(missed)


def _ratio(lines: list[str], ratios: Sequence[float], what: str, goal: float | None) -> bool:
    """Add a line with the ratios' mean and interval. Return True if the entire interval is below the goal."""
    mean, low, high = interval(ratios)
    bad = goal is not None and high / goal < 1
    lines.append(f"    {mean:.2f} {what} [{low:.2f}, {high:.2f}]" + _against(goal, bad))
    return bad


def _most(lines: list[str], says: str, measured: float, goal: float | None) -> bool:
    bad = goal is not None and measured > goal
    lines.append(f"    {says}" + _against(goal, bad))
    return bad


def _against(goal: float | None, bad: bool) -> str:
    return "" if goal is None else f" (goal {goal:g}{', missed' if bad else ''})"


def _phase(lines: list[str], phase: str, taken: Sequence[Pair]) -> bool:
    """Add a line with a phase's seconds, also as a multiple of its floor. Return True if the whole interval is above the goal."""
    seconds = statistics.median(pair["phases"].get(phase, 0.0) for pair in taken)
    if any(phase not in pair["floor"] for pair in taken):
        if seconds >= 0.005:
            lines.append(f"    {phase}: {seconds:.2f} s")
        return False
    mean, low, high = interval([pair["phases"][phase] / pair["floor"][phase] for pair in taken])
    bad = phase in PHASES and low > PHASES[phase]
    says = f"    {phase}: {seconds:.2f} s, {mean:.2f} times its floor [{low:.2f}, {high:.2f}]"
    lines.append(says + _against(PHASES.get(phase), bad))
    return bad


def main() -> int:
    """Measure the missing pairs of the requested workloads. Return 1 if a goal is missed, otherwise 0."""
    given, missed = ask(__doc__, WORKS, FILE, dtype="bfloat16", pairs=7), False
    for name in given.names:
        real, found = WORKS[name], given.taken(workload=name)
        if (why := lacks(real)) and not found:
            print(f"{name}  not measured: {why}", flush=True)
            continue
        complete(real, found, given.pairs, partial(measure, real, given.dtype, given.threads), given.keep)
        said, one = judge(real, found)
        print("\n".join(said), flush=True)
        missed |= one
    return int(missed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
