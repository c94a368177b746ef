"""`psigrad bench`: a user's own model, timed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from psigrad.errors import UserError
from psigrad.preflight.bench.inputs import prepare
from psigrad.preflight.bench.side_by_side import alone, beside, table
from psigrad.preflight.bench.workload import Workload
from psigrad.preflight.settings import BenchConfig


def run(asked: BenchConfig) -> str:
    """Time it. One JSON line goes to the file `asked.json` where it names one; returns the line and the table for people."""
    if not asked.model:
        raise UserError("No model was given; name a folder, a hub model or a configuration with --model.")
    if asked.kind in ("grpo", "rloo") and asked.generations < 2:
        raise UserError(
            f"generations is {asked.generations} and {asked.kind.upper()} compares completions of one prompt; give at least 2."
        )
    if asked.device == "cpu" and (asked.attention == "flex" or asked.cuda_graphs):
        raise UserError("attention=flex and cuda_graphs are for GPUs and device is cpu; leave them out or give --device cuda.")
    name = Path(asked.model).name or asked.model
    shared = {field.name: getattr(asked, field.name) for field in fields(Workload) if hasattr(asked, field.name)}
    work = Workload(name, f"{asked.model}, {asked.prompts} prompts × {asked.generations}", **shared)

    def make(work: Workload, folder: Path) -> None:
        prepare(work, asked.model, folder)

    measure = beside if asked.beside else alone
    found = measure(work, asked.dtype, asked.threads, make=make, device=asked.device)
    line = json.dumps(found)
    if asked.json:
        with open(asked.json, "a") as stream:
            stream.write(line + "\n")
    return line + "\n" + table([found])
