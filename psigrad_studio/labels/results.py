"""Results of a project: agreement, position bias, and a ranking of samplers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sqlalchemy.orm import Session

from psigrad.errors import nearest
from psigrad_studio.labels import agreement as statistics
from psigrad_studio.labels import label_data, people
from psigrad_studio.labels.agreement import Alpha, Proportion
from psigrad_studio.labels.aspects import names, of_aspect
from psigrad_studio.labels.database import reads
from psigrad_studio.labels.label_data import CurrentAnswer, ProjectLabels
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.questions import WEIGHTED
from psigrad_studio.labels.ranking import Ranking, Undetermined, bradley_terry
from psigrad_studio.labels.refusals import Conflict, Refusal
from psigrad_studio.labels.schema import CHOICES

By = Literal["sampler", "run", "step", "completion"]
PRIOR_SD = 3.0
"""The standard deviation of the weak prior. Strengths of ±6, which are odds of 400 to 1, are two standard deviations away."""


@dataclass(frozen=True)
class Kappa:
    """Cohen's kappa of two people over the units that both answered."""

    first: str
    second: str
    value: float
    units: int


@dataclass(frozen=True)
class Agreement:
    """The agreement of the current answers. Units are tasks, or, in rankings, the pairs of a task.

    `alpha` is by level: nominal, and for ratings also ordinal and interval. `fleiss` is None if tasks have different numbers of
    answers. `cohen` has an entry for every two people. `position` (the share of answers for the left side) and `gold` (the share
    of right answers to attention checks) are by person's name, "" for all. `position` is empty if the project has no pairs.
    """

    units: int
    shared: int
    """The number of units with two answers or more."""
    percent: float
    alpha: dict[str, Alpha]
    fleiss: float | None
    cohen: list[Kappa]
    position: dict[str, Proportion]
    gold: dict[str, Proportion]


@dataclass(frozen=True)
class RankingLine:
    """One line of a ranking: strength (natural logarithms, sum 0) with its interval, and the range of possible ranks."""

    name: str
    strength: float
    low: float
    high: float
    best_rank: int
    worst_rank: int
    comparisons: int


@dataclass(frozen=True)
class RankingTable:
    """A Bradley–Terry ranking, the strongest first.

    `tie` is η of the model. `prior_sd` is None if the strengths maximise the likelihood itself. `same` counts comparisons of two
    sides with the same name, and `shared` those of a text with several origins. Both are excluded from the ranking.
    """

    places: list[RankingLine]
    comparisons: int
    tie: float
    prior_sd: float | None
    same: int
    shared: int


@reads
def agreement(session: Session, person: Person, project_id: int, aspect: str = "") -> Agreement:
    """Return the agreement of the answers between people, and with known answers if there are any; on `aspect` if it is given."""
    return _agreement(of_aspect(label_data.load(session, people.require(session, person, project_id, "results")), aspect))


@reads
def by_aspect(session: Session, person: Person, project_id: int) -> dict[str, Agreement]:
    """Return question -> agreement, for each question with countable answers: the main one (""), custom ones, and "weighted"."""
    labels = label_data.load(session, people.require(session, person, project_id, "results"))
    asked = [question.name for question in labels.questions if question.kind != "text"]
    asked = [""] * labels.overall + asked + [WEIGHTED] * (WEIGHTED in names(labels))
    return {aspect: _agreement(of_aspect(labels, aspect)) for aspect in asked}


