"""psigrad beside TRL on the models and lengths that people train with: `python benchmarks/real.py [R1 R7 …] [--pairs 7]`.

Each pair is one step of each side, and is written down at once: a run that was cut off goes on where it was. TRL's settings (rows
of a forward pass; float32 weights under autocast, or bfloat16 weights) get one pair each, and its best one gets the others.
Weights are those of the hub's cache where it has them, else random ones of the same shape.

The exit status is 1 where a goal is missed: where the upper end of the 95 % interval of the ratio, over the goal, lies below one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from beside_trl import beside
from huggingface_hub import try_to_load_from_cache

from psigrad.errors import UserError
from psigrad.intervals import over_seeds
from psigrad.runs.machine import provenance
from psigrad_extras.preflight.bench.inputs import prepare
from psigrad_extras.preflight.bench.workload import Workload

FILE = Path(__file__).parent / "results" / "real.jsonl"
SMOL_NAME = "HuggingFaceTB/SmolLM2-135M"
SMOL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.0417,
}
_QWEN = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_theta": 1000000,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "head_dim": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Real:
    """A workload on a model of the hub, or one of its shape. `faster`: TRL's seconds over ours; `smaller`: our memory over TRL's;
    `trl`: the settings of TRL that are tried, (rows of a forward pass, whether its weights are bfloat16).
    """

    work: Workload
    hub: str
    config: dict[str, Any]
    faster: float | None = None
    smaller: float | None = None
    trl: tuple[tuple[int, bool], ...] = ((16, False), (32, False), (16, True))


_R2 = Real(
    Workload("R2", "Qwen3-0.6B's shape, 2 × 4, 128 + 64 tokens", prompts=2, generations=4, prompt_tokens=128),
    "Qwen/Qwen3-0.6B",
    _QWEN,
    faster=9.0,
    smaller=0.9,
    trl=((4, False), (8, False), (8, True)),
)
WORKS = {
    real.work.name: real
    for real in (
        Real(
            Workload("R1", "SmolLM2-135M, 16 × 8, 64 + 64 tokens", prompt_tokens=64),
            SMOL_NAME,
            SMOL,
            14.0,
            0.6,
        ),
        _R2,
        replace(_R2, work=replace(_R2.work, name="R2L", says="R2 by LoRA of rank 16", lora_rank=16), faster=6.0, smaller=0.6),
        replace(
            _R2,
            work=replace(_R2.work, name="R3", says="R2 with prompts of 1,024 tokens, 2 × 8", prompt_tokens=1024, generations=8),
            faster=15.0,
            smaller=None,
        ),
        Real(
            Workload("R6", "Gemma-3-270M's shape, 4 × 8, 64 + 64 tokens", prompts=4, prompt_tokens=64),
            "google/gemma-3-270m",
            _GEMMA,
            trl=((8, False), (8, True)),
        ),
        Real(
            Workload("R7", "SFT of SmolLM2-135M, 16 rows of 80 to 128 tokens", "sft", prompt_tokens=64),
            SMOL_NAME,
            SMOL,
            5.0,
            0.5,
        ),
    )
}
NOT_YET = {"R4": "LoRA over a base in 4 bits is not built", "R5": "episodes of several turns have no peer in TRL's trainer here"}

Pair = dict[str, Any]
Measure = Callable[[Workload, int, Callable[[Pair], None]], None]


def measure(real: Real, dtype: str, threads: int, work: Workload, pairs: int, keep: Callable[[Pair], None]) -> None:
    """Take `pairs` pairs of steps, each given to `keep`."""

    def make(work: Workload, folder: Path) -> None:
        source = folder / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(real.config))
        cached = isinstance(try_to_load_from_cache(real.hub, "model.safetensors"), str)
        prepare(work, real.hub if cached else str(source), folder)

    beside(replace(work, steps=pairs), dtype, threads, make=make, keep=keep)


def complete(real: Real, found: list[Pair], pairs: int, take: Measure, keep: Callable[[Pair], None]) -> None:
    """Take what is missing of `pairs` pairs: one of every setting of TRL, then of its best one. `found` grows."""

    def noted(setting: tuple[int, bool], pair: Pair) -> None:
        found.append({"workload": real.work.name, "trl_setting": list(setting), **pair})
        keep(found[-1])

    for setting in real.trl:
        if not of_setting(found, setting):
            take(_with(real.work, setting), 1, partial(noted, setting))
    best = best_of(found)
    if (missing := pairs - len(of_setting(found, best))) > 0:
        take(_with(real.work, best), missing, partial(noted, best))


def _with(work: Workload, setting: tuple[int, bool]) -> Workload:
    return replace(work, micro_batch=setting[0], half_weights=setting[1])


def of_setting(found: Sequence[Pair], setting: tuple[int, bool]) -> list[Pair]:
    """The pairs that TRL took with this setting."""
    return [pair for pair in found if tuple(pair["trl_setting"]) == setting]


def best_of(found: Sequence[Pair]) -> tuple[int, bool]:
    """The setting whose pairs cost TRL least, beside ours."""
    settings = {tuple(pair["trl_setting"]) for pair in found}
    return min(settings, key=lambda setting: statistics.median(p["trl"] / p["ours"] for p in of_setting(found, setting)))


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and 95 % interval, by Student's t of the logarithms; of a single ratio the interval is everything."""
    mean, low, high = over_seeds(math.log(ratio) for ratio in ratios)
    return (math.exp(mean), math.exp(low), math.exp(high)) if len(ratios) > 1 else (math.exp(mean), 0.0, math.inf)


