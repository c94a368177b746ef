"""Explanations of what a method optimises, in words and formulas from the docstrings of its parts."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

from psigrad.objective.policy_gradient import PolicyGradient
from psigrad.objective.preferences.preference_loss import KahnemanTversky, OnlinePreference, Preference

WIDTH = 100
MEANING = {
    "psi": "psi (advantage A)",
    "ratio": "ratio ρ",
    "surrogate": "surrogate L",
    "aggregate": "aggregate w",
    "kl": "KL to the reference",
    "keep": "keep (filter)",
    "critic": "critic",
    "entropy": "entropy",
    "correction": "correction c",
}
_ABSENT = {
    "kl": "none: no reference policy is needed",
    "keep": "none: every trajectory is trained on",
    "critic": "none",
    "entropy": "none",
    "correction": "none: the sampler's log-probabilities are taken as the policy's own",
}
_FRESH_PAIRS = "On the best and the worst completion of each newly sampled group, ranked by the reward:\n\n"
Explained = PolicyGradient | OnlinePreference | Preference | KahnemanTversky


def explain(method: Explained, other: Explained | None = None) -> str:
    """Explain the loss that a method minimises: its formula, then each part. With `other`, describe the differences."""
    if other is not None:
        return _difference(method, other)
    if isinstance(method, OnlinePreference):
        return _FRESH_PAIRS + explain(method.loss)
    if not isinstance(method, PolicyGradient):
        return _preference(method)
    blocks = [f"{method.name or 'custom method'} minimises", "    " + _formula(method), *_legend(method), ""]
    for slot in MEANING:
        blocks += [*_slot_lines(method, slot), ""]
    return "\n".join(blocks).rstrip() + "\n"


def _preference(loss: Preference | KahnemanTversky) -> str:
    if isinstance(loss, KahnemanTversky):
        return "\n".join([*_head(loss), "", f"loss: {label(loss)}", *_part_lines(loss, "    ")]) + "\n"
    lines = [*_head(loss), ""]
    lines += [f"score: {label(loss.score)}", *_part_lines(loss.score, "    "), ""]
    lines += [f"link: {label(loss.link)}", *_part_lines(loss.link, "    "), ""]
    lines.append(f"margin: {loss.margin:g}, plus the row's `margin` if it has one")
    lines.append("reference: its log-probs are computed before training" if loss.needs_reference else "reference: none is needed")
    return "\n".join(lines) + "\n"


def _head(method: Explained, name: str = "") -> list[str]:
    """Return the lines with a method's name and formula. A given `name` replaces the method's own name."""
    name = name or method.name or "custom method"
    if isinstance(method, PolicyGradient):
        return [f"{name} minimises", "    " + _formula(method)]
    if isinstance(method, OnlinePreference):
        return [f"{name}, on pairs of fresh completions:", *_head(method.loss)]
    if isinstance(method, KahnemanTversky):
        return [f"{name} minimises the mean of this loss over labelled completions"]
    formula = "loss(θ) = (1/N) Σ_n link(h_w, h_l)"
    formula = formula.replace("1/N", "λ/N") if method.preference != 1 else formula
    formula += f" + {method.sft:g}·NLL(chosen)".replace(" 1·", " ") if method.sft else ""
    sides = f"h_w = β·score(w) − margin, h_l = β·score(l), β = {method.beta:g}"
    sides += f", λ = {method.preference:g} (`loss.preference`)" if method.preference != 1 else ""
    sides += "; NLL is the mean of −log π over the tokens of all chosen answers" if method.sft else ""
    return [f"{name} minimises", "    " + formula, f"over N pairs (w chosen, l rejected), with {sides}"]


def _formula(method: PolicyGradient) -> str:
    inner = "c_t·L_t" if method.correction else "L_t"
    if method.kl is not None and method.kl.where == "loss" and method.needs_reference:
        inner = f"[{inner} + β·KL_t]"
    formula = f"loss(θ) = Σ_i Σ_t w_t·{inner}"
    if method.entropy is not None:
        formula += " − c_H·mean(H)"
    if method.critic is not None:
        formula += " + c_V·mean(value error)"
    return formula


def _legend(method: PolicyGradient) -> list[str]:
    fixed = "A, w and c carry" if method.correction else "A and w carry"
    lines = [f"over the policy's steps t in the trajectories i that no filter dropped; {fixed} no gradient."]
    if method.kl is not None and method.kl.where == "reward" and method.needs_reference:
        lines.append("The KL to the reference is subtracted from the rewards before A is computed.")
    return lines


def _parts(method: Explained, slot: str) -> tuple[Any, ...]:
    value = getattr(method, slot)
    if slot == "keep":
        return tuple(value)
    return () if value is None else (value,)


def _slot_lines(method: PolicyGradient, slot: str) -> list[str]:
    parts = _parts(method, slot)
    if not parts and slot == "correction" and method.corrects:
        return [f"{MEANING[slot]}: none: the surrogate itself weights by the sampler's probabilities"]
    if not parts:
        return [f"{MEANING[slot]}: {_ABSENT[slot]}"]
    lines: list[str] = []
    for part in parts:
        lines += _wrap(f"{MEANING[slot]}: {label(part)}", "") + _part_lines(part, "    ")
    return lines


def _part_lines(part: Any, indent: str) -> list[str]:
    """Return the purpose, formula and source from a part's docstring, then the same for each part inside this part.

    If the part has a property `formula`, its value replaces the docstring's formula.
    """
    if isinstance(part, int | float):
        return []
    paragraphs = (inspect.getdoc(part) or "A part without a docstring.").split("\n\n")
    lines = _wrap(" ".join(paragraphs[0].split()), indent)
    for paragraph in paragraphs[1:]:
        if paragraph.startswith("Formula:"):
            formula: str = getattr(part, "formula", paragraph.removeprefix("Formula:"))
            for row in formula.splitlines():
                lines += _wrap(row.strip(), indent + "    ")
        elif paragraph.startswith("Source:"):
            lines += _wrap(" ".join(paragraph.split()), indent)
    inner = [getattr(part, f.name) for f in fields(part)] if is_dataclass(part) and not isinstance(part, type) else []
    for value in inner:
        if callable(value) or is_dataclass(value):
            lines += _wrap(f"with {label(value)}", indent) + _part_lines(value, indent + "    ")
    return lines


def label(part: Any) -> str:
    """Return a part's name, with the values of the parameters that it uses: clip(low=0.2, high=0.28)."""
    if is_dataclass(part) and not isinstance(part, type):
        unread = ("name", *getattr(part, "unread", ()))
        inside = ", ".join(f"{f.name}={_show(getattr(part, f.name))}" for f in fields(part) if f.name not in unread)
        return f"{type(part).__name__}({inside})"
    return str(getattr(part, "__name__", part))


