"""The evidence: pilots, fine-tuned start models, and alternating runs of psigrad and TRL, each a record. `make evidence` resumes
it.

python -m evidence.run [--pairs N] makes the missing records of the first N pairs of runs, and writes docs/evidence.md after each
record. An interrupted run restarts from step 0, so that its time is that of a full run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import resumable
from evidence import page, tasks
from evidence.page import LIBRARIES, Record, chosen, find, pass_at

import psigrad
from psigrad.errors import UserError
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.models import language_model
from psigrad.records.row_lines import read_steps
from psigrad.runs.machine import default_threads, provenance
from psigrad_extras.connect import likelihood
from psigrad_extras.referee import referee
from psigrad_extras.sums import smollm2

WORK = Path("runs/evidence")
HERE: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16"}


def sample(model: str, rows: list[dict[str, Any]]) -> list[int]:
    """Return how many of `DRAWS` completions solve each row, sampled at temperature 1."""
    output, reward = WORK / "sampled.json", f"{Path(tasks.__file__).resolve()}:solved"
    given = {"num_generations_eval": tasks.DRAWS, "max_completion_length": tasks.TOKENS, "reward_timeout": tasks.PATIENCE}
    output.unlink(missing_ok=True)
    psigrad.evaluate(model=model, dataset=rows, reward=reward, output=str(output), **given, **HERE)
    found: dict[str, int] = {}
    for one in json.loads(output.read_text())["completions"]:
        found[one["source"]] = found.get(one["source"], 0) + int(one["score"])
    return list(found.values())


def judge(model: str, task: str) -> Record:
    """Return a model's solved completions of each held-out row, and for each everyday item 1 if it is right."""
    counts = sample(model, tasks.rows(task)["held_out"])
    items = likelihood.everyday(language_model.load(model))
    return {"counts": counts, "everyday": "".join(str(int(item.right)) for item in items)}


def pilot(model: str, task: str, sft: bool) -> Record:
    """Return the solved completions of a candidate before training. With `sft`, fine-tune the model first."""
    rows = tasks.rows(task)
    if sft:
        said = [[{"role": "assistant", "content": row["answer"]}] for row in rows["sft"]]
        answers = [{"prompt": row["prompt"], "completion": one} for row, one in zip(rows["sft"], said, strict=True)]
        given = {"output_dir": str(WORK / "sft" / task), "eval_prompts": 0, "report": False, "progress": False, **HERE}
        model = str(psigrad.train("sft", model=model, dataset=answers, **given).model)
    return {"counts": sample(model, rows["train"][: tasks.PILOT])}


def compare(model: str, task: str, folder: Path) -> Record:
    """Return the referee's report on two steps of both sides in float32, on the same rows and tokens.

    They start from a model that psigrad trained. Before training, all rewards of a step are 0, and there is nothing to compare.
    """
    tasks.write_job(folder / "before", model, task, 0)
    measure(["-m", "psigrad", "grpo", "--config", str(folder / "before" / "psigrad.json")], folder / "log.txt")
    tasks.write_job(folder, str(folder / "before" / "psigrad" / "model"), task, 0, "float32")
    script = shlex.join([str(Path(__file__).with_name("trl_side.py")), str(folder)])
    parts, lines = referee.run([str(folder / "psigrad.json")], script, sys.executable, 2, 0.0)
    return {"parts": parts, "report": lines}


def train(library: str, model: str, task: str, seed: int, folder: Path) -> Record:
    """Train by GRPO in a separate process, and return its costs, its curve, and the figures of the saved model."""
    tasks.write_job(folder, model, task, seed)
    if library == "psigrad":
        costs = measure(["-m", "psigrad", "grpo", "--config", str(folder / "psigrad.json")], folder / "log.txt")
        steps = list(read_steps(folder / "psigrad" / "metrics.jsonl"))
        asked = [row["prompt"][-1]["content"] for row in read_steps(folder / "psigrad" / "rollouts.jsonl")]
    else:
        costs = measure([str(Path(__file__).with_name("trl_side.py")), str(folder)], folder / "log.txt")
        steps, asked = json.loads((folder / "trl" / "history.json").read_text())
    size = tasks.PROMPTS * tasks.GROUP
    by_step = [sorted(asked[first : first + size]) for first in range(0, len(asked), size)]  # within a step the order is free
    return {
        **costs,
        "samples": len(asked),
        "questions": sha256(json.dumps(by_step).encode()).hexdigest()[:12],
        "rewards": [round(float(step["reward"]), 4) for step in steps if "reward" in step],
        **judge(str(folder / library / "model"), task),
    }


def measure(arguments: list[str], log: Path) -> Record:
    """Run Python, and return its seconds, processor seconds, and peak memory in MiB, with those of its child processes."""
    begin, before, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, *arguments], stdout=out, stderr=subprocess.STDOUT)
    root = psutil.Process(process.pid)
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):  # a child that has just ended
            peak = max(peak, sum(one.memory_full_info().pss for one in (root, *root.children(recursive=True))) / 2**20)
        time.sleep(0.5)
    if process.returncode:
        raise UserError(f"{shlex.join(arguments)} ended with status {process.returncode}; its output is in {log}.")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(time.perf_counter() - begin, 1), "cpu_seconds": round(cpu, 1), "peak_mb": round(peak)}


def once(records: list[Record], make: Callable[[], Record], **key: Any) -> None:
    """If the record with this key is missing, make it and store it."""
    if find(records, **key):
        return
    load = os.getloadavg()[0]
    found = {**key, "digest": tasks.DIGEST, **make(), "load": [round(load, 1), round(os.getloadavg()[0], 1)]}
    records.append(found | {"threads": default_threads(), **provenance("cpu")})
    resumable.append(page.FILE, records[-1])
    page.write(records)
    print(key, found["load"], flush=True)


def main() -> None:
    """Make the missing records, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=page.PAIRS)
    pairs = parser.parse_args().pairs
    base, now, records = convert_to_folder(str(smollm2(WORK / "model"))), WORK / "now", page.read()
    for sft, task in itertools.product((False, True), tasks.CANDIDATES):
        before = find(records, kind="pilot", task=task, sft=False)
        if not sft or (pass_at(before, tasks.DRAWS) < tasks.LOW and len(chosen(records)) < tasks.TASKS):
            once(records, partial(pilot, base, task, sft), kind="pilot", task=task, sft=sft)
    starts = {task: str(WORK / "sft" / task / "model") if sft else base for task, sft in chosen(records)}
    if len(starts) < tasks.TASKS:
        raise UserError(f"Only {len(starts)} of {tasks.TASKS} tasks have a pass@{tasks.DRAWS} in the range; add candidates.")
    for number, (seed, task) in enumerate(itertools.islice(itertools.product(tasks.SEEDS, starts), pairs)):
        once(records, partial(judge, starts[task], task), kind="start", task=task)
        for library in LIBRARIES if number % 2 == 0 else LIBRARIES[::-1]:
            shutil.rmtree(now, ignore_errors=True)
            run = partial(train, library, starts[task], task, seed, now)
            once(records, run, kind="run", task=task, seed=seed, library=library)
        shutil.rmtree(now, ignore_errors=True)
        once(records, partial(compare, starts[task], task, now), kind="referee")
    page.write(records)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