def judge(real: Real, found: Sequence[Pair]) -> tuple[list[str], bool]:
    """Lines for people, and whether a goal is missed."""
    best = best_of(found)
    taken = of_setting(found, best)
    ratio, low, high = interval([pair["trl"] / pair["ours"] for pair in taken])
    share = max(p["ours_mb"] for p in taken) / max(p["trl_mb"] for p in taken)
    slow, large = real.faster is not None and high / real.faster < 1, real.smaller is not None and share > real.smaller
    settings = f"TRL by {best[0]} rows, {'bfloat16' if best[1] else 'float32'} weights, {len(taken)} pairs"
    lines = [f"{real.work.name}  {real.work.says} ({settings})"]
    goals = f" (goal {real.faster:g}{', missed' if slow else ''})" if real.faster else ""
    lines.append(f"    {ratio:.2f} times as fast [{low:.2f}, {high:.2f}]{goals}")
    goals = f" (goal {real.smaller:g}{', missed' if large else ''})" if real.smaller else ""
    lines.append(f"    {share:.2f} of TRL's memory{goals}")
    return lines, slow or large


def main() -> int:
    """Measure what was asked for and is missing; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKS)}; all of them where none is named")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7, help="of steps in turn; fewer than 7 prove nothing")
    parser.add_argument("--json", type=Path, default=FILE)
    given = parser.parse_args()
    if odd := [name for name in given.workloads if name not in WORKS]:
        raise UserError(f"{odd[0]} is none of {', '.join(WORKS)}." + (f" {NOT_YET[odd[0]]}." if odd[0] in NOT_YET else ""))
    given.json.parent.mkdir(parents=True, exist_ok=True)
    where = {"dtype": given.dtype, "threads": given.threads, "processor": provenance("cpu")["processor"]}
    lines = given.json.read_text().splitlines() if given.json.exists() else []
    before = [pair for line in lines if where.items() <= (pair := json.loads(line)).items()]
    missed = False
    for name in given.workloads or WORKS:
        real, found = WORKS[name], [pair for pair in before if pair["workload"] == name]

        def keep(pair: Pair) -> None:
            with given.json.open("a") as stream:
                stream.write(json.dumps({**pair, **where}) + "\n")

        complete(real, found, given.pairs, partial(measure, real, given.dtype, given.threads), keep)
        said, one = judge(real, found)
        print("\n".join(said), flush=True)
        missed |= one
    if not given.workloads:
        print("\n".join(f"{name}  not measured: {why}" for name, why in NOT_YET.items()))
    return int(missed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
