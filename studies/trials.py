"""Training runs of an experiment: arms × seeds from one fine-tuned model, resumable; their curves and verdicts.

The task is the demo's with words of three to five letters: spelling backwards, learned from demonstrations. A share of the
demonstrations swaps the last two letters. A run takes some ten seconds.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from psigrad.compat.foreign_names import load
from psigrad.config import Data, Evaluation, Model, OnlineConfig, Optim, Run, SampleConfig, SFTConfig
from psigrad.config.load import to_dict
from psigrad.config.methods import declaration
from psigrad.control import run as control
from psigrad.control.settings import ControlConfig
from psigrad.errors import UserError
from psigrad.intervals import Interval, over_seeds, wilson
from psigrad.language.recipes import dispatch, sft
from psigrad.processes.proc import die_with_parent
from psigrad.records.report.plots import COLOURS
from psigrad.records.row_lines import read_steps, replace_file, rollout_files
from psigrad.records.rows import figures, parse_row
from psigrad.records.warnings import SignalNames, Watch
from psigrad.runs.progress import bar
from psigrad_extras import demo
from psigrad_extras.datasets import sample
from studies import drawing
from studies.settings import PretrainedSettings, TrialSettings

TUNING_SEED = 1000
"""The seed on which learning rates are chosen. No reported figure uses it."""
ACCURACY = "eval/exact/mean"
"""The key of the held-out accuracy in a run's metrics."""
Verdict = Literal["holds", "does not hold", "undecided"]
Arms = Mapping[str, tuple[str, Any]]
"""The method and the settings of each arm."""


@dataclass(frozen=True)
class Trial:
    """One run: its arm and seed, and its settings without paths."""

    arm: str
    seed: int
    method: str
    """A training command of psigrad."""
    settings: Any


@dataclass(frozen=True)
class ClaimVerdict:
    """The result for one claim, by a test stated beforehand."""

    claim: str
    test: str
    verdict: Verdict
    difference: Interval
    """The differences between figures of the same seeds."""


@dataclass(frozen=True)
class Arm:
    """The measurements of one arm, over seeds."""

    name: str
    steps: tuple[int, ...]
    curve: tuple[Interval, ...]
    """The held-out accuracy at each of `steps`."""
    figures: dict[str, Interval]
    each: dict[str, tuple[float, ...]]
    """The same figures for each seed."""


@dataclass(frozen=True)
class TrialResult:
    """The results of an experiment."""

    settings: Any
    arms: tuple[Arm, ...]
    findings: tuple[ClaimVerdict, ...]
    core_minutes: float = 0.0
    """The processor time of its runs, including tuning; 0 if it was not measured."""


def check(s: TrialSettings) -> None:
    """Raise an error for invalid settings."""
    for name in ("seeds", "steps", "prompts", "generations", "sft_steps", "processes", "words", "held_out"):
        if getattr(s, name) < 1:
            raise UserError(f"{name} is {getattr(s, name)}; it must be at least 1.")
    if s.generations < 2:
        raise UserError(f"generations is {s.generations}; groups need at least 2 completions of a prompt.")


def check_rates(rates: Sequence[float]) -> None:
    """Raise an error for invalid learning rates."""
    if not rates or min(rates) <= 0:
        raise UserError(f"rates are {rates}; give at least one learning rate above 0.")


def files(s: TrialSettings) -> dict[str, Path]:
    """Return the paths of prompts, demonstrations, held_out and model, with which every run starts.

    They are created once for all experiments in a folder.
    """
    folder = Path(s.out) / "start" / f"{s.words}-words-{s.sft_steps}-steps"
    made = demo.prepare(folder, 0, False, words=s.words, longest=5, hidden=96, layers=3)
    if (model := folder / "sft" / "model").exists():
        return {**made, "model": model}
    tuned = sft.run(
        SFTConfig(
            model=Model(path=str(made["base"])),
            data=Data(dataset=str(made["demonstrations"]), eval_dataset=str(made["held_out"])),
            optim=Optim(learning_rate=3e-3, adam_beta2=0.99, weight_decay=0.01, warmup_steps=50),
            run=Run(output_dir=str(folder / "sft"), max_steps=s.sft_steps, progress=False, report=False, threads=1),
            batch_size=64,
            sampling=demo.SAMPLING,
            evaluation=demo.EVALUATION,
        )
    )
    return {**made, "model": tuned.model}


