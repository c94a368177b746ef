"""A search over settings with Optuna. Each trial trains once per seed, and its value is the mean held-out metric.

The study is `sweep.db` in the folder, which Optuna's own tools read (`optuna-dashboard sqlite:///runs/sweep/sweep.db`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from psigrad import extras, redaction
from psigrad.config.nested import read_value
from psigrad.errors import UserError
from psigrad.intervals import over_seeds
from psigrad.paths import absolute, claim
from psigrad.processes.proc import die_with_parent
from psigrad.records.pins import CODE
from psigrad.records.row_lines import last_event
from psigrad.records.rows import headline, number
from psigrad.runs import session

with extras.needing("sweep", "sweep"):
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

Train = Callable[[Sequence[str]], str]
"""A function that runs a command and returns the reason of a failure, or ""."""


def space_of(text: str) -> tuple[str, Any]:
    """Return (setting, Optuna's distribution) for a text such as `learning_rate:1e-6..1e-4:log`, `lora_rank:8..64` or `x:a,b`.

    Raises `UserError` for other text.
    """
    name, _, values = text.partition(":")
    log, values = values.endswith(":log"), values.removesuffix(":log")
    usage = "write NAME:LOW..HIGH, NAME:LOW..HIGH:log or NAME:A,B,C"
    if not name or not values:
        raise UserError(f"--search has {text!r}; {usage}.")
    if ".." not in values:
        read = [read_value(one) for one in values.split(",")]
        return name, CategoricalDistribution(
            [value if isinstance(value, int | float) else one for value, one in zip(read, values.split(","), strict=True)]
        )
    low, high = (read_value(end) for end in values.split("..", 1))
    if not all(isinstance(end, int | float) for end in (low, high)) or not -inf < low < high < inf or (log and low <= 0):
        raise UserError(f"--search has {text!r}; expected finite LOW < HIGH, with LOW above 0 for log; {usage}.")
    whole = isinstance(low, int) and isinstance(high, int)
    return name, IntDistribution(low, high, log=log) if whole else FloatDistribution(low, high, log=log)


def run(
    command: Sequence[str],
    spaces: Mapping[str, Any],
    folder: Path,
    *,
    trials: int = 20,
    seeds: Sequence[int] = (0,),
    metric: str = "",
    direction: Any = "",
    train: Train | None = None,
) -> Any:
    """Run trials of `command` until the study in `folder` has `trials` of them, and return the study.

    `metric` is the held-out metric (empty: the headline of the report). The default direction is "minimize" for a loss. A failed
    trial counts too. Raises `UserError` if the first trial fails, if the folder is another sweep's, and if the user's code
    (`pins.CODE`) is not that of the earlier trials.
    """
    folder = absolute(folder)
    claim(folder, "sweep")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction = direction or ("minimize" if metric.removesuffix("/mean").endswith("loss") else "maximize")
    place = f"sqlite:///{folder / 'sweep.db'}"
    study = optuna.create_study(storage=place, study_name="sweep", direction=direction, load_if_exists=True)
    asked = redaction.clear([*command, repr(sorted(spaces.items())), repr(tuple(seeds)), metric, direction])
    if study.user_attrs.get("asked", asked) != asked:
        raise UserError(f"{folder} holds another sweep ({' '.join(study.user_attrs['asked'])}); give another --output-dir.")
    study.set_user_attr("asked", asked)
    ended = [trial for trial in study.trials if trial.state.is_finished()]
    study.sampler = optuna.samplers.TPESampler(seed=1000 * min(seeds) + len(ended))

    other_code: list[UserError] = []

    def objective(trial: Any) -> float:
        words = [*command, *(f"{name}={trial._suggest(name, space)}" for name, space in spaces.items())]
        try:
            chosen = json.dumps({n: trial.params[n] for n, s in spaces.items() if isinstance(s, CategoricalDistribution)})
            figures = []
            for seed in seeds:
                place = folder / f"trial-{trial.number:04d}" / f"seed-{seed}"
                figures.append(_figure(words, place, seed, metric, direction, train))
                if error := _other_code(study, place, chosen):
                    other_code.append(error)
                    study.stop()
                    raise error
        except UserError as error:
            if not ended:
                raise UserError(f"The first trial failed: {error}") from error
            raise
        finally:
            ended.append(trial)
        mean, low, high = over_seeds(figures)
        trial.set_user_attr("interval", [low, high])
        return mean

    first = [] if ended else [1]
    for count in [*first, trials - len(ended) - len(first)]:
        study.optimize(objective, n_trials=max(0, count), catch=() if count == 1 and first else (UserError,))
        if other_code:
            raise other_code[0]
    return study


def _other_code(study: Any, place: Path, chosen: str) -> UserError | None:
    """Return an error if the user's code in a run differs from that in earlier runs with the same `chosen` values."""
    code = last_event(place / "events.jsonl", "started", "resumed").get("code", {})
    known = study.user_attrs.get("code", {})
    if known.setdefault(chosen, code) == code:
        study.set_user_attr("code", known)
        return None
    changed = ", ".join(name for name in CODE if known[chosen].get(name) != code.get(name))
    return UserError(
        f"{place} was trained with other code than the earlier trials (changed: {changed}), so their figures are not comparable; "
        "change the code back, or name another folder with --output-dir."
    )


def _figure(words: Sequence[str], place: Path, seed: int, metric: str, direction: str, train: Train | None) -> float:
    """Train with one seed in the folder `place` and return the held-out metric.

    Raises `UserError` if the run fails or has no such metric.
    """
    if reason := (train or _train)([*words, "--seed", str(seed), "--output-dir", str(place)]):
        raise UserError(redaction.clear(reason))
    _, after = session.evaluations(place)
    if metric:
        stem = metric.removeprefix("eval/").removesuffix("/mean")
        value = number(next((after[key] for key in (f"eval/{stem}", f"eval/{stem}/mean") if key in after), None))
    else:
        found = headline(after)
        value = float("nan") if found is None else found.value
        if found is not None and found.name.endswith("loss") and direction == "maximize":
            raise UserError(f"the sweep would maximise the held-out {found.name}; give --direction minimize.")
    if value != value:
        raise UserError(f"{place} has no held-out {metric or 'metric'}; set eval_prompts, or name another --metric.")
    return value


def _train(words: Sequence[str]) -> str:
    """Run `psigrad …` in a separate process, which ends with this one. Return its last line if it fails."""
    command = [sys.executable, "-m", "psigrad", *words, "--no-progress"]
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent)
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit status {ended.returncode}") if ended.returncode else ""
