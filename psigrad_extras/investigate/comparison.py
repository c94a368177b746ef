"""The comparison of several methods from one checkpoint, over seeds, with equal numbers of samples.

It measures the training reward, the held-out metric (the "truth"), KL, length, time and memory. Every run is a separate process,
so that its memory can be measured. The measurements are in `compare.json` in the output folder, from which the page is drawn.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psigrad import redaction
from psigrad.compat.foreign_names import load
from psigrad.config import Data, EvalConfig, Evaluation, Model, OnlineConfig, PreferenceConfig, Run
from psigrad.config.fields import FREE, RECORDED, find_marked
from psigrad.config.load import to_dict
from psigrad.config.methods import declaration
from psigrad.config.nested import flatten
from psigrad.errors import UserError
from psigrad.intervals import over_seeds
from psigrad.language.recipes import dispatch, evaluate, online_settings
from psigrad.language.recipes.run_pins import static_pins
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.paths import absolute, claim
from psigrad.processes.proc import die_with_parent
from psigrad.records import pins
from psigrad.records.row_lines import read_steps, replace_file
from psigrad.records.rows import parse_row
from psigrad.runs import machine
from psigrad.runs.progress import bar
from psigrad_extras.datasets import preferences
from psigrad_extras.datasets.sample import read_rows, write_jsonl

UNPAIRED = "unpaired.jsonl"
FIGURES = ("truth", "proxy", "kl", "length", "samples", "seconds", "peak_mb")


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison: methods by name, on the model and prompts of `config`. Offline methods train on `pairs`."""

    methods: tuple[str, ...]
    config: OnlineConfig
    seeds: tuple[int, ...] = (0, 1, 2)
    pairs: str = ""


def run(comparison: Comparison) -> Path:
    """Do all runs without a result yet, draw `compare.html`, and return the path of the page.

    A preference method trains on `pairs`, with as many completions per step as the online methods sample. Raises `UserError` on
    invalid settings or data, if the folder has results of other settings, and if a run failed.
    """
    check(comparison)
    folder = claim(absolute(comparison.config.run.output_dir or "runs/compare"), "compare")
    (folder / "settings").mkdir(exist_ok=True)
    if "kto" in comparison.methods:  # KTO learns from single answers
        write_jsonl(folder / UNPAIRED, preferences.split_pairs(read_rows(comparison.pairs)))
    jobs = list_jobs(comparison)
    code = {method: own_code(settings_of(comparison, folder, method, 0), comparison.config) for method in comparison.methods}
    for method, seed in jobs:
        _check_same(comparison, folder, method, seed)
        _check_code(folder, method, seed, code[method])
    with bar("compare", len(jobs), enabled=comparison.config.run.progress, every=1, unit="run") as advance:
        for method, seed in jobs:
            advance(0, f"{method} seed {seed}")
            _finish(comparison, folder, method, seed)
            _check_code(folder, method, seed, code[method])
            advance(note=f"{method} seed {seed}")
    measured = [json.loads(_record(folder, m, s).read_text()) for m, s in jobs]
    (folder / "compare.json").write_text(json.dumps({"runs": measured, "table": table(measured)}, indent=1) + "\n")
    from psigrad_extras.investigate import compare

    return compare.write(folder)


def list_jobs(comparison: Comparison) -> list[tuple[str, int]]:
    """Return (method, seed) of all runs, without duplicates, which would make the intervals too narrow."""
    return [(method, seed) for method in dict.fromkeys(comparison.methods) for seed in dict.fromkeys(comparison.seeds)]


def check(comparison: Comparison) -> None:
    """Raise `UserError` for settings that cannot work, before the first run starts."""
    if not comparison.methods or not comparison.seeds:
        raise UserError(
            "compare needs at least one method and one seed; for example psigrad compare grpo rloo ppo --seeds 0 1 2 …"
        )
    if not comparison.config.run.max_steps:
        raise UserError("compare needs --max-steps, because all methods must train for the same number of steps; set it.")
    if comparison.config.hub.push_to_hub:
        raise UserError("compare pushes no models; remove push_to_hub, and push one later with psigrad push RUN REPO.")
    for method in comparison.methods:
        found = declaration(method)
        if found.settings not in (OnlineConfig, PreferenceConfig):
            raise UserError(f"compare takes online methods and preference losses; {method} is neither; remove it.")
        if not found.online and not comparison.pairs:
            raise UserError(f"{method} learns from pairs of completions; name their file with --pairs FILE.")
        if found.online:
            made = settings_of(comparison, Path("."), method, 0)
            assert isinstance(made, OnlineConfig)
            online_settings.check(made, online_settings.method(made))


