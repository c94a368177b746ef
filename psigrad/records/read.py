"""Reading run folders. Missing, truncated and malformed files are tolerated, since reports matter most when a run has failed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psigrad.config.nested import flatten
from psigrad.errors import UserError
from psigrad.records.pins import check_format, rename_preset
from psigrad.records.row_lines import read_lines, read_steps, rollout_files
from psigrad.records.rows import metric_of, number, parse_row, rollout_figures

TEXT_LIMIT = 600
# `kept` records the best step. After the two other events the run trains again, so another step may become the best.
KEEPS = ("kept", "started", "resumed")


@dataclass(frozen=True)
class Sample:
    """One held-out completion, with texts cut after `TEXT_LIMIT` characters. `reward` is NaN if it was not scored.

    `messages` are the (role, text) pairs of a conversational prompt.
    """

    prompt: str
    completion: str
    reward: float
    messages: tuple[tuple[str, str], ...] = ()


def find_best_step(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the step whose weights were restored at the end of training; infinity if the final model has the last weights."""
    last: Mapping[str, Any] = next((event for event in reversed(events) if event.get("kind") in KEEPS), {})
    return number(last.get("step")) if last.get("kind") == "kept" else math.inf


@dataclass(frozen=True)
class RunData:
    """The data of one run. `metrics` and `timings` are rows with a "step".

    `rewards` is {step: rewards of the training completions}. `troubles` counts the (status, reason) pairs of failed and unscored
    completions. `samples` is {step: {held-out row: its first completion}}, for the first, the middle and the last evaluation.
    """

    name: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: list[dict[str, Any]] = field(default_factory=list)
    """The rows of summary.json, which reports show as the main figures; [] without this file."""
    rewards: dict[int, list[float]] = field(default_factory=dict)
    troubles: Counter[tuple[str, str]] = field(default_factory=Counter)
    samples: dict[int, dict[str, Sample]] = field(default_factory=dict)
    held_out: dict[int, dict[int, float]] = field(default_factory=dict)
    """{step: {held-out row: mean reward of its scored completions}}."""

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of one metric or timing, without values that are not finite."""
        rows = self.timings if key.startswith("time/") or key in ("step_time", "tokens_per_second") else self.metrics
        points = [(row["step"], number(row[key])) for row in rows if key in row]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in points], [value for _, value in points]

    def keys(self, prefix: str) -> list[str]:
        """Return the names of metrics that begin with `prefix`, in the order in which they first occur."""
        return list(dict.fromkeys(key for row in self.metrics for key in row if key.startswith(prefix)))

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration with dotted names: {"optim.learning_rate": 1e-6, …}."""
        return rename_preset(flatten(self.config))

    def last_event(self, *kinds: str) -> Mapping[str, Any]:
        """Return the last event of these kinds; an empty mapping if there is none."""
        return next((event for event in reversed(self.events) if event.get("kind") in kinds), {})

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The events at which the run started or was resumed."""
        return [event for event in self.events if event.get("kind") in ("started", "resumed")]

    @property
    def code(self) -> dict[str, str]:
        """The hashes of the user's code at the run's last start, as {name in `pins.CODE`: hash}."""
        found = self.last_event("started", "resumed").get("code")
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, Mapping) else {}

    @property
    def held_out_metric(self) -> str:
        """The name of the held-out metric, such as "eval/exact"; "" without evaluations."""
        return next((name for key in self.keys("eval/") if (name := metric_of(key))), "")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of held-out metrics, ordered by step. If the best step's weights were restored, later rows are left out."""
        kept = find_best_step(self.events)
        return [row for row in self.all_evaluations if row["step"] <= kept]

    @property
    def all_evaluations(self) -> list[dict[str, Any]]:
        """The rows of held-out metrics, ordered by step."""
        by_step: dict[int, dict[str, Any]] = {}
        for row in self.metrics:
            found = {key: value for key, value in row.items() if key.startswith(("eval/", "held_out/"))}
            if found:
                by_step.setdefault(row["step"], {"step": row["step"]}).update(found)
        return [by_step[step] for step in sorted(by_step)]

    @property
    def compared(self) -> list[dict[int, Sample]]:
        """{step: sample} for each held-out row with a sample at every step of `samples`. Rows whose reward changed come first."""
        steps = list(self.samples)
        common = [row for row in (self.samples[steps[0]] if steps else ()) if all(row in self.samples[s] for s in steps)]
        rows = [{step: self.samples[step][row] for step in steps} for row in common]
        return sorted(rows, key=lambda row: row[steps[0]].reward == row[steps[-1]].reward)


