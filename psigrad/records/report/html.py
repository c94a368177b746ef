"""The report.html page: one file, no scripts, no external resources. Its templates are in templates/."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from psigrad.errors import UserError
from psigrad.paths import absolute
from psigrad.records import run_folder
from psigrad.records.read import TEXT_LIMIT, RunData, Sample, clip, interval, load_all, show_number
from psigrad.records.report import plots
from psigrad.records.report.facts import describe_method, facts, format_time, overrides
from psigrad.records.report.verdict import apply_rules, verdict
from psigrad.records.row_lines import replace_file
from psigrad.records.rows import number
from psigrad.records.signals import SIGNAL_BY_NAME, name_of
from psigrad.records.warnings import BY_NAME as RULES
from psigrad.records.warnings import RunWarning
from psigrad.redaction import escape

SAMPLES, AT_ONCE = 24, 6
_ELSEWHERE = ("time", "kind", "command", "machine", "traceback", "code")  # fields of an event that the page displays elsewhere
_IMAGE = re.compile(r"\[image \d+×\d+ ([0-9a-f]{6})\]")
_VERDICTS = {1.0: "good", 0.0: "bad"}


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its content `value`, and the `kind` that decides how templates/base.html draws it."""

    value: Any
    kind: str = ""
    name: str = ""
    """For a "key", the name of the run. For a "range", the interval of the value."""


@dataclass(frozen=True)
class Table:
    """A table with the column titles `head`. `summary` is a sentence about its content, and `note` is a remark in grey."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    summary: str = ""
    full_width: bool = False
    """True if the table is as wide as the page, for long texts.

    On a phone each row of any table is displayed as a block, in which every cell has its column's title above it.
    """
    visible_rows: int = 0
    """The number of rows that are visible at first; a reader can unfold the others. 0: all are visible."""
    name: str = ""
    """The table's name for screen readers."""


@dataclass(frozen=True)
class Figure:
    """A picture with its title, a `note`, and a `legend` of its colours if it needs one.

    `svg` is not escaped in the page, so it must come from psigrad.
    """

    title: str
    note: str
    svg: str
    legend: Sequence[str] = ()


# The sections of one run's report.html besides its curves, from top to bottom. Empty ones are omitted.
_OF_ONE = ("lines", "verdict", "facts", "trace", "headline", "warnings", "episode", "samples", "troubles", "overrides", "events")


def write(folders: str | Path | Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the report on one run, or a comparison of several runs, and return the file's path.

    Without `output`, the file is report.html in the folder of the run, or in the current folder for several runs.
    """
    runs = load_all([folders] if isinstance(folders, str | Path) else folders)
    if not runs:
        raise UserError("No run was named; give the output_dir of one or more runs.")
    return save(page(runs), absolute(output) if output else (runs[0].path if len(runs) == 1 else Path()) / "report.html")


MARK = b'name="generator" content="psigrad"'


def check(target: Path, mark: bytes = MARK) -> None:
    """Raise `UserError` if the file `target` lacks `mark`, which psigrad's pages contain. A missing or empty file is allowed."""
    if target.is_file() and (before := target.read_bytes()) and mark not in before:
        raise UserError(f"{target} exists, and psigrad did not write it; name another file as the output.")


def save(content: str, target: Path, mark: bytes = MARK) -> Path:
    """Write a page to `target` atomically, and return `target`.

    Raise `UserError` if the page cannot be written, or if it would replace a file that lacks `mark` (see `check`).
    """
    try:
        check(target, mark)
        replace_file(target, [content.encode("utf-8", "backslashreplace")], f".{os.getpid()}")
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"The report cannot be written to {target}: {why}; name another file as its output.") from error
    return target


def page(runs: Sequence[RunData]) -> str:
    """Return the HTML of the report on one run, or of the comparison of several."""
    pictures = [Figure(p.title, p.note, svg, p.legend) for p, svg in plots.draw(runs)]
    names = [run.name for run in runs]
    every = [(run.name, json.dumps(run.config, indent=1)) for run in runs if run.config]
    shown: dict[str, Any] = {"figures": pictures, "names": names, "every": every, "differing": None}
    if len(runs) > 1:
        compared = {"headline": _compare(runs), "differing": _differences(runs)}
        return render("report.html", f"{len(runs)} runs compared", **{**dict.fromkeys(_OF_ONE, ()), **shown, **compared})
    (run,) = runs
    tables = (_headline, _warnings, _episode, _samples, _troubles, _overrides, _events)
    parts = ([describe_method(run)], verdict(run), facts(run), _trace(run), *(make(run) for make in tables))
    return render("report.html", run.name, **shown, **dict(zip(_OF_ONE, parts, strict=True)))