def settings_of(comparison: Comparison, folder: Path, method: str, seed: int) -> OnlineConfig | PreferenceConfig:
    """Return the settings of one run."""
    config = comparison.config
    where = replace(config.run, output_dir=str(folder / f"{method}-{seed}"), seed=seed, progress=False, report=False)
    found = declaration(method)
    if found.online:
        # Use the method's defaults for settings that the comparison does not change. All methods get equal samples per step.
        usual = OnlineConfig()
        own = {n: v for n, v in found.defaults.items() if n != "num_generations" and getattr(config, n) == getattr(usual, n)}
        changes = config.algorithm if isinstance(config.algorithm, Mapping) else {}
        algorithm: Any = {**changes, "preset": method} if set(changes) - {"preset"} else method
        return replace(config, **{**own, "algorithm": algorithm}, run=where)
    samples = config.prompts_per_step * config.num_generations
    return PreferenceConfig(
        model=config.model,
        data=replace(
            config.data, dataset=str(folder / UNPAIRED) if method == "kto" else comparison.pairs, columns="", eval_dataset=""
        ),
        optim=config.optim,
        evaluation=replace(config.evaluation, eval_prompts=0),
        run=where,
        loss=method,
        batch_size=samples if method == "kto" else max(1, samples // 2),
        micro_batch_tokens=config.micro_batch_tokens,
    )


def _record(folder: Path, method: str, seed: int) -> Path:
    return folder / "settings" / f"{method}-{seed}.result.json"


def _is_done(result: Path) -> bool:
    return result.exists() and "process_seconds" in (parse_row(result.read_bytes()) or {})


def _task(comparison: Comparison, folder: Path, method: str, seed: int) -> dict[str, Any]:
    """Return the settings of one run as JSON, for its process."""
    settings = to_dict(settings_of(comparison, folder, method, seed))
    judged = to_dict(replace(comparison.config, run=replace(comparison.config.run, seed=seed)))
    pairs = "" if declaration(method).online else comparison.pairs
    return {"method": method, "seed": seed, "settings": settings, "judged": judged, "pairs": pairs}


def _check_same(comparison: Comparison, folder: Path, method: str, seed: int) -> None:
    """Raise `UserError` if there is a result of other settings, except for those that a resumed run is free to change."""
    job = folder / "settings" / f"{method}-{seed}.json"
    told = parse_row(job.read_bytes()) if job.exists() else None
    if told is None or not _is_done(_record(folder, method, seed)):
        return
    task = json.loads(json.dumps(redaction.clear(_task(comparison, folder, method, seed))))
    before, now = ({**flatten(one["judged"]), "pairs": one["pairs"]} for one in (told, task))
    # The order of the methods does not matter.
    free = {"algorithm", "algorithm.preset", *find_marked(OnlineConfig, FREE), *find_marked(OnlineConfig, RECORDED)}
    if other := [name for name in sorted({*before, *now} - free) if before.get(name, "usual") != now.get(name, "usual")]:
        what = "; ".join(f"{name} was {before.get(name, 'usual')!r} and is {now.get(name, 'usual')!r}" for name in other[:5])
        raise UserError(
            f"{folder} holds results of {method}, seed {seed}, with other settings ({what}); name another folder with "
            "--output-dir, or use the earlier settings."
        )


def own_code(settings: OnlineConfig | PreferenceConfig, judged: OnlineConfig) -> dict[str, str]:
    """Return hashes of the user's code in a run and in its held-out evaluation, by the names of `pins.CODE`."""
    judges = [RewardSetup.of(judged), RewardSetup.of_metric(judged)]
    return {name: value for name, value in static_pins(settings, judges).items() if name in pins.CODE}


def _check_code(folder: Path, method: str, seed: int, code: Mapping[str, str]) -> None:
    """Raise `UserError` if there is a result that was computed before the user's code was changed."""
    result = _record(folder, method, seed)
    before = (parse_row(result.read_bytes()) or {}).get("code") if _is_done(result) else None
    if before is not None and before != code:
        changed = ", ".join(name for name in pins.CODE if before.get(name) != code.get(name))
        raise UserError(
            f"{folder} holds a result of {method}, seed {seed}, from other code (changed: {changed}), so it cannot be "
            "compared with new results; name another folder with --output-dir, or change the code back."
        )


def _finish(comparison: Comparison, folder: Path, method: str, seed: int) -> None:
    """Run one job in a separate process, unless its result exists."""
    result = _record(folder, method, seed)
    if _is_done(result):
        return
    job, task = folder / "settings" / f"{method}-{seed}.json", _task(comparison, folder, method, seed)
    job.write_text(json.dumps(redaction.clear(task)))  # for reading only: the process gets the task with its secrets
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "psigrad_extras.investigate.comparison", str(result)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stderr is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as told:  # if the process died at once, its status shows it
        told.write(json.dumps(task).encode())
    error = process.stderr.read().decode(errors="replace").strip()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"The run of {method}, seed {seed}, failed: {error.splitlines()[-1] if error else process.returncode}")
    measured = json.loads(result.read_text())
    peak = usage.ru_maxrss / 1024
    whole = {**measured, "peak_mb": peak, "process_seconds": time.perf_counter() - started}
    replace_file(result, [json.dumps(whole).encode()])