def kind_of(config: Mapping[str, Any]) -> str:
    """Return the kind of a run: sft, reward, control, preference or online."""
    recipe = config.get("recipe")
    if recipe in ("sft", "reward", "control"):
        return str(recipe)
    return "preference" if "cache_reference" in config else "online"


def auto_class(model: Path) -> str:
    """Return the name of transformers' class that loads a saved model, such as AutoModelForCausalLM.

    A model with an image processor, or of a class "…ForConditionalGeneration", is loaded by AutoModelForImageTextToText.
    """
    name = str((_json(model / "config.json").get("architectures") or [""])[0])
    if "SequenceClassification" in name:
        return "AutoModelForSequenceClassification"
    sees = (model / "preprocessor_config.json").exists() or name.endswith("ForConditionalGeneration")
    return "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"


def show_number(value: Any) -> str:
    """Format a number for display; return "–" for a value that is not a number."""
    if type(value) is int and abs(value) < 10**15:
        return f"{value:,}"
    value = number(value)
    value = 0.0 if abs(value) < 1e-12 else value
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def brief(value: float) -> str:
    """Format a mean or a bound: between -1000 and 1000 with three significant digits, otherwise as `show_number` does."""
    return show_number(value if abs(value) >= 1000 or not math.isfinite(value) else float(f"{value:.3g}"))


def show_interval(mean: Any, low: float, high: float, show: Callable[[Any], str] = show_number) -> str:
    """Return text such as `1.5 [1.2, 1.8]`. Without a usable interval, return only the mean."""
    return show(mean) + (f" [{show(low)}, {show(high)}]" if low < high < math.inf else "")


def interval(row: Mapping[str, Any], stem: str = "") -> str:
    """Return "low to high" from a row's keys `stem` + "low" and `stem` + "high"; "" if one is missing or both are equal."""
    low, high = number(row.get(f"{stem}low")), number(row.get(f"{stem}high"))
    return "" if math.isnan(low) or math.isnan(high) or low == high else f"{show_number(low)} to {show_number(high)}"


