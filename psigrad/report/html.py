"""report.html: one file, no scripts, nothing fetched from anywhere."""

from __future__ import annotations

import html
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.report import plots
from psigrad.report.read import RunData, load, number

SAMPLES = 24
TEXT_LIMIT = 600

_STYLE = """
:root {
  color-scheme: light dark; --ink: #1b1f24; --soft: #667; --line: #d9dce1; --page: #fff; --good: #00795a; --bad: #b34700;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3ad; --line: #343a42; --page: #14171b; --good: #4cc79a; --bad: #f0904d; }
}
* { box-sizing: border-box; }
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1080px; margin: 0 auto; padding: 24px 16px 64px;
}
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 17px; margin: 36px 0 10px; }
p.soft, .soft { color: var(--soft); margin: 2px 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 22px 28px; }
figure { margin: 0; }
figcaption { font-weight: 600; font-size: 14px; }
figcaption span { font-weight: 400; color: var(--soft); }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text {
  font-family: ui-monospace, monospace; font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere;
  max-width: 340px; unicode-bidi: isolate;
}
.good { color: var(--good); }
.bad { color: var(--bad); }
details { margin: 8px 0; }
summary { cursor: pointer; color: var(--soft); }
pre { font-size: 12px; overflow-x: auto; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; }
"""


