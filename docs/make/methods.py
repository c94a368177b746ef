"""Update docs/methods/: the formulas of each page, from `psigrad explain`; the tables; and the measured curves.

python docs/make/methods.py pages                       the pages and tables; a new method gets a page to be filled in
python docs/make/methods.py curves SFT_MODEL DATA RUNS  trains every preset from one SFT model (the demo's), then draws docs/images/
python docs/make/methods.py preferences SFT_MODEL PAIRS RUNS   the same for the preference losses
"""

from __future__ import annotations

import functools
import json
import re
import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from psigrad.config import algorithms
from psigrad.objective.catalog import METHODS
from psigrad.objective.explain import MEANING
from psigrad.objective.preferences.preference_catalog import METHODS as LOSSES

sys.path.append(str(Path(__file__).parent))
from filled import fill

DOCS = Path(__file__).parents[1]
TABLE = DOCS / "methods" / "table.md"

SLOT_NAMES = {*MEANING.values(), "score", "link"}
COUNTED = "over the chosen steps t of the kept trajectories i; "  # said once, in table.md
COMMON = ("ratio", "aggregate", "KL")  # slots whose parts many methods share: their formula is enough
UNMEASURED = "No curve has been measured yet."


def page(name: str) -> str:
    """Return the page of a method, with its section of formulas as the code has them."""
    path = DOCS / "methods" / f"{name}.md"
    before, _, rest = (path.read_text() if path.exists() else _template(name)).partition("## Formula\n")
    return f"{before}{_formula(name)}\n\n## When to use it\n{rest.partition('## When to use it' + chr(10))[2]}"


def _template(name: str) -> str:
    """Return the page of a method that has none yet, with the words of its declaration."""
    summary = (METHODS.get(name) or LOSSES[name]).summary.capitalize()
    rows = "prompts.jsonl --reward my_module:my_reward" if name in METHODS else "comparisons.jsonl"
    command = f"psigrad {name} --model PATH_OR_HUB_NAME --dataset {rows}"
    use = "## Formula\n\n## When to use it\n\n## When it fails\n\n## Beside TRL"
    return f"# {name}\n\n{summary}.\n\n```\n{command}\n```\n\n{use}\n\n## Curve\n\n{UNMEASURED}\n"


def _formula(name: str) -> str:
    """Return the formula that a method minimises, part by part. `psigrad explain` prints the same with each part's source."""
    papers = ", ".join(f"arXiv:{paper}" for paper in _papers(name))
    return f"## Formula\n\n{_sections(algorithms.explain(name))}" + (f"\n\nPapers: {papers}." if papers else "")


def _sections(explained: str) -> str:
    """Return the output of `explain` as Markdown: a paragraph for each filled slot, and its formulas as blocks."""
    out: list[str] = []
    shift = 0  # how far the lines of a part inside a part are moved to the right
    common = False
    for line in _unwrapped(explained):
        indent, text = len(line) - len(line.lstrip()), line.strip().removeprefix(COUNTED)
        slot, colon, part = text.partition(": ")
        if not text or text.startswith(("Source: ", "agents (--agent)")):
            continue
        if indent == 0:
            shift = 0
            common = slot.startswith(COMMON)
            if not (part.startswith("none:") or (part == "none" and slot in ("critic", "entropy"))):
                out.append(f"**{slot}**: `{part}`" if colon and slot in SLOT_NAMES else text)
        elif (text.startswith("with ") and indent == 4 + shift and "(" in text) or (
            text.startswith("with ") and text.count(" ") == 1
        ):
            out.append(f"with `{text.removeprefix('with ')}`")
            shift = indent
        elif indent >= 8 + shift or (indent == 4 and not shift and not out[-1].startswith("**") and text.startswith("loss(")):
            block = "    " + text
            out[-1] += ("\n" if out[-1].startswith("    ") else "\n\n") + block if out[-1].startswith("    ") else ""
            if not out[-1].endswith(block):
                out.append(block)
        elif not common:
            out.append(text)
    return "\n\n".join(out)