def clip(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Return a value as text. Cut it after `limit` characters, and append the number of removed characters."""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= limit else f"{text[:limit]} … {len(text) - limit:,} more characters"


def load_all(folders: Sequence[str | Path]) -> list[RunData]:
    """Return the runs in `folders`. Name each by the last part of its path, or by more parts if two names would be equal."""
    runs = [load(folder) for folder in folders]
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return runs


def load(folder: str | Path) -> RunData:
    """Return the data of the run in `folder`. Raise `UserError` if it is not a run folder, or cannot be read."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise UserError(f"There is no folder {str(folder)!r}; give the output_dir of a run.")
    if not any((path / name).is_file() for name in ("config.json", "metrics.jsonl")):
        raise UserError(
            f"{str(folder)!r} is not a run folder: it has neither config.json nor metrics.jsonl; give the output_dir of a run."
        )
    try:
        found = _json(path / "summary.json").get("rows")
        summary = found if isinstance(found, list) else []
        check_format(path, config := _json(path / "config.json"))
        rewards, troubles, samples, held_out = _rollouts(rollout_files(path))
        return RunData(
            name=path.resolve().name,
            path=path,
            config=config,
            metrics=list(read_steps(path / "metrics.jsonl")),
            timings=list(read_steps(path / "timings.jsonl")),
            events=[row for line in read_lines(path / "events.jsonl") if (row := parse_row(line)) is not None],
            summary=[row for row in summary if isinstance(row, dict) and {"name", "value"} <= row.keys()],
            rewards=rewards,
            troubles=troubles,
            samples=samples,
            held_out=held_out,
        )
    except OSError as error:
        raise UserError(f"The run in {str(folder)!r} cannot be read: {error}; fix this and try again.") from error


def _rollouts(
    files: Sequence[Path],
) -> tuple[dict[int, list[float]], Counter[tuple[str, str]], dict[int, dict[str, Sample]], dict[int, dict[int, float]]]:
    """Return the fields (`rewards`, `troubles`, `samples`, `held_out`) of `RunData` from the rows of `files`."""
    rewards: dict[int, list[float]] = {}
    troubles: Counter[tuple[str, str]] = Counter()
    offsets: dict[int, list[tuple[Path, int]]] = {}
    held_out: dict[int, dict[int, list[float]]] = {}
    for at, line in _read_places(files):  # one by one, since files can be far larger than memory
        row = rollout_figures(line)
        if row is None:
            continue
        if row.kind == "eval":
            if row.k == 0:
                offsets.setdefault(row.step, []).append(at)
            if math.isfinite(row.reward):
                held_out.setdefault(row.step, {}).setdefault(row.row, []).append(row.reward)
        elif row.kind != "episode" and math.isfinite(row.reward):
            rewards.setdefault(row.step, []).append(row.reward)
        if row.status in ("failed", "unscored"):
            troubles[row.status, clip(row.reason, 200)] += 1
    steps = sorted(offsets)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    means = {step: {row: math.fsum(own) / len(own) for row, own in rows.items()} for step, rows in held_out.items()}
    return rewards, troubles, {step: _samples(offsets[step]) for step in chosen}, means


def _read_places(files: Sequence[Path]) -> Iterator[tuple[tuple[Path, int], bytes]]:
    for file in files:
        end = 0
        for line in read_lines(file):
            yield (file, end), line
            end += len(line)


def _samples(places: Sequence[tuple[Path, int]]) -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    for file, offset in places:
        with file.open("rb") as stream:
            stream.seek(offset)
            row = parse_row(stream.readline())
            if row is not None:
                prompt, completion = row.get("prompt", ""), clip(row.get("completion", ""))
                said = tuple((role, clip(text)) for role, text in messages(prompt))
                sample = Sample(clip(prompt_text(prompt)), completion, number(row.get("reward")), said)
                found.setdefault(str(row.get("row")), sample)
    return found


def prompt_text(prompt: Any) -> Any:
    """Return a prompt of messages as lines of `role: text`, and a plain prompt unchanged."""
    said = messages(prompt)
    return "\n".join(f"{role}: {text}" for role, text in said) if said else "" if isinstance(prompt, list) else prompt


def messages(prompt: Any) -> list[tuple[str, str]]:
    """Return (role, text) of each message of a conversational prompt; [] for a plain text prompt."""
    said = [m for m in prompt if isinstance(m, Mapping)] if isinstance(prompt, list) else []
    return [(str(m.get("role") or "message"), _text_of(m)) for m in said]


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content, and the names and arguments of its tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text", f"[{_label(p)}]") if isinstance(p, Mapping) else p for p in content]
        content = "\n".join(map(str, parts))
    lines = [] if content in (None, "") else [str(content)]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping):
            lines.append(f"{function.get('name')}({_arguments(function.get('arguments'))})")
    return "\n".join(lines)


def _label(part: Mapping[str, Any]) -> str:
    """Return the type of a content part that is not text. For an image, add its size and the start of its SHA-256."""
    said = f" {part.get('width')}×{part.get('height')} {str(part['sha256'])[:6]}" if "sha256" in part else ""
    return f"{part.get('type', 'part')}{said}"


def _arguments(given: Any) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in given.items()) if isinstance(given, Mapping) else str(given or "")


def _json(path: Path) -> dict[str, Any]:
    return (parse_row(path.read_bytes()) if path.is_file() else None) or {}
