"""Update docs/methods/: the formulas of each page, from `psigrad explain`, and the tables: python docs/make/methods.py

A new method gets a page to be filled in.
"""

from __future__ import annotations

import functools
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

SLOT_NAMES = {*MEANING.values(), "score", "link", "loss"}
ELSEWHERE = (  # lines of `explain` that table.md, a part's formula or the page's own words have
    "Source: ",
    "agents (--agent)",
    "over the policy's steps t in the trajectories i that no filter dropped; ",
    "The KL to the reference is subtracted from the rewards",
    "reference: ",
)
PLAIN = {  # formulas that say more of a method than those of `explain`
    "link: logistic(label_smoothing=0.0)": "−log σ(h_w − h_l)",
    "aggregate w: sequence_mean": "w_t = 1 / (number of completions · |y|), where |y| is the completion's length",
    "aggregate w: fixed_length(n=1024)": "w_t = 1 / (n · number of completions)\n"
    "    n is by default `max_completion_length`, and 1024 in Python",
}
UNSAID = ", with Ψ_t the advantage before whitening"  # the part inside begins with Ψ_t
INNER = {"psi": "Ψ_t =", "surrogate": "L'_t =", "critic": "Â_t ="}  # what a part inside the part of a slot computes
# `explain` also serves control, so it speaks of steps and trajectories. On these pages they are tokens and completions.
WORDS = {"step": "token", "sequence": "completion", "trajectory": "completion", "trajectories": "completions"}
UNMEASURED = "No curve has been measured yet."


def page(name: str) -> str:
    """Return the page of a method, with its section of formulas as the code has them."""
    path = DOCS / "methods" / f"{name}.md"
    before, _, rest = (path.read_text() if path.exists() else _template(name)).partition("## Formula\n")
    return f"{before}{_formula(name)}\n\n## When to use it\n{rest.partition('## When to use it' + chr(10))[2]}"


def _template(name: str) -> str:
    """Return the page of a method that has none yet, with the words of its declaration."""
    summary = (METHODS.get(name) or LOSSES[name]).summary
    rows = "prompts.jsonl --reward my_module:my_reward" if name in METHODS else "comparisons.jsonl"
    command = f"psigrad {name} --model PATH_OR_HUB_NAME --dataset {rows}"
    described = "\n\n[Rewards](../rewards.md) shows how to write `my_reward`." if name in METHODS else ""
    head = f"# {summary[0].upper()}{summary[1:]}\n\n```\n{command}\n```{described}\n\n## Formula\n\n## When to use it\n\n## When it fails"
    return f"{head}\n\n## In TRL\n\n## Curve\n\n{UNMEASURED}\n"


def _formula(name: str) -> str:
    """Return the formula that a method minimises, part by part. `psigrad explain` prints the same with each part's source."""
    explained = algorithms.explain(name)
    sections = _sections(explained)
    if "π_sampler" in sections:
        sections = sections.replace("    ρ_t =", "    for metrics only: ρ_t =")
    loss, mark, parts = sections.partition("\n\n**")
    return f"## Formula\n\n{loss}{_symbols(sections, name in LOSSES)}{mark}{parts}"


def _symbols(formulas: str, preference: bool) -> str:
    """Return a paragraph that says what the symbols of a page's formulas mean, as far as the parts do not say it."""
    if preference:
        known = {"|y|": "|y|: its length in tokens", "σ(": "σ: sigmoid", "π_ref": "π_ref: reference model"}
        return f"\n\nx: prompt; y: answer; {'; '.join(words for sign, words in known.items() if sign in formulas)}."
    if "a_t" not in formulas:
        return ""
    words = ["a_t: token t of completion i", "s_t: text before it"]
    if "π_old" in formulas:
        words.append("π_old: the policy before the batch's updates")
    single = re.search(r"\br_[tu]", formulas)
    if "R_i" in formulas:
        words.append("R_i: the sum of the tokens' rewards r_t" if single else "R_i: the reward of completion i")
    elif single:
        words.append("r_t: the token's reward")
    if "mean(R)" in formulas:
        figures = "mean(R), std(R)" if "std(R)" in formulas else "mean(R)"
        words.append(f"{figures}: over all completions of the prompt (the group)")
    elif "group" in formulas:
        words.append("group: all completions of the prompt")
    known = {"V(": "V: critic", "π_sampler": "π_sampler: the sampler's policy", "π_ref": "π_ref: reference model"}
    words += [said for sign, said in known.items() if sign in formulas]
    counted = " Dropped completions do not count in w_t." if "keep i" in formulas else ""
    return f"\n\n{'; '.join(words)}.{counted}"