def _unwrapped(text: str) -> list[str]:
    """Return the lines before `explain` wrapped them: a continuation is indented by two more."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if lines and line.strip() and indent % 4 == 2:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


def measure_preferences(model: str, pairs: str, runs: str) -> None:
    """Train one run per preference loss, and draw the pictures."""
    import psigrad
    from psigrad_extras.datasets.preferences import split_pairs

    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    for name in LOSSES:
        if _measured(Path(runs) / name, 100):
            continue
        held, train = rows[:200], rows[200:]
        psigrad.train(
            name,
            model=model,
            dataset=split_pairs(train) if name == "kto" else train,
            eval_dataset=split_pairs(held)[::2] if name == "kto" else held,
            metric="similarity",
            output_dir=f"{runs}/{name}",
            max_steps=100,
            learning_rate=1e-4,
            batch_size=64 if name == "kto" else 32,
            max_completion_length=12,
            eval_prompts=200,
            eval_steps=10,
            report=False,
            progress=False,
        )
    curves = {name: _accuracy(Path(runs) / name) for name in LOSSES}
    for name in curves:
        _picture(name, f"{_title(name)}: the truth over steps", curves)


SLOTS = ("psi", "ratio", "surrogate", "aggregate", "kl", "keep", "critic")


def table() -> str:
    """Return docs/methods/table.md: every preset and every preference loss by its parts."""
    rows = []
    for name in METHODS:
        parts = algorithms.resolve(name)
        cells = [", ".join(_short(k) for k in parts.keep) if slot == "keep" else _short(getattr(parts, slot)) for slot in SLOTS]
        rows.append(f"| [{name}]({name}.md) | {' | '.join(cell or '–' for cell in cells)} | {_proof(name)} |")
    losses = []
    for name in LOSSES:
        loss = algorithms.resolve_loss(name)
        cells = [_short(getattr(loss, part, None)) for part in ("score", "link")]
        losses.append(f"| [{name}]({name}.md) | {' | '.join(cell or '–' for cell in cells)} | {loss.beta:g} |")
    head = f"| method | {' | '.join(SLOTS)} | gradient |\n|---{'|---' * len(SLOTS)}|---|"
    losses.insert(0, "| loss | score | link | β |\n|---|---|---|---|")
    parts = {"methods": [head, *rows], "losses": losses}
    return fill(TABLE.read_text(), **{name: "\n".join(lines) for name, lines in parts.items()})


CLOSED = ("reinforce_total_return", "reinforce_reward_to_go", "reinforce_moving_average", "pass_at_k", "distill")


OWN = {"vc_ppo": ("2503.01491",)}  # a paper whose parts are others'


@functools.cache
def _enumerated() -> set[str]:
    """Return the methods whose gradient the tests sum over all batches."""
    source = (DOCS.parent / "tests" / "objective" / "test_enumerated_gradients.py").read_text()
    return set(source.split("FORMULAS = [")[1].split("]")[0].replace(",", " ").split())


def _papers(name: str) -> list[str]:
    """Return the arXiv numbers that `explain` names, each once."""
    text = " ".join(algorithms.explain(name).split())
    return list(dict.fromkeys([*OWN.get(name, ()), *re.findall(r"arXiv:(\d{4}\.\d{5})", text)]))


def _proof(name: str) -> str:
    """Return how the tests check a method's expected gradient."""
    return "closed form" if name in CLOSED else "enumerated" if name in _enumerated() else ""


def _short(part: object) -> str:
    """Return a part's name, with the parameters that differ from its defaults."""
    if part is None:
        return ""
    if not is_dataclass(part) or isinstance(part, type):
        return str(getattr(part, "__name__", part))
    given = [f for f in fields(part) if f.name != "name" and getattr(part, f.name) != _default(f)]
    said = ", ".join(f"{f.name}={_short_value(getattr(part, f.name))}" for f in given)
    return f"{type(part).__name__}({said})" if said else type(part).__name__


def _default(field: Field[Any]) -> object:
    return (
        field.default if field.default is not MISSING else field.default_factory() if callable(field.default_factory) else MISSING
    )


def _short_value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else _short(value) if is_dataclass(value) else str(value)


def _title(name: str) -> str:
    """Return the heading of a method's page."""
    path = DOCS / "methods" / f"{name}.md"
    return path.read_text().partition("\n")[0].removeprefix("# ") if path.exists() else name


