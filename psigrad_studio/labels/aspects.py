"""The labels of a project for a single aspect, which is a custom question.

The answers to that question replace those to the main question, so that counts, comparisons and exports need not differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from psigrad.errors import nearest
from psigrad_studio.labels.label_data import CurrentAnswer, ProjectLabels
from psigrad_studio.labels.questions import ASPECTS, WEIGHTED, Question
from psigrad_studio.labels.refusals import Refusal


def names(labels: ProjectLabels) -> list[str]:
    """Return the aspects that yield training rows, and "weighted" if two or more have a weight."""
    found = [question for question in labels.questions if question.kind in ASPECTS]
    return [question.name for question in found] + [WEIGHTED] * (sum(question.weight > 0 for question in found) > 1)


def of_aspect(labels: ProjectLabels, aspect: str = "") -> ProjectLabels:
    """Return the labels of one custom question by name; "" for the main question, "weighted" for all aspects together.

    Two ratings of a pair become a choice with their difference as its strength. The weighted judgement of one person is
    Σ w_q s_q / Σ w_q over the aspects q that the person answered. s_q is the strength of a preference, from 0 to 1, or the
    position on a scale, from 0 to 1; for a pair, the difference of both. Raises `Refusal` if there is no such question, or if it
    compares nothing.
    """
    if not aspect:
        if labels.overall:
            return labels
        one = f"name one of them: {', '.join(names(labels))}" if names(labels) else "none of its questions gives training rows"
        raise Refusal(f"This project asks only custom questions; {one}.")
    asked = {question.name: question for question in labels.questions}
    pair = labels.kind == "pair"
    if aspect == WEIGHTED:
        weighed = [question for question in labels.questions if question.kind in ASPECTS and question.weight]
        if not weighed:
            raise Refusal("No question of this project is an aspect with a weight, so there is nothing to weight.")
        grades, kind = labels.grades, "pair" if pair else "rating-10"
        return _turned(labels, kind, 1, lambda answer: _weighted(answer, weighed, grades, pair))
    if aspect not in asked:
        raise Refusal(f"There is no question {aspect[:60]!r} in this project{nearest(aspect, names(labels))}.")
    question = asked[aspect]
    if question.kind == "text":
        raise Refusal(f"{aspect!r} has free-text answers, which cannot be counted; export all votes to read them.")
    if question.kind == "choice":
        return _turned(
            labels, "choice", 0, lambda answer: _plain(answer, rating=question.options.index(_of(answer, aspect)["value"]))
        )
    if question.kind == "better":
        return _turned(labels, "pair", labels.grades, lambda answer: _better(answer, aspect))
    if pair:
        return _turned(labels, "pair", question.top - 1, lambda answer: _scales(answer, aspect))
    return _turned(labels, f"rating-{question.top}", 0, lambda answer: _plain(answer, rating=_of(answer, aspect)["value"][0]))


def _turned(
    labels: ProjectLabels, kind: str, grades: int, turn: Callable[[CurrentAnswer], CurrentAnswer | None]
) -> ProjectLabels:
    def each(answers: list[CurrentAnswer]) -> list[CurrentAnswer]:
        return [turned for answer in answers if (turned := _or_none(turn, answer)) is not None]

    return replace(labels, kind=kind, grades=grades, overall=True, answers=each(labels.answers), checks=each(labels.checks))


def _or_none(turn: Callable[[CurrentAnswer], CurrentAnswer | None], answer: CurrentAnswer) -> CurrentAnswer | None:
    """Return `turn(answer)`, or None if the person did not answer this question."""
    try:
        return turn(answer)
    except KeyError:
        return None


def _of(answer: CurrentAnswer, aspect: str) -> dict[str, Any]:
    found: dict[str, Any] = (answer.answers or {})[aspect]
    return found


def _plain(answer: CurrentAnswer, **said: Any) -> CurrentAnswer:
    return replace(answer, **{"choice": None, "ranks": None, "rating": None, "strength": None, **said})


def _better(answer: CurrentAnswer, aspect: str) -> CurrentAnswer:
    said = _of(answer, aspect)
    return _plain(answer, choice=said["value"], strength=said.get("strength"))


def _scales(answer: CurrentAnswer, aspect: str) -> CurrentAnswer:
    first, second = _of(answer, aspect)["value"]
    return _plain(answer, choice=_side(first - second), strength=abs(first - second), ratings=[first, second])


def _side(lead: float) -> str:
    return "tie" if abs(lead) < 1e-9 else "a" if lead > 0 else "b"


def _weighted(answer: CurrentAnswer, weighed: list[Question], grades: int, pair: bool) -> CurrentAnswer | None:
    given = [
        (q.weight, _score(q, (answer.answers or {})[q.name], grades, pair)) for q in weighed if q.name in (answer.answers or {})
    ]
    if not given:
        return None
    mean = sum(w * s for w, s in given) / sum(w for w, _ in given)
    # Rounded, so that equal judgements computed from different numbers are equal.
    return _plain(answer, choice=_side(mean), strength=abs(mean)) if pair else _plain(answer, rating=round(1 + 9 * mean, 12))


def _score(question: Question, said: dict[str, Any], grades: int, pair: bool) -> float:
    value = said["value"]
    if question.kind == "scale":
        return float(value[0] - (value[1] if pair else 1)) / (question.top - 1)
    share: float = said.get("strength", grades or 1) / (grades or 1)
    return {"a": share, "b": -share, "tie": 0.0}[value]