def _agreement(labels: ProjectLabels) -> Agreement:
    raters = sorted(labels.names, key=lambda n: labels.names[n])
    table = _matrix(labels, raters)
    answered = (~np.isnan(table)).sum(0)
    rating = labels.kind.startswith("rating") or any(answer.ratings for answer in labels.answers)
    levels: tuple[statistics.Level, ...] = ("nominal", "ordinal", "interval") if rating else ("nominal",)
    even = answered[answered > 0]
    return Agreement(
        units=int((answered > 0).sum()),
        shared=int((answered > 1).sum()),
        percent=statistics.percent_agreement(table),
        alpha={level: statistics.alpha_interval(table, level) for level in levels},
        fleiss=statistics.fleiss_kappa(table) if even.size and even.min() == even.max() > 1 else None,
        cohen=[
            Kappa(labels.names[a], labels.names[b], statistics.cohen_kappa(table[i], table[j]), _both(table[i], table[j]))
            for (i, a), (j, b) in itertools.combinations(enumerate(raters), 2)
        ],
        position=_by_name(labels, labels.answers, _left) if labels.kind == "pair" else {},
        gold=_by_name(labels, [*labels.answers, *labels.checks], lambda answer: _right(labels, answer)),
    )


def _matrix(labels: ProjectLabels, raters: list[int]) -> Any:
    """Return [R, U]: the answers of R raters to U units as numbers.

    A number is the index of a choice, the order of a pair (1, 2, 0 for equal), or a rating.
    """
    units: dict[tuple[int, ...], int] = {}
    cells = [
        (raters.index(answer.user), units.setdefault(unit, len(units)), v)
        for answer in labels.answers
        for unit, v in _units(answer)
    ]
    table = np.full((len(raters), len(units)), np.nan)
    for rater, unit, value in cells:
        table[rater, unit] = value
    return table


def _both(a: Any, b: Any) -> int:
    return int((~np.isnan(a) & ~np.isnan(b)).sum())


def _units(answer: CurrentAnswer) -> Iterator[tuple[tuple[int, ...], float]]:
    if answer.ratings is not None:
        yield from (((answer.task, place), rating) for place, rating in enumerate(answer.ratings))
    elif answer.choice is not None:
        yield (answer.task,), CHOICES.index(answer.choice)
    elif answer.rating is not None:
        yield (answer.task,), answer.rating
    else:
        ranks = answer.ranks or []
        for a, b in itertools.combinations(range(len(ranks)), 2):
            yield (answer.task, a, b), 0 if ranks[a] == ranks[b] else 1 if ranks[a] < ranks[b] else 2


def _left(answer: CurrentAnswer) -> bool | None:
    return answer.display[0] == "ab".index(answer.choice) if answer.choice in ("a", "b") else None


def _right(labels: ProjectLabels, answer: CurrentAnswer) -> bool | None:
    gold = labels.tasks[answer.task].gold
    return None if gold is None or answer.choice is None else answer.choice == "ab"[gold]


def _by_name(labels: ProjectLabels, answers: list[CurrentAnswer], question: Any) -> dict[str, Proportion]:
    """Return name -> share of answers for which `question` returns True, for each person and ("") overall.

    Answers for which it returns None are not counted.
    """
    found: dict[str, list[bool]] = {"": []}
    for answer in answers:
        said = question(answer)
        if said is not None:
            found[""].append(said)
            found.setdefault(labels.names[answer.user], []).append(said)
    return {name: statistics.share(sum(said), len(said)) for name, said in sorted(found.items()) if said}


@reads
def ranking(session: Session, person: Person, project_id: int, by: By = "sampler", aspect: str = "") -> RankingTable:
    """Return Bradley–Terry strengths of samplers, runs, steps of runs, or completions, from all current answers (of one aspect).

    "Both bad" counts as a tie, and a ranking as comparisons of all its pairs. Ratings count as comparisons of one person's
    ratings of one prompt. Answers to one task may depend on one another. If the likelihood has no maximum, because a competitor
    never lost, a weak prior is used and reported. Raises `Conflict` if there is nothing to compare.
    """
    if by not in ("sampler", "run", "step", "completion"):
        raise Refusal(f"by is {by!r}; expected sampler, run, step or completion{nearest(by, ('sampler', 'run', 'step'))}.")
    project = people.require(session, person, project_id, "results")
    labels = of_aspect(label_data.load(session, project), aspect)
    if labels.kind == "choice":
        raise Conflict(f"{aspect!r} is a choice among options, which cannot rank completions; name another question.")
    called = _names(session, labels, by)
    kept: list[tuple[str, str, float, int]] = []
    left_out: Counter[str] = Counter()
    for a, b, outcome, cluster in _comparisons(labels):
        one, other = called.get(a), called.get(b)
        if one is None or other is None or one == other:
            left_out["shared" if one is None or other is None else "same"] += 1
        else:
            kept.append((one, other, outcome, cluster))
    if not kept:
        raise Conflict(f"No answer compares completions with different values of {by}; rank by something else.")
    return _table(kept, left_out)