def index(text: str) -> str:
    """Return docs/index.md with the current lists of methods and of preference losses."""
    for heading, names in (("## Methods", METHODS), ("## Preference losses", LOSSES)):
        lines = "\n".join(f"- [{_title(name)}](methods/{name}.md)" for name in names)
        text = re.sub(rf"({heading}\n(?:\n[^-\n#].*\n)?\n)(?:- \[.*\n)+", lambda m, lines=lines: f"{m[1]}{lines}\n", text)
    return text


def write_pages() -> None:
    """Write docs/methods/*.md, and their list in docs/index.md."""
    for name in (*METHODS, *LOSSES):
        (DOCS / "methods" / f"{name}.md").write_text(page(name))
    TABLE.write_text(table())
    (DOCS / "index.md").write_text(index((DOCS / "index.md").read_text()))


# completions have eight tokens here
SHORT = {"preset": "vapo", "psi": {"part": "whitened", "psi": {"part": "length_gae", "alpha": 2.5}}, "name": "vapo"}


def measure(model: str, data: str, runs: str) -> None:
    """Train one run per preset, and draw the pictures."""
    import psigrad

    for name in METHODS:
        if _measured(Path(runs) / name):
            continue
        psigrad.train(
            name,
            model=model,
            dataset=f"{data}/prompts.jsonl",
            eval_dataset=f"{data}/held_out.jsonl",
            reward="reasoning_gym",
            metric="exact",
            output_dir=f"{runs}/{name}",
            max_steps=200,
            learning_rate=3e-4,
            adam_beta2=0.99,
            warmup_steps=5,
            prompts_per_step=16,
            num_generations=8,
            max_completion_length=12,
            **({"reference": f"{runs}/opo/model"} if name == "distill" else {}),
            **({"critic_warmup_steps": 20} if name in ("vc_ppo", "vapo") else {}),
            **({"algorithm": SHORT} if name == "vapo" else {}),
            eval_prompts=400,
            eval_steps=20,
            report=False,
            progress=False,
        )
    draw(runs)


def _measured(folder: Path, steps: int = 200) -> bool:
    """Return True if a run is finished."""
    return (folder / "metrics.jsonl").exists() and _accuracy(folder)[0][-1:] == [steps]


def draw(runs: str) -> None:
    """Write docs/images/<preset>.png: this method's held-out accuracy over the others'."""
    (DOCS / "images").mkdir(exist_ok=True)
    curves = {name: _accuracy(Path(runs) / name) for name in METHODS}
    for name in METHODS:
        _picture(name, f"{_title(name)}: held-out accuracy over steps", curves)


def _picture(name: str, title: str, curves: dict[str, tuple[list[float], ...]]) -> None:
    """Draw one method's curve with its interval over the others'."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for other, (steps, means, _, _) in curves.items():
        if other != name:
            axes.plot(steps, means, color="#8a8f98", linewidth=0.7, alpha=0.7)
    steps, means, lows, highs = curves[name]
    axes.fill_between(steps, lows, highs, color="#0072B2", alpha=0.18, linewidth=0)
    axes.plot(steps, means, color="#0072B2", linewidth=2.2)
    axes.set_title(title, loc="left", fontsize=9, color="#222222")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#8a8f98", alpha=0.25, linewidth=0.6)
    axes.tick_params(colors="#333333", labelsize=7, length=0)
    axes.set_ylim(0, 1)
    axes.margins(x=0.02)
    figure.savefig(DOCS / "images" / f"{name}.png", dpi=120)


def _accuracy(folder: Path) -> tuple[list[float], ...]:
    """Return steps, means, lows and highs of the held-out accuracy of one run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metric = "eval/exact" if any("eval/exact/mean" in row for row in rows) else "eval/similarity"
    rows = [row for row in rows if f"{metric}/mean" in row]
    keys = ("step", f"{metric}/mean", f"{metric}/low", f"{metric}/high")
    return tuple([row[key] for row in rows] for key in keys)


if __name__ == "__main__":
    if sys.argv[1:] == ["pages"]:
        write_pages()
    elif len(sys.argv) == 5 and sys.argv[1] == "curves":
        measure(*sys.argv[2:])
    elif len(sys.argv) == 5 and sys.argv[1] == "preferences":
        measure_preferences(*sys.argv[2:])
    else:
        sys.exit(__doc__)
