"""report.html: one file, no scripts, nothing fetched from anywhere."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from psigrad.config import ControlConfig, OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.errors import UserError
from psigrad.records.read import TEXT_LIMIT, RunData, Sample, clip, flat, interval, kind_of, load_all, shown, visible
from psigrad.records.rows import number
from psigrad.report import plots

SAMPLES = 24
_CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "preference": PreferenceConfig, "control": ControlConfig}
_MARKS = {"right": '<span class="good">✓</span>', "wrong": '<span class="bad">✗</span>'}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6470; --line: #d9dce1; --page: #fff; --good: #00795a; --bad: #b34700;
  LIGHT }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3ad; --line: #343a42; --page: #14171b; --good: #4cc79a;
  --bad: #f0904d; DARK } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1120px; margin: 0 auto;
  padding: 28px 16px 64px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 10px; }
p { margin: 4px 0 12px; overflow-wrap: anywhere; }
.soft, th, summary { color: var(--soft); font-weight: 400; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(310px, 100%), 1fr)); gap: 24px 28px; }
figure { margin: 0; }
figcaption { font-weight: 600; font-size: 14px; line-height: 1.3; margin-bottom: 4px; }
svg { width: 100%; height: auto; display: block; stroke-linejoin: round; }
svg text { font-family: system-ui, sans-serif !important; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; margin-bottom: 8px; }
th, td { text-align: left; padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { font-family: ui-monospace, monospace; font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 130px;
  max-width: 340px; unicode-bidi: isolate; }
.good { color: var(--good); }
.bad { color: var(--bad); }
details { margin: 14px 0; }
summary { cursor: pointer; }
pre { font-size: 12px; overflow-x: auto; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; }
"""


def write(folders: str | Path | Sequence[str | Path], output: str | Path | None = None) -> Path:
    """The report of one run (default: report.html in its folder) or of several compared (default: report.html here).

    The file is replaced whole or not at all. Raises `UserError` for a folder that is no run, or an output that cannot be
    written.
    """
    runs = load_all([folders] if isinstance(folders, str | Path) else folders)
    if not runs:
        raise UserError("No run was named; give the output_dir of one or more runs.")
    return save(page(runs), Path(output) if output else (runs[0].path if len(runs) == 1 else Path()) / "report.html")


def save(content: str, target: Path) -> Path:
    """Write a page, whole or not at all. Raises `UserError` where it cannot be written."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(content, encoding="utf-8")
        os.replace(beside, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        why = error.strerror or error
        raise UserError(f"The report cannot be written to {target}: {why}; name another file as its output.") from error
    return target


def page(runs: Sequence[RunData]) -> str:
    """The whole page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    sections = [_compared(runs)] if len(runs) > 1 else [f"<p class=soft>{text(_method(runs[0]))}</p>", _headline(runs[0])]
    sections.append(_plots(runs))
    if len(runs) == 1:
        sections.append(_film(runs[0]))
        sections += [_samples(runs[0]), _troubles(runs[0]), _chosen(runs[0]), _events(runs[0])]
    sections += [_settings(run) for run in runs]
    return document(title, "".join(sections))


def document(title: str, body: str) -> str:
    """A page with the house's style; nothing in it is fetched or run."""
    style = _STYLE
    for name, colours in (("LIGHT", plots.COLOURS), ("DARK", plots.DARK)):
        style = style.replace(name, " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours)))
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>psigrad · {text(title)}</title><style>{style}</style></head><body>\n"
        f"<h1>{text(title)}</h1>\n{body}\n</body></html>\n"
    )