def _show(value: Any) -> str:
    return label(value) if callable(value) or is_dataclass(value) else repr(value)


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=True) or [""]


def _difference(a: Explained, b: Explained) -> str:
    first, second = a.name or "the first", b.name or "the second"
    if first == second:
        first, second = f"{first} (1)", f"{second} (2)"
    lines = [*_head(a, first), *_head(b, second), ""]
    if type(a) is not type(b):
        return "\n".join([*lines, "They learn from different data and have no parts in common."]) + "\n"
    slots = [f.name for f in fields(a) if f.name in MEANING or (not isinstance(a, PolicyGradient) and f.name != "name")]
    same = [slot for slot in slots if getattr(a, slot) == getattr(b, slot)]
    for slot in slots:
        if slot in same:
            continue
        lines.append(f"{MEANING.get(slot, slot)} differs")
        for name, method in ((first, a), (second, b)):
            lines += [f"  {name}:", *_side(method, slot)]
        lines.append("")
    if len(same) == len(slots):
        lines += ["They are the same method.", ""]
    elif same:
        lines += _wrap("Same in both: " + ", ".join(f"{slot} ({_short(a, slot)})" for slot in same), "")
    return "\n".join(lines).rstrip() + "\n"


def _side(method: Explained, slot: str) -> list[str]:
    parts = _parts(method, slot)
    if not parts:
        return ["    " + _ABSENT[slot]]
    return [line for part in parts for line in (*_wrap(label(part), "    "), *_part_lines(part, "      "))]


def _short(method: Explained, slot: str) -> str:
    return ", ".join(label(part) for part in _parts(method, slot)) or "none"