def online(s: TrialSettings, where: Mapping[str, Path], algorithm: Any, **changed: Any) -> OnlineConfig:
    """Return the default settings of an online run with this algorithm and the `changed` settings."""
    usual = OnlineConfig(
        model=Model(path=str(where["model"])),
        data=Data(dataset=str(where["prompts"]), eval_dataset=str(where["held_out"])),
        optim=Optim(learning_rate=s.learning_rate, adam_beta2=0.99, warmup_steps=5),
        run=Run(max_steps=s.steps, progress=False, report=False, threads=1),
        algorithm=algorithm,
        reward=("reasoning_gym",),
        prompts_per_step=s.prompts,
        num_generations=s.generations,
        sampling=demo.SAMPLING,
        evaluation=Evaluation(eval_prompts=s.held_out, metric="exact", eval_steps=max(1, s.steps // 10)),
    )
    return replace(usual, **changed)


def at_rate(config: Any, rate: float) -> Any:
    """Return the settings at another learning rate."""
    return replace(config, optim=replace(config.optim, learning_rate=rate))


def run_all(
    s: TrialSettings | PretrainedSettings, name: str, trials: Sequence[Trial]
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the metrics of each run, by (arm, seed). Finished runs of an earlier call are read, unfinished ones resumed.

    Raises `UserError` if a run failed. The files of the other runs are kept.
    """
    folder = Path(s.out) / "runs" / name
    places = {(t.arm, t.seed): place(s, name, t.arm, t.seed) for t in trials}
    left = [t for t in trials if not _done(places[t.arm, t.seed], t)]
    context = multiprocessing.get_context("spawn")
    with (
        bar(name, len(left), enabled=s.progress) as advance,
        ProcessPoolExecutor(s.processes, context, _quiet, (folder / "output.log",)) as pool,
    ):
        jobs = {pool.submit(_run, t.method, to_dict(_with_place(t, places[t.arm, t.seed]))): t for t in left}
        for job in as_completed(jobs):
            trial = jobs[job]
            try:
                seconds = job.result()
            except UserError as error:
                raise UserError(f"The run of {trial.arm}, seed {trial.seed}, failed: {error}") from error
            mark = json.dumps({"trial": _identity(trial), "cpu_seconds": seconds}).encode()
            replace_file(_mark(places[trial.arm, trial.seed]), [mark])
            advance(note=f"{trial.arm} seed {trial.seed}")
    return {key: _rows(own) for key, own in places.items()}


def place(s: TrialSettings | PretrainedSettings, name: str, arm: str, seed: int) -> Path:
    """Return the folder of a run."""
    return Path(s.out) / "runs" / name / f"{''.join(c if c.isalnum() or c in '.-' else '_' for c in arm)}-{seed}"


def _with_place(trial: Trial, place: Path) -> Any:
    return replace(trial.settings, run=replace(trial.settings.run, output_dir=str(place), seed=trial.seed))


def _identity(trial: Trial) -> dict[str, Any]:
    """Return the settings that a finished run must have for its figures to be reused."""
    return {"method": trial.method, **_plain(_with_place(trial, Path(".")))}


def _plain(settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(to_dict(settings), default=str))
    return found


def _mark(place: Path) -> Path:
    return place / "trial.json"


def _done(place: Path, trial: Trial) -> bool:
    if not _mark(place).exists():
        return False
    found = (parse_row(_mark(place).read_bytes()) or {}).get("trial")
    if not isinstance(found, dict):
        return False  # torn by a kill; the run itself will report that it is finished
    method = found.pop("method")
    try:  # a setting that is newer than the run has its default
        known = {"method": method, **_plain(load(type(trial.settings), flags=found))}
    except UserError:
        known = {}
    if known != _identity(trial):
        raise UserError(f"{place} holds a run with other settings; give another --out, or remove that folder.")
    return True


def pairs(asked: SampleConfig, place: Path) -> None:
    """Write pairs of a model's own samples to the file `place`. Raises `UserError` if there are none."""
    written = sample.run(asked)
    if not written.rows:
        raise UserError(
            "No prompt has a right and a wrong answer, so there are no pairs for DPO; raise generations or prompts, or "
            "start from a model that is right more often."
        )
    written.path.rename(place)


def core_minutes(s: TrialSettings | PretrainedSettings, name: str) -> float:
    """Return the minutes of processor time of an experiment's finished runs, including tuning."""
    marks = [mark for part in (name, f"{name}-tuning") for mark in (Path(s.out) / "runs" / part).glob("*/trial.json")]
    return math.fsum((parse_row(mark.read_bytes()) or {}).get("cpu_seconds", 0.0) for mark in marks) / 60


def _run(method: str, settings: dict[str, Any]) -> float:
    """Run one trial, and return its processor time in seconds. A worker process runs several trials in sequence."""
    before = sum(os.times()[:4])  # includes the workers that score, once they have ended
    if method == "control":
        control.run(load(ControlConfig, flags=settings))
    else:
        dispatch.run(load(declaration(method).settings, flags=settings))
    return sum(os.times()[:4]) - before


def _quiet(log: Path) -> None:
    """Redirect a worker's output to a file, since concurrent runs would mix their lines. The worker ends with its parent."""
    die_with_parent()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _rows(place: Path) -> list[dict[str, Any]]:
    return list(read_steps(place / "metrics.jsonl"))


def rollouts(s: TrialSettings, name: str, arm: str, seed: int, kind: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the completions on which a run was trained or, with `kind` "eval", evaluated."""
    files = rollout_files(place(s, name, arm, seed))
    return (row for file in files for row in read_steps(file) if row.get("kind") == kind)


def first_warning(rows: Sequence[Mapping[str, Any]], rules: Collection[str]) -> int | None:
    """Return the first step at which a run with these metrics raises one of these rules (`psigrad.records.warnings`)."""
    watch, names = Watch(), SignalNames()
    for row in rows:
        watch.update(row["step"], {names.of(key): value for key, value in figures(row).items()})
        if any(alert.rule in rules for alert in watch.alerts()):
            return int(row["step"])
    return None


def tune(s: TrialSettings, name: str, arms: Arms, rates: Sequence[float]) -> dict[str, float]:
    """Return for each arm the rate whose learning curve on `TUNING_SEED` has the largest area. All arms have the same budget."""
    trials = [
        Trial(f"{arm} at {rate:g}", TUNING_SEED, method, at_rate(config, rate))
        for arm, (method, config) in arms.items()
        for rate in rates
    ]
    rows = run_all(s, f"{name}-tuning", trials)
    return {arm: max(rates, key=lambda rate: area(rows[f"{arm} at {rate:g}", TUNING_SEED])) for arm in arms}


def run_arms(
    s: TrialSettings,
    name: str,
    arms: Arms,
    of: Mapping[str, Callable[[Any], float]],
    *,
    key: str = ACCURACY,
    rates: Mapping[str, float] | None = None,
    more: Callable[[str, int], Sequence[Mapping[str, Any]]] = lambda arm, seed: (),
) -> dict[str, Arm]:
    """Run every arm with every seed. Return its curve of `key`, and the figures that the functions `of` compute from a run.

    `rates` are the arms' learning rates, which are added to the figures. `more(arm, seed)` returns extra rows of a run.
    """
    named = {arm: f"{arm} at {rates[arm]:g}" if rates else arm for arm in arms}
    trials = [
        Trial(named[arm], seed, method, at_rate(config, rates[arm]) if rates else config)
        for arm, (method, config) in arms.items()
        for seed in range(s.seeds)
    ]
    found = run_all(s, name, trials)
    rows = {(arm, seed): [*found[named[arm], seed], *more(arm, seed)] for arm in arms for seed in range(s.seeds)}
    made = {arm: summarize(arm, range(s.seeds), rows, of, key) for arm in arms}
    return {arm: with_figure(one, "rate", rates[arm]) for arm, one in made.items()} if rates else made


def curve(rows: Sequence[Mapping[str, Any]], key: str = ACCURACY) -> dict[int, float]:
    """Return the held-out figures by step."""
    return {row["step"]: row[key] for row in rows if key in row}


def area(rows: Sequence[Mapping[str, Any]], key: str = ACCURACY) -> float:
    """Return the mean held-out accuracy after the start: the area under the learning curve.

    It is 1 if all answers after the start are correct.
    """
    found = [accuracy for step, accuracy in curve(rows, key).items() if step]
    return math.fsum(found) / len(found)


def last(rows: Sequence[Mapping[str, Any]], key: str = ACCURACY) -> float:
    """Return the last figure of that name; NaN if there is none."""
    return next((float(row[key]) for row in reversed(rows) if key in row), math.nan)


def mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the mean over the steps that have that figure."""
    found = [float(row[key]) for row in rows if key in row]
    return math.fsum(found) / len(found) if found else math.nan


def summarize(
    name: str,
    seeds: Sequence[int],
    rows: Mapping[tuple[str, int], Any],
    of: Mapping[str, Callable[[Any], float]],
    key: str = ACCURACY,
) -> Arm:
    """Return one arm: its curve of `key`, and each figure, over seeds."""
    runs = [rows[name, seed] for seed in seeds]
    curves = [sorted(curve(run, key).items()) for run in runs]
    points = list(zip(*curves, strict=False))  # by order: CartPole's evaluations are at other steps in each run
    steps = tuple(round(math.fsum(step for step, _ in point) / len(point)) for point in points)
    each = {key: tuple(figure(run) for run in runs) for key, figure in of.items()}
    held_out = tuple(over_seeds(figure for _, figure in point) for point in points)
    return Arm(name, steps, held_out, {k: over_seeds(v) for k, v in each.items()}, each)


def with_figure(arm: Arm, name: str, value: float) -> Arm:
    """Return the arm with a figure that is the same for every seed."""
    number = len(next(iter(arm.each.values())))
    figures = {**arm.figures, name: Interval(value, value, value)}
    return replace(arm, figures=figures, each={**arm.each, name: (value,) * number})


def compare(claim: str, first: Arm, second: Arm, figure: str, *, least: float = 0.0) -> ClaimVerdict:
    """Return the verdict on `claim`: the figure of `first` is above that of `second` (plus `least`).

    The test is the 95 % interval of the differences, paired by seed.
    """
    bound = f" {'+' if least > 0 else '−'} {abs(least):g}" if least else ""
    test = f"{figure}: {first.name} > {second.name}{bound}, paired by seed"
    return compare_pairs(claim, test, first.each[figure], second.each[figure], least=least)


def compare_pairs(claim: str, test: str, first: Sequence[float], second: Sequence[float], *, least: float = 0.0) -> ClaimVerdict:
    """Return the verdict of `compare` for two lists of figures, paired by place."""
    difference = over_seeds(a - b for a, b in zip(first, second, strict=True))
    verdict: Verdict = "undecided"
    if len(first) > 1:
        verdict = "holds" if difference.low > least else "does not hold" if difference.high <= least else "undecided"
    return ClaimVerdict(claim, test, verdict, difference)


def exactly(claim: str, test: str, value: float, holds: bool) -> ClaimVerdict:
    """Return the verdict on a number without an interval."""
    return ClaimVerdict(claim, test, "holds" if holds else "does not hold", Interval(value, value, value))


def share_of(part: int, whole: int, level: float = 0.05) -> Interval:
    """Return a share with Wilson's interval of confidence 1 − `level`. The share of nothing is NaN in [0, 1]."""
    return Interval(part / whole, *wilson(part, whole, level)) if whole else Interval(math.nan, 0.0, 1.0)


def bound_share(claim: str, part: int, whole: int, bound: float, *, above: bool = False, level: float = 0.05) -> ClaimVerdict:
    """Return the verdict on the claim that a share of runs is at least (`above`) or at most a bound, by Wilson's interval."""
    share = share_of(part, whole, level)
    return ClaimVerdict(claim, f"{part} of {whole} runs; share", against(share, bound, above=above), share)


def against(found: Interval, bound: float, *, above: bool) -> Verdict:
    """Return the verdict on the claim that a figure is at least (`above`) or at most a bound, by its interval."""
    if found.low >= bound:
        return "holds" if above else "does not hold"
    if found.high <= bound:
        return "does not hold" if above else "holds"
    return "undecided"


def arms_table(title: str, arms: Sequence[Arm], form: str) -> Table:
    """Return a table with a row for each arm and a column for each figure."""
    table = drawing.new_table(title, "", *arms[0].figures)
    for arm in arms:
        table.add_row(arm.name, *(_cell(v, form) for v in arm.figures.values()))
    return table


def _cell(found: Interval, form: str) -> str:
    if math.isnan(found.mean):
        return "–"
    small = 0 < abs(found.mean) < 0.01 and found.low == found.high
    return f"{found.mean:g}" if small else drawing.around(found, form if abs(found.mean) < 100 else ".0f")


def findings_text(findings: Sequence[ClaimVerdict]) -> Text:
    """Return each claim with its test and its verdict."""
    colours = {"holds": "green", "does not hold": "red", "undecided": "yellow"}
    text = Text()
    for f in findings:
        d = f.difference
        text.append(f"{f.verdict}", style=f"bold {colours[f.verdict]}").append(f": {f.claim}\n")
        figure = f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"
        text.append(f"  {f.test}{': ' if len(f.test) + len(figure) < 76 else chr(10) + '  '}{figure}\n", style="dim")
    return text


def show(result: TrialResult, title: str, *notes: str, form: str = ".3f") -> drawing.Printed:
    """Yield the tables of an experiment."""
    yield arms_table(title, result.arms, form)
    yield drawing.note("95 % intervals over seeds (Student's t).", *notes)
    yield findings_text(result.findings)


def shown(title: str, *notes: str, form: str = ".3f") -> Callable[[TrialResult], drawing.Printed]:
    """Return the `tables` of an experiment whose notes do not depend on its settings."""
    return lambda result: show(result, title, *notes, form=form)


Panel = tuple[str, Sequence[str]]


def learning_curves(
    found: Mapping[str, Any], path: Path, *panels: Panel, sharey: bool = True, beside: Sequence[Panel] = ()
) -> Path:
    """Plot held-out accuracy over steps, an axis for each panel (title, names of its arms), with 95 % intervals over seeds.

    `beside` adds axes with figures of every arm: (title, names of the figures).
    """
    number = len(panels) + len(beside)
    figure, axes = drawing.new_figure(4.9 * number, 3.4, 1, number, sharey=sharey and not beside, squeeze=False)
    for ax, (title, names) in zip(axes[0], panels, strict=False):
        arms = [arm for arm in found["arms"] if arm["name"] in names]
        for arm, colour in zip(arms, COLOURS * 3, strict=False):
            drawing.band(ax, arm["steps"], arm["curve"], colour, label=arm["name"])
        drawing.tidy(ax, title, "y", "steps", legend=True)
    for ax, (title, names) in zip(axes[0][len(panels) :], beside, strict=True):
        _figures(ax, found["arms"], names)
        drawing.tidy(ax, title, "x")
    return drawing.save(figure, path)


def curves(*panels: Panel, sharey: bool = True, beside: Sequence[Panel] = ()) -> Callable[[Mapping[str, Any], Path], Path]:
    """Return the `picture` of an experiment: its `learning_curves`."""
    return lambda found, path: learning_curves(found, path, *panels, sharey=sharey, beside=beside)


def _figures(axes: Any, arms: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Plot the figures of every arm that has them, one below the other."""
    places = [(arm, name, colour) for name in names for arm, colour in zip(arms, COLOURS * 3, strict=False)]
    places = [(arm, name, colour) for arm, name, colour in places if not math.isnan(arm["figures"][name][0])]
    labels = [arm["name"] if len(names) == 1 else f"{name}, {arm['name']}" for arm, name, _ in places]
    drawing.intervals(axes, [arm["figures"][name] for arm, name, _ in places], labels, [colour for _, _, colour in places])