def _sections(explained: str) -> str:
    """Return the output of `explain` as Markdown, without sources: a paragraph for each filled slot, its formulas as blocks."""
    out: list[str] = []
    shift = 0  # how far the lines of a part inside a part are moved to the right
    section = ""
    for line in _unwrapped(explained):
        indent, text = len(line) - len(line.lstrip()), line.strip()
        slot, colon, part = text.partition(": ")
        if not text or text.startswith(ELSEWHERE):
            continue
        if (not indent and text.endswith(" minimises")) or text == "ρ_t = 1":  # the surrogates of these methods read no ratio
            continue
        if not (colon and slot in SLOT_NAMES):
            text = _said_of_texts(text)
        if indent == 0:
            shift, section = 0, text
            if not (part.startswith("none:") or (part == "none" and slot in ("critic", "entropy"))):
                out.append(f"**{slot}**: `{part}`" if colon and slot in SLOT_NAMES else text)
        elif (text.startswith("with ") and indent == 4 + shift and "(" in text) or (
            text.startswith("with ") and text.count(" ") == 1
        ):
            out.append(f"with `{text.removeprefix('with ')}`")
            shift = indent
        elif indent >= 8 + shift or (indent == 4 and not shift and text.startswith("loss(")):
            nested = INNER.get(section.partition(" ")[0].rstrip(":")) if shift else None
            block = "    " + (
                text.replace("A_t =" if "A_t =" in text else "L_t =", nested)
                if nested
                else PLAIN.get(section, text.removesuffix(UNSAID))
            )
            if out and out[-1].startswith("    "):
                out[-1] += "\n" + block
            else:
                out.append(block)
    return "\n\n".join(out)


def _said_of_texts(text: str) -> str:
    """Return a line of `explain` in the words of language models."""
    return re.sub(r"\b(step|sequence|trajectory)(s?)\b|\btrajectories\b", lambda m: WORDS[m[1] or m[0]] + (m[2] or ""), text)


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


SLOTS = ("psi", "ratio", "surrogate", "aggregate", "kl", "keep", "critic")


def table() -> str:
    """Return docs/methods/table.md: every preset and every preference loss by its parts."""
    rows = [f"| method | {' | '.join(SLOTS)} | gradient |\n|---{'|---' * len(SLOTS)}|---|"]
    for name in METHODS:
        parts = algorithms.resolve(name)
        cells = [", ".join(_short(k) for k in parts.keep) if slot == "keep" else _short(getattr(parts, slot)) for slot in SLOTS]
        rows.append(f"| [{name}]({name}.md) | {' | '.join(cell or '–' for cell in cells)} | {_proof(name)} |")
    losses = ["| loss | score | link | β |\n|---|---|---|---|"]
    for name in LOSSES:
        loss = algorithms.resolve_loss(name)
        cells = [_short(getattr(loss, part, None)) for part in ("score", "link")]
        losses.append(f"| [{name}]({name}.md) | {' | '.join(cell or '–' for cell in cells)} | {loss.beta:g} |")
    return fill(TABLE.read_text(), methods="\n".join(rows), losses="\n".join(losses))


CLOSED = ("reinforce_total_return", "reinforce_reward_to_go", "reinforce_moving_average", "pass_at_k", "distill")


@functools.cache
def _enumerated() -> set[str]:
    """Return the methods whose gradient the tests sum over all batches."""
    source = (DOCS.parent / "tests" / "objective" / "test_enumerated_gradients.py").read_text()
    return set(source.split("FORMULAS = [")[1].split("]")[0].replace(",", " ").split())


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
    """Return docs/index.md or README.md with the current lists of methods and preference losses, and the number of methods."""
    for heading, names in (("## Methods", METHODS), ("## Preference losses", LOSSES)):
        lines = "\n".join(f"- [{_title(name)}](methods/{name}.md)" for name in names)
        text = re.sub(rf"({heading}\n(?:\n[^-\n#].*\n)?\n)(?:- \[.*\n)+", lambda m, lines=lines: f"{m[1]}{lines}\n", text)
    return re.sub(r"\d+(?= more methods)", str(len(METHODS) - 4), text)


def write_pages() -> None:
    """Write docs/methods/*.md, their list in docs/index.md, and their number in README.md."""
    for name in (*METHODS, *LOSSES):
        (DOCS / "methods" / f"{name}.md").write_text(page(name))
    TABLE.write_text(table())
    for file in (DOCS / "index.md", DOCS.parent / "README.md"):
        file.write_text(index(file.read_text()))


if __name__ == "__main__":
    write_pages()
