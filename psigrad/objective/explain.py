"""What a method optimises, in words and formulas taken from the docstrings of its parts."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from psigrad.objective import preference_catalog
from psigrad.objective.catalog import resolve
from psigrad.objective.policy_gradient import PolicyGradient
from psigrad.objective.preference import KahnemanTversky, Preference

WIDTH = 100
_MEANING = {
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
Spec = str | Mapping[str, Any] | PolicyGradient


def explain(spec: Spec, other: Spec | None = None) -> str:
    """The formula that a method minimises, slot by slot; with two methods, what differs between them.

    Preference losses are explained by their score and link.
    """
    if isinstance(spec, str) and other is None and spec in preference_catalog.names():
        return _preference(preference_catalog.resolve(spec))
    if other is None and not isinstance(spec, PolicyGradient) and (online := preference_catalog.resolve_online(spec)) is not None:
        return "On the best and the worst completion of each fresh group, ranked by the reward:\n\n" + _preference(online.loss)
    method = resolve(spec)
    if other is not None:
        return _difference(method, resolve(other))
    blocks = [f"{method.name or 'custom method'} minimises", "    " + _formula(method), *_legend(method), ""]
    for slot in _MEANING:
        blocks += [*_slot_lines(method, slot), ""]
    return "\n".join(blocks).rstrip() + "\n"


def _preference(loss: Preference | KahnemanTversky) -> str:
    if isinstance(loss, KahnemanTversky):
        return (
            "\n".join([f"{loss.name} minimises, over labelled completions", *_part_lines(loss, "    "), "", label(loss)]) + "\n"
        )
    formula = "loss(θ) = (1/N) Σ_n link(h_w − margin, h_l)"
    formula = formula.replace("link", f"{loss.preference:g}·link") if loss.preference != 1 else formula
    formula += f" + {loss.sft:g}·NLL(chosen)" if loss.sft else ""
    lines = [f"{loss.name} minimises", "    " + formula, f"over pairs, with h = β·score and β = {loss.beta:g}", ""]
    lines += [f"score: {label(loss.score)}", *_part_lines(loss.score, "    "), ""]
    lines += [f"link: {label(loss.link)}", *_part_lines(loss.link, "    "), ""]
    lines.append(f"margin: {loss.margin:g}" if loss.margin else "margin: none, but for a margin per pair where the data has one")
    lines.append("reference: needed; its log-probs are computed once" if loss.needs_reference else "reference: none is needed")
    return "\n".join(lines) + "\n"


def _formula(method: PolicyGradient) -> str:
    weight = "c·" if method.correction else ""
    inner = f"{weight}L(π, ρ, A)"
    if method.kl is not None and method.kl.where == "loss" and method.needs_reference:
        inner = f"[ {inner} + β·KL ]"
    formula = f"loss(θ) = Σ_i Σ_t w_it · {inner}"
    if method.entropy is not None:
        formula += " − c_H·mean(H)"
    if method.critic is not None:
        formula += " + c_V·mean(value error)"
    return formula


def _legend(method: PolicyGradient) -> list[str]:
    lines = ["over the chosen steps t of the kept trajectories i; A, w and c carry no gradient."]
    if method.kl is not None and method.kl.where == "reward" and method.needs_reference:
        lines.append("The rewards that A is made of carry the KL penalty.")
    return lines


def _parts(method: PolicyGradient, slot: str) -> tuple[Any, ...]:
    value = getattr(method, slot)
    if slot == "keep":
        return tuple(value)
    return () if value is None else (value,)


def _slot_lines(method: PolicyGradient, slot: str) -> list[str]:
    parts = _parts(method, slot)
    if not parts:
        return [f"{_MEANING[slot]}: {_ABSENT[slot]}"]
    lines: list[str] = []
    for part in parts:
        lines += _wrapped(f"{_MEANING[slot]}: {label(part)}", "") + _part_lines(part, "    ")
    return lines


def _part_lines(part: Any, indent: str) -> list[str]:
    """Purpose, formula and source from the docstring. A part whose formula depends on its parameters says so in `formula`."""
    paragraphs = (inspect.getdoc(part) or "A part without a docstring.").split("\n\n")
    lines = _wrapped(" ".join(paragraphs[0].split()), indent)
    for paragraph in paragraphs[1:]:
        if paragraph.startswith("Formula:"):
            formula: str = getattr(part, "formula", paragraph.removeprefix("Formula:"))
            for row in formula.splitlines():
                lines += _wrapped(row.strip(), indent + "    ")
        elif paragraph.startswith("Source:"):
            lines += _wrapped(" ".join(paragraph.split()), indent)
    inner = [getattr(part, f.name) for f in fields(part)] if is_dataclass(part) and not isinstance(part, type) else []
    for value in inner:
        if callable(value) or is_dataclass(value):
            lines += _wrapped(f"with {label(value)}", indent) + _part_lines(value, indent + "    ")
    return lines


def label(part: Any) -> str:
    """A part's name with its parameters: clip(low=0.2, high=0.28)."""
    if is_dataclass(part) and not isinstance(part, type):
        inside = ", ".join(f"{f.name}={_shown(getattr(part, f.name))}" for f in fields(part))
        return f"{type(part).__name__}({inside})"
    return str(getattr(part, "__name__", part))


def _shown(value: Any) -> str:
    return label(value) if callable(value) or is_dataclass(value) else repr(value)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=True) or [""]


def _difference(a: PolicyGradient, b: PolicyGradient) -> str:
    first, second = a.name or "the first", b.name or "the second"
    if first == second:
        first, second = f"{first} (1)", f"{second} (2)"
    same = [slot for slot in _MEANING if getattr(a, slot) == getattr(b, slot)]
    lines = [f"{first} minimises", "    " + _formula(a), f"{second} minimises", "    " + _formula(b), ""]
    for slot in _MEANING:
        if slot in same:
            continue
        lines.append(f"{_MEANING[slot]} differs")
        for name, method in ((first, a), (second, b)):
            lines += [f"  {name}:", *_side(method, slot)]
        lines.append("")
    if len(same) == len(_MEANING):
        lines += ["They are the same method.", ""]
    elif same:
        lines += _wrapped("Same in both: " + ", ".join(f"{slot} ({_short(a, slot)})" for slot in same), "")
    return "\n".join(lines).rstrip() + "\n"


def _side(method: PolicyGradient, slot: str) -> list[str]:
    parts = _parts(method, slot)
    if not parts:
        return ["    " + _ABSENT[slot]]
    return [line for part in parts for line in (*_wrapped(label(part), "    "), *_part_lines(part, "      "))]


def _short(method: PolicyGradient, slot: str) -> str:
    return ", ".join(label(part) for part in _parts(method, slot)) or "none"