def _table(kept: list[tuple[str, str, float, int]], left_out: Counter[str]) -> RankingTable:
    order = sorted({name for one, other, _, _ in kept for name in (one, other)})
    index = {name: n for n, name in enumerate(order)}
    first, second = [index[k[0]] for k in kept], [index[k[1]] for k in kept]
    outcome, cluster = [k[2] for k in kept], [k[3] for k in kept]
    try:
        found = bradley_terry(first, second, outcome, len(order), cluster=cluster)
    except Undetermined:
        found = bradley_terry(first, second, outcome, len(order), cluster=cluster, prior_sd=PRIOR_SD)
    return RankingTable(_places(found, order), len(kept), found.tie, found.prior_sd, left_out["same"], left_out["shared"])


def _places(found: Ranking, names: list[str]) -> list[RankingLine]:
    low, high = found.interval()
    ranks = found.ranks()
    lines = [
        RankingLine(name, float(found.strength[n]), float(low[n]), float(high[n]), *ranks[n], int(found.comparisons[n]))
        for n, name in enumerate(names)
    ]
    return sorted(lines, key=lambda line: -line.strength)


def _names(session: Session, labels: ProjectLabels, by: By) -> dict[int, str]:
    """Return completion -> the name under which it is ranked, such as its sampler's. Those with several names are omitted."""
    if by == "completion":
        return {n: str(n) for task in labels.tasks.values() for n in task.completions}
    found: dict[int, str] = {}
    for completion, origins in label_data.origins(session, labels.project).items():
        called = {name for origin in origins if (name := _called(origin, by)) is not None}
        if len(called) == 1:
            found[completion] = called.pop()
    return found


def _called(origin: dict[str, Any], by: By) -> str | None:
    if by == "step":
        return None if origin["step"] is None else f"{origin['run'] or ''}@{origin['step']}"
    return origin[by] if by == "run" or origin[by] is None or origin["run"] is None else f"{origin['run']}: {origin[by]}"


def _comparisons(labels: ProjectLabels) -> Iterator[tuple[int, int, float, int]]:
    """Yield (completion, completion, 1 if the first is better, 0 if the second is, 0.5 for equal; cluster)."""
    if labels.kind.startswith("rating"):
        yield from _rated(labels)
        return
    for answer in labels.answers:
        items = labels.tasks[answer.task].completions
        if answer.choice is not None:
            yield items[0], items[1], {"a": 1.0, "b": 0.0}.get(answer.choice, 0.5), answer.task
        elif answer.ranks is not None:
            for a, b in itertools.combinations(range(len(items)), 2):
                yield items[a], items[b], (np.sign(answer.ranks[b] - answer.ranks[a]) + 1) / 2, answer.task


def _rated(labels: ProjectLabels) -> Iterator[tuple[int, int, float, int]]:
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for answer in labels.answers:
        task = labels.tasks[answer.task]
        groups.setdefault((answer.user, task.prompt), []).append((task.completions[0], answer.rating or 0))
    for (_, prompt), rated in groups.items():
        for (a, x), (b, y) in itertools.combinations(rated, 2):
            yield a, b, (np.sign(x - y) + 1) / 2, prompt