def work(task: Mapping[str, Any], result: Path) -> None:
    """Do one run, evaluate it on the held-out prompts, and write the measurements to the file `result`."""
    finished = dispatch.run(load(declaration(task["method"]).settings, flags=task["settings"]))
    config = load(OnlineConfig, flags=task["judged"])
    code = own_code(load(declaration(task["method"]).settings, flags=task["settings"]), config)
    rows = list(read_steps(finished.folder / "metrics.jsonl"))
    timings = list(read_steps(finished.folder / "timings.jsonl"))
    curve = [_point(row, config) for row in rows if f"eval/{_metric(config)}/mean" in row]
    last = measured(finished.model, config)
    seconds = sum(row["step_time"] for row in timings if "time/update" in row or "time/sample" in row)
    per_step = config.prompts_per_step * config.num_generations
    sampled = sum(row.get("samples", 0) for row in rows) or config.run.max_steps * per_step
    if not curve or curve[-1]["samples"] < sampled:  # offline methods are evaluated only at their end
        curve.append({"samples": sampled, "truth": last["truth"], "kl": last["kl"]})
    made = {"method": task["method"], "seed": task["seed"], "curve": curve, "seconds": seconds, "samples": sampled, **last}
    made["code"] = code
    result.write_text(json.dumps(made))


def measured(model: Path, config: OnlineConfig) -> dict[str, float]:
    """Return measurements on the held-out prompts: metric ("truth"), training reward ("proxy"), length, KL to the first model."""
    shared: dict[str, Any] = {
        "model": Model(path=str(model), dtype=config.model.dtype),
        "data": Data(config.data.eval_dataset, config.data.columns, config.data.plain_prompts, config.data.eval_split),
        "sampling": config.sampling,
        "run": Run(seed=config.run.seed, device=config.run.device, threads=config.run.threads),
    }
    proxy = EvalConfig(
        **shared,
        evaluation=Evaluation(eval_prompts=config.evaluation.eval_prompts),
        reward=config.reward,
        reward_model=config.reward_model,
        reward_weights=config.reward_weights,
    )
    found = evaluate.run(proxy)
    figures = found.figures
    value = next(v for name, v in figures.items() if name.endswith("/mean"))
    truth = value
    if config.evaluation.metric:
        truth = evaluate.run(replace(proxy, reward=(config.evaluation.metric,), reward_model=(), reward_weights=())).figures[
            f"eval/{_metric(config)}/mean"
        ]
    kl = evaluate.kl_to(str(model), config.model.path, found, config)
    return {"truth": truth, "proxy": value, "length": figures["eval/completions/mean_length"], "kl": kl}


def _metric(config: OnlineConfig) -> str:
    from psigrad.language.rewards import resolve

    if config.evaluation.metric:
        return resolve(config.evaluation.metric).name
    return resolve(config.reward[0]).name if len(config.reward) == 1 and not config.reward_model else "reward"


def _point(row: dict[str, Any], config: OnlineConfig) -> dict[str, float]:
    samples = row["step"] * config.prompts_per_step * config.num_generations
    return {"samples": samples, "truth": row[f"eval/{_metric(config)}/mean"], "kl": row.get("eval/kl", math.nan)}


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean and 95 % interval (Student's t over seeds) of every metric of every method, in the given order.

    `lead` is the held-out metric minus that of the first method with the same seed.
    """
    made: list[dict[str, Any]] = []
    first = {run["seed"]: float(run["truth"]) for run in runs if run["method"] == runs[0]["method"]}
    for method in dict.fromkeys(run["method"] for run in runs):
        mine = [run for run in runs if run["method"] == method]
        row: dict[str, Any] = {"method": method, "seeds": len(mine)}
        for name in FIGURES:
            row[name] = list(over_seeds(float(run[name]) for run in mine))
        if made and (leads := [float(run["truth"]) - first[run["seed"]] for run in mine if run["seed"] in first]):
            row["lead"] = list(over_seeds(leads))
        made.append(row)
    return made


if __name__ == "__main__":
    die_with_parent()
    try:
        machine.prepare_torch(Run())
        work(json.load(sys.stdin), Path(sys.argv[1]))
    except UserError as mistake:
        sys.exit(str(mistake))
