"""The speed of psigrad relative to TRL for each model family: `python benchmarks/family_ratio.py [llama gemma2 …]`.

The workload is GRPO on a small model of the family with random weights. Loss and gradient must be equal first; then the
libraries' steps alternate. A name with @100M stands for a model of about 100 million parameters. Each family's result is a line
of the file --json, and a family with a line is not measured again. `docs/make/families.py` shows the ratios.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from beside_trl import beside
from real import interval
from resumable import ask
from timed.inputs import prepare
from timed.workload import Workload

from psigrad.errors import UserError
from psigrad.language.models import language_model

sys.path.append(str(Path(__file__).parents[1] / "docs" / "make"))
import families

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    # no dropout, which TRL applies by default
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "residual_dropout"), 0.0),
    "mamba_d_head": 64,
    "mamba_d_ssm": 512,
    "vocab_size_per_layer_input": 4096,
}
LARGE = "@100M"
LARGE_SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "head_dim": 64,
    "vocab_size": 16384,
    "vocab_size_per_layer_input": 16384,
    "shared_intermediate_size": 2048,
    "moe_intermediate_size": 768,
    "mamba_n_heads": 24,
    "mamba_d_ssm": 1536,
}
WORK = Workload(
    "",
    "4 prompts of about 32 tokens × 8 completions of at most 32",
    prompts=4,
    prompt_tokens=32,
    completion_tokens=32,
    spread=0.4,
)


def make(name: str, work: Workload, folder: Path) -> None:
    """Write the files of a workload with a model of this family."""
    source = folder / "source"
    source.mkdir()
    own, sizes = families.FAMILIES[name.removesuffix(LARGE)][1], SIZES
    if name.endswith(LARGE):  # lists have an entry per layer: 16 instead of 4
        sizes = {**SIZES, **LARGE_SIZES, **{key: 4 * value for key, value in own.items() if isinstance(value, list)}}
    families.config(name.removesuffix(LARGE), **sizes).save_pretrained(source)
    prepare(work, str(source), folder)


def measure(name: str, dtype: str, threads: int, pairs: int, work: Workload = WORK) -> dict[str, Any]:
    """Return a family's pairs (seconds per token of psigrad and of TRL), or the reason why there are none."""
    work, taken = replace(work, name=name, steps=pairs), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        make(name, work, Path(folder))
        way = families.way(language_model.load(str(Path(folder) / "model"), dtype=dtype))
    try:
        beside(work, dtype, threads, make=partial(make, name), keep=taken.append)
    except (UserError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        return {"way": way, "why": str(error).strip().splitlines()[-1]}
    return {
        "way": way,
        "pairs": [[pair["ours"], pair["trl"]] for pair in taken],
        "seconds": [[pair["ours_seconds"], pair["trl_seconds"]] for pair in taken],
        "mb": [max(pair[f"{who}_mb"] for pair in taken) for who in ("ours", "trl")],
    }


def said(found: dict[str, Any]) -> str:
    """Return the line to print for a family."""
    if "why" in found:
        return f"{found['family']} ({found['way']}): not compared: {found['why']}"
    middle, low, high = interval([theirs / ours for ours, theirs in found["pairs"]])
    share = found["mb"][0] / found["mb"][1]
    return f"{found['family']} ({found['way']}): {middle:.2f} times as fast [{low:.2f}, {high:.2f}], {share:.2f} of TRL's memory"


def main() -> None:
    """Measure the requested families that have no result yet."""
    known = [*families.FAMILIES, *(f"{name}{LARGE}" for name in families.FAMILIES)]
    given = ask(__doc__, known, families.MEASURED, dtype="float32", pairs=7)
    for name in given.names if given.names != known else families.FAMILIES:
        if not given.taken(family=name):
            given.keep(measure(name, given.dtype, given.threads, given.pairs), family=name)
        print(said(given.taken(family=name)[-1]), flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