def write(folders: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """The report of one run (default: report.html in its folder) or of several compared (default: report.html here).

    Raises `UserError` for a folder that is no run, or an output that cannot be written.
    """
    if not folders:
        raise UserError("No run was named; give the output_dir of one or more runs.")
    runs = [load(folder) for folder in folders]
    target = Path(output) if output else (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    beside = target.with_name(f".{target.name}.tmp")
    try:
        beside.write_text(page(runs), encoding="utf-8", errors="backslashreplace")
        os.replace(beside, target)
    except OSError as error:
        raise UserError(f"The report cannot be written to {target}: {error.strerror}.") from error
    return target


def page(runs: Sequence[RunData]) -> str:
    """The whole page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    sections = [_compared(runs)] if len(runs) > 1 else [_headline(runs[0])]
    sections.append(_plots(runs))
    if len(runs) == 1:
        sections += [_samples(runs[0]), _troubles(runs[0]), _events(runs[0])]
    sections += [_settings(run) for run in runs]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>psigrad · {_text(title)}</title><style>{_STYLE}</style></head><body>"
        f'<h1>{_text(title)}</h1><p class="soft">{_text(_method(runs[0]) if len(runs) == 1 else "")}</p>'
        f"{''.join(sections)}</body></html>\n"
    )


def _text(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Escaped text of bounded length; control characters and lone surrogates are spelt out."""
    text = str(value)
    cut = len(text) - limit
    text = text[:limit]
    shown = "".join(
        c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )
    return html.escape(shown) + (f'<span class="soft"> … {cut} more characters</span>' if cut > 0 else "")


def figure(value: Any) -> str:
    """A number for people: four significant digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        value = number(value) if isinstance(value, str) else value
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{_text(h)}</th>" for h in head)}</tr>{body}</table></div>'


def _cell(value: Any, kind: str = "") -> str:
    return f'<td class="{kind}">{value}</td>' if kind else f"<td>{value}</td>"


def _method(run: RunData) -> str:
    config = run.config
    model = config.get("model", {}).get("path", "")
    if config.get("recipe") == "sft":
        return f"supervised fine-tuning of {model}, {config.get('batch_size', '?')} rows per step"
    algorithm = config.get("algorithm", "?")
    name = algorithm if isinstance(algorithm, str) else json.dumps(algorithm)
    shape = f"{config.get('prompts_per_step', '?')} prompts × {config.get('num_generations', '?')} completions per step"
    return f"{name} on {model}, {shape}"


def _headline(run: RunData) -> str:
    """The summary's rows, or the first and last evaluation."""
    if run.summary:
        rows = [
            (
                _cell(_text(row["name"])),
                _cell(figure(row["value"]), "n"),
                _cell(_interval(row.get("low"), row.get("high")), "n"),
                _cell(_text(row.get("unit", "")), "soft"),
            )
            for row in run.summary
        ]
        return _table(("", "", "95 % interval", ""), rows)
    found = run.evaluations
    if not found:
        return ""
    first, last = found[0], found[-1]
    names = [key for key in last if key.startswith("eval/") and not key.endswith(("/low", "/high"))]
    rows = []
    for name in names:
        stem = name.removesuffix("/mean")
        rows.append(
            (
                _cell(_text(stem.removeprefix("eval/"))),
                _cell(figure(first.get(name)), "n"),
                _cell(figure(last.get(name)), "n"),
                _cell(_interval(last.get(f"{stem}/low"), last.get(f"{stem}/high")), "n"),
            )
        )
    return _table(("held-out", f"step {first['step']}", f"step {last['step']}", "95 % interval"), rows)


def _interval(low: Any, high: Any) -> str:
    return "" if low is None or high is None else f"{figure(low)} to {figure(high)}"


def _compared(runs: Sequence[RunData]) -> str:
    rows = []
    for i, run in enumerate(runs):
        metric = run.held_out_metric
        last = run.evaluations[-1] if run.evaluations else {}
        rewards = run.series("reward")[1]
        rows.append(
            (
                _cell(f'<span class="key" style="background:{plots.COLOURS[i % len(plots.COLOURS)]}"></span>{_text(run.name)}'),
                _cell(_text(_method(run), 120), "soft"),
                _cell(str(max([row["step"] for row in run.metrics], default=0)), "n"),
                _cell(figure(last.get(f"{metric}/mean")), "n"),
                _cell(_interval(last.get(f"{metric}/low"), last.get(f"{metric}/high")), "n"),
                _cell(figure(plots.smoothed(rewards)[-1] if rewards else None), "n"),
                _cell(figure(last.get("eval/kl")), "n"),
                _cell(figure(sum(run.series("step_time")[1])), "n"),
            )
        )
    return _table(("run", "", "steps", "held-out", "95 % interval", "reward (smoothed)", "KL", "seconds"), rows)


def _plots(runs: Sequence[RunData]) -> str:
    pictures = plots.draw(runs)
    if not pictures:
        return '<p class="soft">No step has been taken yet.</p>'
    figures = "".join(
        f"<figure><figcaption>{_text(p.title)} <span>{_text(p.note)}</span></figcaption>{svg}</figure>" for p, svg in pictures
    )
    return f'<h2>Curves <span class="soft">over steps</span></h2><div class="plots">{figures}</div>'


def _samples(run: RunData) -> str:
    """The same held-out prompts at the first, the middle and the last evaluation; those that changed come first."""
    held = [row for row in run.rollouts if row.get("kind") == "eval" and row.get("k", 0) == 0]
    steps = sorted({row["step"] for row in held})
    if not steps:
        return ""
    shown = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    table = {step: {row.get("row"): row for row in held if row["step"] == step} for step in shown}
    common = [key for key in table[shown[0]] if all(key in table[step] for step in shown)]
    common.sort(key=lambda key: table[shown[0]][key].get("completion") == table[shown[-1]][key].get("completion"))
    rows = []
    for key in common[:SAMPLES]:
        cells = [_cell(_text(_prompt(table[shown[0]][key])), "text")]
        for step in shown:
            row = table[step][key]
            mark = "good" if number(row.get("reward")) >= 1 else "bad"
            cells += [_cell(_text(row.get("completion", "")), "text"), _cell(figure(row.get("reward")), f"n {mark}")]
        rows.append(cells)
    head = ["prompt"]
    for step in shown:
        head += [f"step {step}", ""]
    return f"<h2>Completions</h2>{_table(head, rows)}"


def _prompt(row: Mapping[str, Any]) -> str:
    prompt = row.get("prompt", "")
    if isinstance(prompt, list):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in prompt if isinstance(m, Mapping))
    return str(prompt)


def _troubles(run: RunData) -> str:
    """Why completions failed or stayed unscored."""
    reasons = Counter(
        (row.get("status"), row.get("reason")) for row in run.rollouts if row.get("status") in ("failed", "unscored")
    )
    if not reasons:
        return ""
    rows = [(_cell(_text(s)), _cell(str(n), "n"), _cell(_text(r), "text")) for (s, r), n in reasons.most_common(12)]
    return f"<h2>Completions without a plain score</h2>{_table(('', 'count', 'reason'), rows)}"


def _events(run: RunData) -> str:
    if not run.events:
        return ""
    rows = []
    for event in run.events[-40:]:
        rest = {k: v for k, v in event.items() if k not in ("time", "kind") and v not in ("", None)}
        when = number(event.get("time"))
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if math.isfinite(when) and 0 <= when < 1e11 else ""
        rows.append(
            (_cell(moment, "soft"), _cell(_text(event.get("kind", ""))), _cell(_text(json.dumps(rest) if rest else ""), "text"))
        )
    return f"<details><summary>Events</summary>{_table(('', '', ''), rows)}</details>"


def _settings(run: RunData) -> str:
    if not run.config:
        return ""
    shown = _text(json.dumps(run.config, indent=1), 20000)
    return f"<details><summary>Settings of {_text(run.name)}</summary><pre>{shown}</pre></details>"
