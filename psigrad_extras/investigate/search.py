"""A search over settings by Optuna: each trial is trained over seeds, and judged by the mean of its held-out figure.

Every run is a process of its own and a run folder of its own, and the study is a file beside them: the same command goes on where
it was stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from psigrad import redaction
from psigrad.config.nested import read_value
from psigrad.errors import UserError
from psigrad.intervals import over_seeds
from psigrad.paths import absolute, claim
from psigrad.records.rows import headline, number
from psigrad.records.run_folder import lock_folder
from psigrad.runs import session
from psigrad.runs.progress import bar

Value = int | float | str
Train = Callable[[Sequence[str], Path], str]
"""Runs one command into a folder; why it failed, or nothing."""


@dataclass(frozen=True)
class Space:
    """Where one setting is searched: `choices`, or from `low` to `high`, in whole numbers where both are."""

    name: str
    choices: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def suggest(self, trial: Any) -> Value:
        """A value for this trial of Optuna's."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)  # type: ignore[no-any-return]
        if self.whole:
            return int(trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log))
        return float(trial.suggest_float(self.name, self.low, self.high, log=self.log))


def space_of(text: str) -> Space:
    """`learning_rate:1e-6..1e-4:log`, `lora_rank:8..64`, `optimizer:adamw,muon`. Raises `UserError` for other text."""
    name, _, values = text.partition(":")
    values, log = values.removesuffix(":log"), values.endswith(":log")
    usage = "write NAME:LOW..HIGH, NAME:LOW..HIGH:log or NAME:A,B,C"
    if not name or not values:
        raise UserError(f"--search has {text!r}; {usage}.")
    if ".." not in values:
        return Space(
            name, tuple(value if isinstance(value := read_value(one), int | float) else one for one in values.split(","))
        )
    ends = [read_value(end) for end in values.split("..", 1)]
    if not all(isinstance(end, int | float) for end in ends) or not ends[0] < ends[1] or (log and ends[0] <= 0):
        raise UserError(f"--search has {text!r}; its ends are numbers, the lower first, above 0 with log: {usage}.")
    return Space(name, (), float(ends[0]), float(ends[1]), log, all(isinstance(end, int) for end in ends))


@dataclass(frozen=True)
class Search:
    """What is searched: the command with its fixed arguments, the spaces, and how a trial is judged."""

    command: tuple[str, ...]
    """The method and its fixed settings, as typed."""
    spaces: tuple[Space, ...]
    folder: Path
    trials: int = 20
    seeds: tuple[int, ...] = (0,)
    metric: str = ""
    """The held-out figure; empty: the headline of the report."""
    direction: Literal["", "maximize", "minimize"] = ""
    """Empty: down for what ends in loss, up for all else."""
    sampler: Literal["tpe", "random"] = "tpe"

    def sign(self, figure: str) -> int:
        """-1 where the study is told of less than nothing: its direction was fixed before a run had shown that its `figure` is a
        loss.
        """
        return -1 if not (self.direction or self.metric) and figure.endswith("loss") else 1


def run(sweep: Search, train: Train | None = None) -> Path:
    """Run the trials that have not been run yet; the path of the page. The best trial is in `sweep.json` too.

    Raises `UserError` where optuna is not there, where nothing is searched, where the folder holds another sweep or one that
    runs, and where the first trial fails.
    """
    try:
        import optuna
    except ImportError as error:
        raise UserError('sweep needs Optuna; install it: pip install "psigrad[sweep]".') from error
    if not sweep.spaces or not sweep.seeds or sweep.trials < 1:
        raise UserError("sweep searches nothing; for example: psigrad sweep sft --search learning_rate:1e-6..1e-4:log …")
    # a run that counts twice would narrow the intervals
    sweep = replace(sweep, folder=absolute(sweep.folder), seeds=tuple(dict.fromkeys(sweep.seeds)))
    claim(sweep.folder, "sweep")
    with contextlib.closing(lock_folder(sweep.folder)):  # a second process would take the trials of the first for left ones
        return _run(optuna, sweep, train or _train)


