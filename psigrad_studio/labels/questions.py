"""Custom questions of a project: comparisons or ratings by aspect, choices among named options, and free texts.

They are asked in addition to the question of the project's kind, or instead of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.errors import nearest
from psigrad_studio.labels.refusals import Refusal

ASPECTS = ("better", "scale")
"""The kinds that determine the better completion, so that they yield training rows."""
QUESTION_KINDS = (*ASPECTS, "choice", "text")
WEIGHTED = "weighted"
MOST, LONGEST = 20, 10_000


@dataclass(frozen=True)
class Question:
    """One custom question."""

    name: str
    """The name of the answers in exports (`criterion`); unique in the project."""
    kind: str = "better"
    """better (of two completions), scale (each completion from 1 to `top`), choice (one of `options`) or text."""
    ask: str = ""
    """The displayed text; empty: the name."""
    options: tuple[str, ...] = ()
    """The options of a choice."""
    top: int = 5
    """The top of a scale, which starts at 1."""
    required: bool = True
    """True if the question must be answered."""
    why: bool = False
    """True if the page has a field for the reason below the question."""
    weight: float = 1.0
    """The weight in the weighted judgement (better, scale)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(self.options))
        named = 1 <= len(self.name.strip()) <= 60 and self.name.isprintable() and self.name not in ("", WEIGHTED, "each")
        for name, ok, expected in (
            ("name", named, f"1 to 60 printable characters, and neither {WEIGHTED!r} nor 'each'"),
            ("kind", self.kind in QUESTION_KINDS, f"one of {', '.join(QUESTION_KINDS)}{nearest(self.kind, QUESTION_KINDS)}"),
            ("ask", len(self.ask) <= 2000, "at most 2000 characters"),
            ("options", self.kind != "choice" or 2 <= len(set(self.options)) == len(self.options) <= 30, "2 to 30 that differ"),
            ("options", all(0 < len(o) <= 200 for o in self.options), "1 to 200 characters each"),
            ("top", 2 <= self.top <= 10, "2 to 10"),
            ("weight", 0 <= self.weight <= 1000, "0 to 1000"),
        ):
            if not ok:
                raise Refusal(
                    f"The question {self.name[:60]!r} has {name} {str(getattr(self, name))[:80]!r}; expected {expected}."
                )


def check(kind: str, overall: bool, questions: Sequence[Question]) -> None:
    """Raise `Refusal` if these questions cannot be asked in a project of this kind.

    `overall` is True if the kind's own question is asked too.
    """
    names = [question.name for question in questions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise Refusal(f"Two questions are called {min(twice)!r}; give each a different name.")
    if len(questions) > MOST:
        raise Refusal(f"There are {len(questions)} questions; at most {MOST} are allowed.")
    if kind == "ranking" and (questions or not overall):
        raise Refusal("A ranking project asks only for the order; add custom questions to a project of pairs or of ratings.")
    if not overall and not questions:
        raise Refusal("This project would ask nothing; add a custom question, or enable the project's own question.")
    if kind != "pair" and (lone := [question.name for question in questions if question.kind == "better"]):
        raise Refusal(f"{lone[0]!r} asks which of two completions is better, but only one is shown; make it a scale or a choice.")


def changed(old: Sequence[Question], new: Sequence[Question]) -> None:
    """Raise `Refusal` if a change of the questions would change the meaning of existing answers.

    Questions may be added or reworded.
    """
    now = {question.name: question for question in new}
    for one in old:
        other = now.get(one.name)
        if other is None:
            raise Refusal(
                f"The question {one.name!r} cannot be removed or renamed, because its answers would be lost; make it optional."
            )
        if (one.kind, one.top) != (other.kind, other.top) or not set(one.options) <= set(other.options):
            raise Refusal(f"The kind, scale and options of {one.name!r} cannot be changed; add options, or add a new question.")


def stored(
    questions: Sequence[Question], grades: int, given: Mapping[str, Any], display: Sequence[int], *, whole: bool = True
) -> dict[str, Any] | None:
    """Return name -> answer to the custom questions, with displayed sides converted to places; None if there are none.

    Each answer is an object with `value` and, if given, `strength` and `reason`. With `whole`, required questions must be
    answered. Raises `Refusal` naming the question.
    """
    found: dict[str, Any] = {}
    if unknown := set(given) - {question.name for question in questions}:
        raise Refusal(
            f"The answer has {min(unknown)[:60]!r}, which isn't asked{nearest(min(unknown), [q.name for q in questions])}."
        )
    for question in questions:
        answer = given.get(question.name) or {}
        if not isinstance(answer, Mapping) or set(answer) - {"value", "strength", "reason"}:
            raise Refusal(f"The answer to {question.name!r} must be an object with value and optionally strength and reason.")
        if answer.get("value") in (None, "", []):
            if question.required and whole:
                raise Refusal(f"{question.name!r} is required; answer it.")
            continue
        found[question.name] = {"value": _value(question, answer["value"], display)} | _rest(question, grades, answer)
    return found or None


def _value(question: Question, value: Any, display: Sequence[int]) -> Any:
    if question.kind == "better":
        ok, expected = value in ("left", "right", "tie"), "left, right or tie"
    elif question.kind == "scale":
        whole = isinstance(value, list | tuple) and all(type(one) is int and 1 <= one <= question.top for one in value)
        ok, expected = whole and len(value) == len(display), f"{len(display)} whole numbers from 1 to {question.top}"
    elif question.kind == "choice":
        ok, expected = value in question.options, f"one of {', '.join(question.options)}"
    else:
        ok, expected = isinstance(value, str) and len(value) <= LONGEST, f"a text of at most {LONGEST} characters"
    if not ok:
        raise Refusal(f"The answer to {question.name!r} is {str(value)[:60]!r}; expected {expected}.")
    if question.kind == "better":
        return value if value == "tie" else "ab"[display[("left", "right").index(value)]]
    return [value[list(display).index(place)] for place in range(len(display))] if question.kind == "scale" else value


def _rest(question: Question, grades: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    strength, reason = answer.get("strength"), answer.get("reason")
    sided = question.kind == "better" and answer["value"] != "tie"
    if strength is not None and not (sided and type(strength) is int and 1 <= strength <= grades):
        raise Refusal(
            f"The strength of {question.name!r} is {str(strength)[:40]}; expected 1 to {grades} together with a chosen side, or "
            "none."
        )
    if reason is not None and not (isinstance(reason, str) and len(reason) <= LONGEST):
        raise Refusal(f"The reason of {question.name!r} must be a text of at most {LONGEST} characters.")
    return ({} if strength is None else {"strength": strength}) | ({"reason": reason} if reason else {})