def render(template: str, title: str, **parts: Any) -> str:
    """Return the page that the file `template` of templates/ makes from the variables `parts`. HTML in them is escaped."""
    page = environment(autoescape=True).get_template(template)
    return page.render(title=title, colours=plots.COLOURS, dark=plots.DARK, **parts) + "\n"


def environment(*, autoescape: bool) -> Environment:
    """Return the Jinja environment that renders the files of templates/. An undefined name in a template is an error."""
    made = Environment(
        loader=PackageLoader("psigrad.records.report"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"shown": _text, "visible": escape}
    return made


def _text(value: Any, limit: int | None = None) -> str:
    return escape(clip(value, limit or TEXT_LIMIT))


def _number(value: Any) -> Cell:
    return Cell(show_number(value), "n")


def _episode(run: RunData) -> str:
    """Return the video of a control run's episode in base64, for the page; "" if there is none."""
    with contextlib.suppress(OSError):
        return b64encode((run.path / run_folder.VIDEO).read_bytes()).decode()
    return ""


def _trace(run: RunData) -> str:
    """Return the traceback of the error that ended the run; "" if it did not fail."""
    last = run.events[-1] if run.events else {}
    return str(last.get("traceback") or "") if last.get("kind") == "failed" else ""


def _warnings(run: RunData) -> Table | None:
    """Return a table of the run's warnings, with the current ones at the top; None if there are none."""
    raised: dict[str, list[RunWarning]] = {}
    watch = apply_rules(run)
    for alert in watch.alerts():
        raised.setdefault(alert.rule, []).append(alert)
    rows = []
    for rule, found in raised.items():
        newest = found[0]
        times = Cell(f"{len(found):,} times" if len(found) > 1 else "once")
        ended = Cell("still", "n") if newest.ended is None else _number(newest.ended)
        rows.append([Cell(RULES[rule].title), Cell(watch.advice(rule), "soft"), times, _number(newest.step), ended])
    return Table(("", "", "", "last from step", "to step"), rows) if rows else None


def _headline(run: RunData) -> Table | None:
    """Return a table of the main figures: the rows of summary.json, or else the first and the last evaluation.

    Return None if the run has neither.
    """
    if run.summary:
        named = ((r, ", ".join(filter(None, (r["name"], r.get("unit"))))) for r in run.summary)
        return Table(("", "", "95 % interval"), [[Cell(name), _number(r["value"]), Cell(interval(r), "n")] for r, name in named])
    if not run.evaluations:
        return None
    ends = run.evaluations[:: max(1, len(run.evaluations) - 1)]
    rows = []
    for name in (key for key in ends[-1] if key.startswith("eval/") and not key.endswith(("/low", "/high"))):
        stem = name.removesuffix("/mean")
        values = [_number(row.get(name)) for row in ends]
        rows.append([Cell(_title(stem)), *values, Cell(interval(ends[-1], f"{stem}/"), "n")])
    return Table(("held-out", *(f"step {row['step']}" for row in ends), "95 % interval"), rows)


def _title(key: str) -> str:
    """Return the title and unit of a held-out figure from `SIGNALS`, or `key` without "eval/" if they are not there."""
    bare = key.removeprefix("eval/")
    signal = SIGNAL_BY_NAME.get(name_of(key)) or SIGNAL_BY_NAME.get(name_of(bare))
    if signal is None or signal.name == "held_out":
        return bare
    title = signal.title.removeprefix("Held-out ")
    return f"{title[0].upper()}{title[1:]}" + (f", {signal.unit}" if signal.unit else "")


def _compare(runs: Sequence[RunData]) -> Table:
    """Return a table that compares the final figures of several runs."""
    rows = []
    for i, run in enumerate(runs):
        metric, last = run.held_out_metric, (run.evaluations or [{}])[-1]
        rewards = plots.smooth(run.series("reward")[1])
        rows.append(
            [
                Cell(i, "key", run.name),
                Cell(clip(describe_method(run), 160), "soft"),
                _number(max((row["step"] for row in run.metrics), default=None)),
                _number(last.get(f"{metric}/mean")),
                Cell(interval(last, f"{metric}/"), "n"),
                _number(rewards[-1] if rewards else None),
                _number(last.get("eval/kl")),
                _number(round(sum(run.series("step_time")[1])) or None),
            ]
        )
    names = {run.held_out_metric.removeprefix("eval/") for run in runs if run.held_out_metric}
    held_out = f"held-out {names.pop()}" if len(names) == 1 else "held-out"
    return Table(("run", "", "steps", held_out, "95 % interval", "reward (smoothed)", "KL", "seconds"), rows)


def _differences(runs: Sequence[RunData]) -> Table | None:
    """Return a table of the settings and the hashes of the user's code that differ between runs; None if nothing differs."""
    settings = [{**run.settings, **{f"code of {name}": value[:12] for name, value in run.code.items()}} for run in runs]
    differ = [
        name
        for name in dict.fromkeys(name for given in settings for name in given)
        if name != "run.output_dir" and any(given.get(name) != settings[0].get(name) for given in settings)
    ]
    rows = [[Cell(name), *(Cell(_value(given.get(name)), "text") for given in settings)] for name in differ[:60]]
    return Table(("", *(run.name for run in runs)), rows) if rows else None


def _samples(run: RunData) -> Table | None:
    """Return a table of held-out completions at the first, the middle and the last evaluation; None if there are none."""
    rows, steps = run.compared, list(run.samples)
    if not rows:
        return None
    head, turned = ["prompt"], ""
    for step in steps:
        head += [f"step {step}", ""]
    turns = Counter((_verdict(row[steps[0]]), _verdict(row[steps[-1]])) for row in rows)
    if len(steps) > 1 and sum(count for turn, count in turns.items() if "" not in turn) == len(rows):
        better, worse = turns["bad", "good"], turns["good", "bad"]
        turned = (
            f"Of {len(rows):,} held-out prompts, {better:,} went from wrong to right and {worse:,} from right to wrong; "
            f"{turns['good', 'good']:,} were right and {turns['bad', 'bad']:,} wrong both times."
        )
    cells = []
    for row in rows[:SAMPLES]:
        said = [(role, text, thumbnails(run.path, text)) for role, text in row[steps[0]].messages]
        cells.append([Cell(said or row[steps[0]].prompt, "conversation" if said else "verbatim")])
        for sample in row.values():
            verdict = _verdict(sample)
            mark = Cell(verdict, "verdict") if verdict else _number(sample.reward)
            cells[-1] += [Cell(sample.completion, "verbatim"), mark]
    note = f"First {min(SAMPLES, len(rows))} of {len(rows):,}; rows whose reward changed come first."
    return Table(head, cells, note, turned, full_width=True, visible_rows=AT_ONCE)


def thumbnails(run: Path, text: str) -> list[str]:
    """Return the first eight images that `text` refers to, as data URIs of up to 96 × 96 pixels. Skip unreadable images."""
    from PIL import Image

    found, folder = list[str](), run / "images"
    for begins in _IMAGE.findall(text)[:8]:
        with contextlib.suppress(Exception):  # a decoder can raise any error, and the page still has the label
            given = map(json.loads, (folder / "paths.jsonl").open()) if (folder / "paths.jsonl").exists() else ()
            files = [*folder.glob(f"{begins}*.*"), *(Path(path) for digest, path, *_ in given if digest.startswith(begins))]
            with Image.open(files[0], formats=("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")) as image:
                image.thumbnail((96, 96))
                image.convert("RGB").save(file := io.BytesIO(), "PNG")
            found.append(f"data:image/png;base64,{b64encode(file.getvalue()).decode()}")
    return found


def _verdict(sample: Sample) -> str:
    """Return "good" for a reward of 1, "bad" for a reward of 0, and "" for any other reward."""
    return _VERDICTS.get(sample.reward, "")


def _troubles(run: RunData) -> Table | None:
    """Return a table of the most frequent reasons why completions failed or were not scored; None if there are none."""
    rows = [[Cell(s), _number(count), Cell(why, "text")] for (s, why), count in run.troubles.most_common(12)]
    more = len(run.troubles) - len(rows)
    return Table(("", "count", "reason"), rows, f"and {more:,} more reasons" if more else "") if rows else None


def _overrides(run: RunData) -> Table | None:
    """Return a table of the settings that differ from the defaults; None if there are none."""
    rows = [[Cell(name), Cell(_value(value), "text")] for name, value in overrides(run).items()]
    return Table((), rows[:80]) if rows else None


def _value(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def _events(run: RunData) -> Table | None:
    rows = []
    for event in run.events[-40:]:
        rest = {k: v for k, v in event.items() if k not in _ELSEWHERE and v not in ("", None)}
        when = format_time(number(event.get("time")))
        rows.append([Cell(when, "soft"), Cell(event.get("kind", "")), Cell(_value(rest) if rest else "", "text")])
    return Table((), rows) if rows else None