def text(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Escaped text of bounded length; control characters and lone surrogates are spelt out."""
    return html.escape(visible(clip(value, limit)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    first = f"<tr>{''.join(f'<th>{text(h)}</th>' for h in head)}</tr>\n" if head else ""
    return f'<div class="wide"><table>{first}{body}</table></div>'


def cell(value: str, kind: str = "") -> str:
    """A cell of what is HTML already."""
    return f'<td class="{kind}">{value}</td>' if kind else f"<td>{value}</td>"


def _number(value: Any) -> str:
    return cell(shown(value), "n")


def _film(run: RunData) -> str:
    """An episode of a control run, where one was drawn; the picture is part of the page."""
    try:
        picture = b64encode((run.path / "episode.gif").read_bytes()).decode()
    except OSError:
        return ""
    return f'<h2>An episode of the trained policy</h2><img alt="an episode, animated" src="data:image/gif;base64,{picture}">'


def _method(run: RunData) -> str:
    """What the run does, in one line."""
    given = run.settings
    model = f"{given.get('model.path', 'a model')}" + (f", LoRA of rank {r}" if (r := given.get("model.lora_rank")) else "")
    kind = kind_of(run.config)
    if kind == "control":
        algorithm = run.config.get("algorithm", "?")
        name = algorithm.get("preset", "a policy gradient") if isinstance(algorithm, dict) else algorithm
        return f"{name} on {run.config.get('env') or 'an environment'}: {given.get('n_envs', '?')} copies"
    if kind == "reward":
        return f"reward model from {model}: {given.get('batch_size', '?')} pairs per step"
    if kind == "preference":
        loss = run.config.get("loss", "?")
        name = loss.get("preset", "a preference loss") if isinstance(loss, dict) else loss
        return f"{name} on {model}: {given.get('batch_size', '?')} pairs per step"
    if kind == "sft":
        return f"supervised fine-tuning of {model}: {given.get('batch_size', '?')} rows per step"
    algorithm = run.config.get("algorithm", "?")
    if isinstance(algorithm, dict):
        algorithm = algorithm.get("name") or algorithm.get("preset") or "a policy gradient"
    rewards = run.config.get("reward")
    against = f" against {', '.join(map(str, rewards))}" if isinstance(rewards, list) and rewards else ""
    shape = f"{given.get('prompts_per_step', '?')} prompts × {given.get('num_generations', '?')} completions per step"
    return f"{algorithm} on {model}{against}: {shape}"


def _headline(run: RunData) -> str:
    """The summary's rows, or the first and last evaluation."""
    if run.summary:
        rows = [
            [cell(text(r["name"])), _number(r["value"]), cell(interval(r), "n"), cell(text(r.get("unit", "")), "soft")]
            for r in run.summary
        ]
        return table(("", "", "95 % interval", ""), rows)
    if not run.evaluations:
        return ""
    ends = run.evaluations[:: max(1, len(run.evaluations) - 1)]
    rows = []
    for name in (key for key in ends[-1] if key.startswith("eval/") and not key.endswith(("/low", "/high"))):
        stem = name.removesuffix("/mean")
        figures = [_number(row.get(name)) for row in ends]
        rows.append([cell(text(stem.removeprefix("eval/"))), *figures, cell(interval(ends[-1], f"{stem}/"), "n")])
    return table(("held-out", *(f"step {row['step']}" for row in ends), "95 % interval"), rows)


def _compared(runs: Sequence[RunData]) -> str:
    """Final figures of each run, and the settings in which they differ."""
    rows = []
    for i, run in enumerate(runs):
        metric, last = run.held_out_metric, (run.evaluations or [{}])[-1]
        rewards = plots.smoothed(run.series("reward")[1])
        rows.append(
            [
                cell(_key(i, run)),
                cell(text(_method(run), 160), "soft"),
                _number(max((row["step"] for row in run.metrics), default=None)),
                _number(last.get(f"{metric}/mean")),
                cell(interval(last, f"{metric}/"), "n"),
                _number(rewards[-1] if rewards else None),
                _number(last.get("eval/kl")),
                _number(round(sum(run.series("step_time")[1])) or None),
            ]
        )
    names = {run.held_out_metric.removeprefix("eval/") for run in runs if run.held_out_metric}
    held_out = f"held-out {names.pop()}" if len(names) == 1 else "held-out"
    shown_runs = table(("run", "", "steps", held_out, "95 % interval", "reward (smoothed)", "KL", "seconds"), rows)
    settings = [run.settings for run in runs]
    differ = [
        name
        for name in dict.fromkeys(name for given in settings for name in given)
        if name != "run.output_dir" and any(given.get(name) != settings[0].get(name) for given in settings)
    ]
    cells = [[cell(text(name)), *(cell(_value(given.get(name)), "text") for given in settings)] for name in differ[:60]]
    return shown_runs + (f"<h2>Settings that differ</h2>{table(('', *(run.name for run in runs)), cells)}" if cells else "")


def _key(i: int, run: RunData) -> str:
    return f'<span class="key" style="background:var(--c{i % len(plots.COLOURS)})"></span>{text(run.name)}'


def _plots(runs: Sequence[RunData]) -> str:
    pictures = plots.draw(runs)
    if not pictures:
        return '<p class="soft">There are no two steps to draw yet.</p>'
    figures = "\n".join(
        f'<figure><figcaption>{text(p.title)} <span class="soft">{text(p.note)}</span></figcaption>{svg}</figure>'
        for p, svg in pictures
    )
    note = "over steps; thin: each step, thick: moving average; the figure at the right is the last"
    legend = f"<p>{' &emsp; '.join(_key(i, run) for i, run in enumerate(runs))}</p>" if len(runs) > 1 else ""
    return f'<h2>Curves <span class="soft">{note}</span></h2>{legend}<div class="plots">{figures}</div>'


def _samples(run: RunData) -> str:
    """The same held-out prompts at the first, the middle and the last evaluation, and how many went from wrong to right."""
    rows, steps = run.compared, list(run.samples)
    if not rows:
        return ""
    head, said = ["prompt"], ""
    for step in steps:
        head += [f"step {step}", ""]
    turns = Counter((_verdict(row[steps[0]]), _verdict(row[steps[-1]])) for row in rows)
    judged = sum(count for turn, count in turns.items() if "" not in turn)
    if len(steps) > 1 and judged == len(rows):
        better, worse = turns["wrong", "right"], turns["right", "wrong"]
        said = (
            f"<p>Of {judged:,} held-out prompts, {better:,} went from wrong to right and {worse:,} from right to wrong; "
            f"{turns['right', 'right']:,} were right and {turns['wrong', 'wrong']:,} wrong at both ends.</p>"
        )
    first = f'<p class="soft">First {min(SAMPLES, len(rows))} of {len(rows):,}; those whose reward changed stand first.</p>'
    cells = []
    for row in rows[:SAMPLES]:
        cells.append([cell(_whole(row[steps[0]].prompt), "text")])
        for sample in row.values():
            mark = _MARKS.get(_verdict(sample)) or shown(sample.reward)
            cells[-1] += [cell(_whole(sample.completion), "text"), cell(mark, "n")]
    return f"<h2>Completions</h2>{said}{first}{table(head, cells)}"


def _verdict(sample: Sample) -> str:
    """Right is a reward of 1 and wrong one of 0; anything between is neither."""
    return {1.0: "right", 0.0: "wrong"}.get(sample.reward, "")


def _whole(text: str) -> str:
    """Text that was cut when it was read."""
    return html.escape(visible(text))


def _troubles(run: RunData) -> str:
    """Why completions failed or stayed unscored."""
    rows = [[cell(text(s)), _number(count), cell(text(why), "text")] for (s, why), count in run.troubles.most_common(12)]
    more = len(run.troubles) - len(rows)
    said = f'<p class="soft">and {more:,} more reasons</p>' if more else ""
    return f"<h2>Completions without a plain score</h2>{table(('', 'count', 'reason'), rows)}{said}" if rows else ""


def _chosen(run: RunData) -> str:
    """Settings other than the defaults."""
    defaults = flat(json.loads(json.dumps(asdict(_CONFIGS.get(kind_of(run.config), OnlineConfig)()))))
    rows = [
        [cell(text(name)), cell(_value(value), "text")]
        for name, value in run.settings.items()
        if name != "recipe" and value != defaults.get(name)
    ]
    return f"<details open><summary>Settings other than the defaults</summary>{table((), rows[:80])}</details>" if rows else ""


def _value(value: Any) -> str:
    return text("–" if value is None else value if isinstance(value, str) else json.dumps(value), 200)


def _events(run: RunData) -> str:
    rows = []
    for event in run.events[-40:]:
        rest = {k: v for k, v in event.items() if k not in ("time", "kind") and v not in ("", None)}
        when = number(event.get("time"))
        moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when)) if math.isfinite(when) and 0 <= when < 1e11 else ""
        rows.append([cell(moment, "soft"), cell(text(event.get("kind", ""))), cell(_value(rest) if rest else "", "text")])
    return f"<details><summary>Events</summary>{table((), rows)}</details>" if rows else ""


def _settings(run: RunData) -> str:
    if not run.config:
        return ""
    every = text(json.dumps(run.config, indent=1), 20000)
    return f"<details><summary>All settings of {text(run.name)}</summary><pre>{every}</pre></details>"