def _run(optuna: Any, sweep: Search, train: Train) -> Path:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction = sweep.direction or ("minimize" if _stem(sweep.metric).endswith("loss") else "maximize")
    place = f"sqlite:///{sweep.folder / 'sweep.db'}"
    study = optuna.create_study(storage=place, study_name="sweep", direction=direction, load_if_exists=True)
    _check_same(study, sweep)
    state = optuna.trial.TrialState
    for left in study.get_trials(deepcopy=False, states=[state.RUNNING]):  # its folders are there, and its runs go on
        study.tell(left.number, state=state.FAIL)
        study.enqueue_trial(left.params, user_attrs={"folder": left.user_attrs.get("folder", f"trial-{left.number:04d}")})
    done = len(study.get_trials(deepcopy=False, states=[state.COMPLETE])) + _failed(study)
    with bar("sweep", sweep.trials, shown=True, done=done, every=1, unit="trial") as advance:
        while done < sweep.trials:
            # by its number, so that a sweep that was stopped asks as one that was not
            kind = optuna.samplers.TPESampler if sweep.sampler == "tpe" else optuna.samplers.RandomSampler
            study.sampler = kind(seed=1000 * min(sweep.seeds) + done)
            advance(1, _try(study, study.ask(), sweep, train, first=done == 0))
            done += 1
    from psigrad_extras.investigate import trials as page

    ended = [one for one in study.trials if "values" in one.user_attrs]
    figure = next((str(one.user_attrs.get("figure", "")) for one in ended), "")
    direction = direction if sweep.sign(figure) > 0 else "minimize"
    found = {
        "direction": direction, "metric": sweep.metric or figure, "seeds": list(sweep.seeds),
        "trials": [{"number": one.number, "settings": one.params, **one.user_attrs} for one in ended],
    }  # fmt: skip
    (sweep.folder / "sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    return page.write(sweep.folder)


def summary(folder: Path) -> str:
    """The best trial, as the arguments that make it."""
    from psigrad_extras.investigate.trials import best_first

    best = best_first(json.loads((folder / "sweep.json").read_text()))[0]
    interval = f" [{best['low']:.4g}, {best['high']:.4g}]" if len(best["values"]) > 1 else ""
    return f"best    {' '.join(f'{k}={v}' for k, v in best['settings'].items())}: {best['mean']:.4g}{interval}"


def _failed(study: Any) -> int:
    return sum("reason" in one.user_attrs for one in study.get_trials(deepcopy=False))


def _check_same(study: Any, sweep: Search) -> None:
    """Another command, another metric, other seeds or the other direction would make trials that cannot be compared."""
    asked = {
        "command": redaction.clear(list(sweep.command)), "search": [repr(space) for space in sweep.spaces],
        "seeds": list(sweep.seeds), "metric": sweep.metric, "direction": sweep.direction,
    }  # fmt: skip
    for name, value in asked.items():
        if redaction.clear(study.user_attrs.get(name, value)) != value:  # one of an older psigrad holds all of it
            held = study.user_attrs[name] or "none was given"
            raise UserError(f"{sweep.folder} holds a sweep with another {name}: {held}; name another folder.")
        study.set_user_attr(name, value)


def _try(study: Any, trial: Any, sweep: Search, train: Train, *, first: bool) -> str:
    """One trial over the seeds; a note of what came of it."""
    values = {space.name: space.suggest(trial) for space in sweep.spaces}
    name = trial.user_attrs.get("folder", f"trial-{trial.number:04d}")
    trial.set_user_attr("folder", name)
    figures, figure = [], ""
    for seed in sweep.seeds:
        place = sweep.folder / name / f"seed-{seed}"
        words = [*sweep.command, *(f"{setting}={value}" for setting, value in values.items())]
        reason = train([*words, "--seed", str(seed), "--output-dir", str(place)], place)
        figure, value = _figure(place, sweep.metric) if not reason else ("", None)
        if value is None:
            reason = reason or f"{place} has no held-out {sweep.metric or 'figure'}"
            trial.set_user_attr("reason", redaction.clear(reason))
            study.tell(trial, state=_state().FAIL)
            if first:
                raise UserError(f"The first trial failed: {reason}")
            return f"trial {trial.number} failed"
        figures.append(value)
    mean, low, high = over_seeds(figures)
    for key, held in (("values", figures), ("mean", mean), ("low", low), ("high", high), ("figure", figure)):
        trial.set_user_attr(key, held)
    study.tell(trial, sweep.sign(figure) * mean)
    return f"trial {trial.number}: {mean:.4g}, best {sweep.sign(figure) * study.best_value:.4g}"


def _state() -> Any:
    import optuna

    return optuna.trial.TrialState


def _stem(metric: str) -> str:
    return metric.removeprefix("eval/").removesuffix("/mean")


def _figure(folder: Path, metric: str) -> tuple[str, float | None]:
    """The name and the value of the held-out figure of the weights that a run left."""
    _, after = session.evaluations(folder)
    if not metric:
        found = headline(after)
        return ("", None) if found is None else (found.name, found.value)
    stem = _stem(metric)
    value = number(next((after[key] for key in (f"eval/{stem}", f"eval/{stem}/mean") if key in after), None))
    return stem, value if value == value else None


def _train(words: Sequence[str], folder: Path) -> str:
    """Run `psigrad …` in a process of its own, which ends with this one; its last line where it fails."""
    from psigrad.processes.proc import die_with_parent

    del folder
    command = [sys.executable, "-m", "psigrad", *words, "--no-progress"]
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent, env={**os.environ})
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    return (said[-1] if said else f"exit status {ended.returncode}") if ended.returncode else ""
