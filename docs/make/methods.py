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
# Parts whose sentence defines a symbol of the formula. For the others the formula and the page's own words are enough.
DEFINING = ("leave_one_out", "length_gae", "with_imitation", "value_loss", "logistic", "robust")
PLAIN = {"link: logistic(label_smoothing=0.0)": "−log σ(h_w − h_l)"}  # parts whose formula is shorter with these parameters
UNSAID = ", with Ψ_t the advantage before whitening"  # the part inside begins with Ψ_t
INNER = {"psi": "Ψ_t =", "surrogate": "L'_t =", "critic": "Â_t ="}  # what a part inside the part of a slot computes
SHARED = ("`token`", "`none`", "`token_mean`", "`sequence_mean`", "`KL(")  # parts of these whose papers are not the method's
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
    head = f"# {summary[0].upper()}{summary[1:]}\n\n```\n{command}\n```\n\n## Formula\n\n## When to use it\n\n## When it fails"
    return f"{head}\n\n## Beside TRL\n\n## Curve\n\n{UNMEASURED}\n"


def _formula(name: str) -> str:
    """Return the formula that a method minimises, part by part. `psigrad explain` prints the same with each part's source."""
    paper = f"The method is that of arXiv:{OWN[name]}.\n\n" if name in OWN else ""
    sections = _sections(algorithms.explain(name))
    loss, mark, parts = sections.partition("\n\n**")
    return f"## Formula\n\n{paper}{loss}{_symbols(sections, name in LOSSES)}{mark}{parts}"


def _symbols(formulas: str, preference: bool) -> str:
    """Return a paragraph that says what the symbols of a page's formulas mean, as far as the parts do not say it."""
    if preference:
        known = {"|y|": "|y| its length in tokens", "σ(": "σ the sigmoid", "π_ref": "π_ref the reference model"}
        return f"\n\nx is the prompt, y an answer, {', '.join(words for sign, words in known.items() if sign in formulas)}."
    if "a_t" not in formulas:
        return ""
    token = "π_old sampled the token (step) a_t after" if "π_old" in formulas else "token (step) a_t follows"
    words = [f"In completion (sequence, trajectory) i, {token} the text s_t."]
    single = re.search(r"\br_[tu]", formulas)
    if "R_i" in formulas:
        words.append("R_i is the sum of the tokens' rewards r_t." if single else "R_i is the completion's reward.")
    elif single:
        words.append("r_t is the token's reward.")
    if "mean(R)" in formulas:
        figures = "mean(R) and std(R) are" if "std(R)" in formulas else "mean(R) is"
        words.append(f"{figures} over the group, the completions of one prompt.")
    elif "group" in formulas:
        words.append("A group is the completions of one prompt.")
    known = {
        "V(": "V is the critic.",
        "π_sampler": "π_sampler is the sampler's policy.",
        "π_ref": "π_ref is the reference model.",
    }
    return "\n\n" + " ".join([*words, *(said for sign, said in known.items() if sign in formulas)])


def _sections(explained: str) -> str:
    """Return the output of `explain` as Markdown: a paragraph for each filled slot, and its formulas as blocks."""
    out: list[str] = []
    shift = 0  # how far the lines of a part inside a part are moved to the right
    part_name = section = ""
    for line in _unwrapped(explained):
        indent, text = len(line) - len(line.lstrip()), line.strip()
        slot, colon, part = text.partition(": ")
        if text.startswith("Source: ") and (papers := re.findall(r"arXiv:\d{4}\.\d{5}", text)):
            last = max(n for n, block in enumerate(out) if block.startswith(("**", "with `")))
            if not any(part in out[last] for part in SHARED):
                out[last] += f" ({', '.join(dict.fromkeys(papers))})"
        if not text or text.startswith(ELSEWHERE):
            continue
        if (not indent and text.endswith(" minimises")) or text == "ρ_t = 1":  # the surrogates of these methods read no ratio
            continue
        if indent == 0:
            shift, section = 0, text
            part_name = part.partition("(")[0]
            if not (part.startswith("none:") or (part == "none" and slot in ("critic", "entropy"))):
                out.append(f"**{slot}**: `{part}`" if colon and slot in SLOT_NAMES else text)
        elif (text.startswith("with ") and indent == 4 + shift and "(" in text) or (
            text.startswith("with ") and text.count(" ") == 1
        ):
            out.append(f"with `{text.removeprefix('with ')}`")
            part_name = text.removeprefix("with ").partition("(")[0]
            shift = indent
        elif indent >= 8 + shift or (indent == 4 and not shift and text.startswith("loss(")):
            nested = INNER.get(section.partition(" ")[0].rstrip(":")) if shift else None
            block = "    " + (
                text.replace("A_t =" if "A_t" in text else "L_t =", nested)
                if nested
                else PLAIN.get(section, text.removesuffix(UNSAID))
            )
            if out and out[-1].startswith("    "):
                out[-1] += "\n" + block
            else:
                out.append(block)
        elif part_name in DEFINING and section not in PLAIN:
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


OWN = {"vc_ppo": "2503.01491"}  # a paper whose parts are others'


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
