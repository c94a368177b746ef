"""The export of labels as training data: TRL's preference and unpaired-preference rows, and single votes.

The column `lineage` of a row has the origins of its completions and the votes from which it was made. Items that yield no row are
counted by reason: `tie`, `both_bad`, `split` (no answer has more than half of the votes), `middle` (neither good nor bad),
`alone` (no completion of the same prompt to compare with), `check` (an attention check), `skipped` and `unanswered`.

With `aspect`, the rows are those of one custom question, of all of them together ("weighted"), or of each in turn ("each"). The
column `criterion` names the question.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from psigrad.errors import UserError
from psigrad.paths import check_output
from psigrad_extras.datasets import preferences as conversions
from psigrad_studio.labels import aspects, completion_groups, label_data, people
from psigrad_studio.labels.database import reads
from psigrad_studio.labels.label_data import CurrentAnswer, LabelTexts, ProjectLabels
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.refusals import Refusal
from psigrad_studio.labels.schema import Assignment, User, Vote

Votes = Literal["majority", "each"]


@dataclass
class Exported:
    """The exported rows, and the number of tasks (or votes, or pairs of them) without a row, by reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


@reads
def preference(
    session: Session, person: Person, project_id: int, votes: Votes = "majority", *, margin: bool = False, aspect: str = ""
) -> Exported:
    """Return rows with `prompt`, `chosen`, `rejected`, the prompt's own columns and `lineage`.

    With `votes` "majority", there is one row for each task on which more than half of its answers agree (rankings: by mean rank;
    ratings: by mean rating). With "each", there is one row for every answer. With `margin`, the column `margin` has the mean
    strength, or the difference of ratings, which reward-model losses read.
    """
    labels, texts = _load(session, person, project_id, votes)
    return _all(labels, aspect, lambda own: _preference(own, texts, votes, margin))


def _preference(labels: ProjectLabels, texts: LabelTexts, votes: Votes, margin: bool) -> Exported:
    if margin and (labels.kind == "ranking" or (labels.kind == "pair" and not labels.grades)):
        raise Refusal("This project asks for neither strengths nor ratings, so there is no margin; export without it.")
    found = Exported()
    if labels.kind == "pair":
        for task, answers in _ballots(labels, votes):
            _pair(found, labels, texts, task, answers, margin)
    else:
        _converted(found, labels, texts, votes, margin)
    return found


def _all(labels: ProjectLabels, aspect: str, make: Callable[[ProjectLabels], Exported]) -> Exported:
    """Call `make` for one aspect, or for each of them, and return all rows with the counts of items without one."""
    total = Exported()
    for name in aspects.names(labels) if aspect == "each" else [aspect]:
        own = aspects.of_aspect(labels, name)
        if own.kind == "choice":
            raise Refusal(f"{name!r} is a choice among options, which gives no training rows; export all votes instead.")
        found = make(own)
        _unanswered(found, own)
        total.rows += [row | {"criterion": name} for row in found.rows] if name else found.rows
        total.left_out += found.left_out
    return _uniform(total)


@reads
def unpaired(session: Session, person: Person, project_id: int, votes: Votes = "majority", *, aspect: str = "") -> Exported:
    """Return rows with `prompt`, `completion`, `label`, the prompt's own columns and `lineage`, as KTO needs them.

    In a pair, the label of the chosen completion is true and the other's false; if both are bad, both are false. In a ranking,
    the best is true and the worst false. A rated completion is true above the middle of the scale and false below.
    """
    labels, texts = _load(session, person, project_id, votes)
    return _all(labels, aspect, lambda own: _unpaired(own, texts, votes))


def _unpaired(labels: ProjectLabels, texts: LabelTexts, votes: Votes) -> Exported:
    found = Exported()
    for task, answers in _ballots(labels, votes):
        asked = labels.tasks[task]
        for place, label in _thumbs(found, labels, answers, len(asked.completions)):
            completion = asked.completions[place]
            lineage = {"project": labels.project.name, "tasks": [task], "votes": [a.id for a in answers]}
            lineage |= {"completion": texts.origins.get(completion, [])}
            row = _prompt(texts, asked.prompt) | {"completion": texts.completions[completion], "label": label}
            found.rows.append(row | {"lineage": lineage})
    return found


@reads
def dump(session: Session, person: Person, project_id: int) -> list[dict[str, Any]]:
    """Return every vote, skip and undo in order of time, with the person, the time, the display order, and if it is current.

    Each row also has the prompt, and the completions (by place) with their origins.
    """
    project = people.require(session, person, project_id, "results")
    labels = label_data.load(session, project)
    found = label_data.texts(session, project)
    rows = select(Vote, Assignment, User.name).join(Assignment, Vote.assignment_id == Assignment.id)
    rows = rows.join(User, User.id == Vote.user_id).where(Vote.project_id == project.id).order_by(Vote.id)
    return [_dumped(vote, assignment, name, labels, found) for vote, assignment, name in session.execute(rows)]


def lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield rows as lines of JSON, in ASCII."""
    for row in rows:
        yield json.dumps(row, allow_nan=False) + "\n"


def write(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a new JSONL file. Raises `UserError` if the file exists or cannot be written."""
    check_output(str(path))
    try:
        with Path(path).open("w", encoding="ascii") as stream:
            stream.writelines(lines(rows))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def _load(session: Session, person: Person, project_id: int, votes: Votes) -> tuple[ProjectLabels, LabelTexts]:
    if votes not in ("majority", "each"):
        raise Refusal(f"votes is {votes!r}; expected majority or each.")
    project = people.require(session, person, project_id, "results")
    return label_data.load(session, project), label_data.texts(session, project)


def _ballots(labels: ProjectLabels, votes: Votes) -> Iterator[tuple[int, list[CurrentAnswer]]]:
    """Yield (task, answers) for each row to make: with all answers to a task, or with each single answer."""
    for task, answers in sorted(labels.by_task().items()):
        yield from [(task, answers)] if votes == "majority" else [(task, [answer]) for answer in answers]


def _pair(
    found: Exported, labels: ProjectLabels, texts: LabelTexts, task: int, answers: list[CurrentAnswer], margin: bool
) -> None:
    verdict = _majority(answers)
    if verdict not in ("a", "b"):
        found.left_out[verdict] += 1
        return
    asked = labels.tasks[task]
    best, worst = asked.completions if verdict == "a" else asked.completions[::-1]
    row = _prompt(texts, asked.prompt) | {"chosen": texts.completions[best], "rejected": texts.completions[worst]}
    if margin:
        row["margin"] = sum((a.strength or 0) * _sign(a, verdict) for a in answers) / len(answers)
    share = sum(a.choice == verdict for a in answers) / len(answers)
    found.rows.append(row | {"lineage": _lineage(labels, texts, [task], answers, share, best, worst)})


def _sign(answer: CurrentAnswer, verdict: str) -> int:
    return 1 if answer.choice == verdict else -1 if answer.choice in ("a", "b") else 0


def _majority(answers: list[CurrentAnswer]) -> str:
    choice, count = Counter(a.choice for a in answers).most_common(1)[0]
    return str(choice) if 2 * count > len(answers) else "split"


def _converted(found: Exported, labels: ProjectLabels, texts: LabelTexts, votes: Votes, margin: bool) -> None:
    """Add pairs made from rankings and ratings to `found`, by the functions that also convert files of them."""
    ranked = labels.kind == "ranking"
    for asked, completions, values, answers in (_rankings if ranked else _ratings)(labels, votes):
        row = _prompt(texts, asked) | {"completions": [texts.completions[n] for n in completions]}
        name = f"project {labels.project.name!r}"
        if ranked:
            made = conversions.from_rankings([row | {"ranking": values}], name)
        else:
            scale = int(labels.kind.removeprefix("rating-"))
            made = conversions.from_ratings([row | {"ratings": values}], name, scale=scale, margin=margin)
        found.left_out["tie"] += made.ties
        found.left_out["alone"] += made.alone
        number = {completion_groups.digest(texts.completions[n]): n for n in completions}
        for pair in made.rows:
            best, worst = (number[completion_groups.digest(pair[side])] for side in ("chosen", "rejected"))
            tasks = sorted({a.task for a in answers})
            found.rows.append(pair | {"lineage": _lineage(labels, texts, tasks, answers, None, best, worst)})


def _rankings(labels: ProjectLabels, votes: Votes) -> Iterator[tuple[int, list[int], list[float], list[CurrentAnswer]]]:
    """Yield (prompt, completions, mean rank of each, answers)."""
    for task, answers in _ballots(labels, votes):
        asked = labels.tasks[task]
        yield asked.prompt, asked.completions, label_data.mean_ranks(answers, len(asked.completions)), answers


def _ratings(labels: ProjectLabels, votes: Votes) -> Iterator[tuple[int, list[int], list[float], list[CurrentAnswer]]]:
    """Yield (prompt, completions, mean rating of each, answers); with "each", one person's ratings of one prompt."""
    groups: dict[tuple[int, int], dict[int, list[CurrentAnswer]]] = {}
    for answer in labels.answers:
        asked = labels.tasks[answer.task]
        key = (asked.prompt, answer.user if votes == "each" else 0)
        groups.setdefault(key, {}).setdefault(asked.completions[0], []).append(answer)
    for (prompt, _), rated in sorted(groups.items()):
        means = [label_data.mean_rating(answers) for answers in rated.values()]
        yield prompt, list(rated), means, [a for answers in rated.values() for a in answers]


def _thumbs(found: Exported, labels: ProjectLabels, answers: list[CurrentAnswer], items: int) -> list[tuple[int, bool]]:
    """Return (place, label) of the completions that are good or bad according to the answers to one task."""
    kind = labels.kind
    if kind == "pair":
        verdict = _majority(answers)
        if verdict == "both_bad":
            return [(0, False), (1, False)]
        if verdict in ("a", "b"):
            return [(0, verdict == "a"), (1, verdict == "b")]
        found.left_out[verdict] += 1
        return []
    if kind == "ranking":
        mean = label_data.mean_ranks(answers, items)
        if min(mean) == max(mean):
            found.left_out["tie"] += 1
            return []
        labelled = [(place, rank == min(mean)) for place, rank in enumerate(mean) if rank in (min(mean), max(mean))]
        found.left_out["middle"] += items - len(labelled)
        return labelled
    rating = label_data.mean_rating(answers)
    middle = (1 + int(kind.removeprefix("rating-"))) / 2
    if rating == middle:
        found.left_out["middle"] += 1
        return []
    return [(0, rating > middle)]


def _prompt(texts: LabelTexts, prompt: int) -> dict[str, Any]:
    content, columns = texts.prompts[prompt]
    return {"prompt": content, **columns}


def _lineage(
    labels: ProjectLabels,
    texts: LabelTexts,
    tasks: list[int],
    answers: list[CurrentAnswer],
    share: float | None,
    best: int,
    worst: int,
) -> dict[str, Any]:
    return {
        "project": labels.project.name,
        "tasks": tasks,
        "votes": [a.id for a in answers],
        "share": share,
        "chosen": texts.origins.get(best, []),
        "rejected": texts.origins.get(worst, []),
    }


def _unanswered(found: Exported, labels: ProjectLabels) -> None:
    planted = {n for n, task in labels.tasks.items() if task.gold is not None and labels.project.checks}
    answered = {a.task for a in labels.answers}
    skipped = {a.task for a in labels.skips} - answered - planted
    found.left_out["check"] += len(planted)
    found.left_out["skipped"] += len(skipped)
    found.left_out["unanswered"] += len(labels.tasks) - len(planted) - len(answered) - len(skipped)
    found.left_out = +found.left_out


def _uniform(found: Exported) -> Exported:
    """Return the rows with the same columns in the same order, which formats such as Parquet require."""
    names = dict.fromkeys(name for row in found.rows for name in row)
    names = dict.fromkeys([*(name for name in names if name != "lineage"), "lineage"])
    found.rows = [{name: row.get(name) for name in names} for row in found.rows]
    return found


def _dumped(vote: Vote, assignment: Assignment, name: str, labels: ProjectLabels, texts: LabelTexts) -> dict[str, Any]:
    asked, kinds = labels.tasks[assignment.task_id], {question.name: question.kind for question in labels.questions}
    sides = {"ab"[place]: side for place, side in zip(assignment.display, ("left", "right"), strict=True)} if vote.choice else {}
    return {
        "vote": vote.id,
        "task": asked.id,
        "rater": name,
        "action": vote.action,
        "choice": vote.choice,
        "side": sides.get(vote.choice or ""),
        "ranks": vote.ranks,
        "rating": vote.rating,
        "strength": vote.strength,
        "answers": vote.answers and {name: {"kind": kinds[name], **one} for name, one in vote.answers.items()},
        "reason": vote.reason,
        "known": None if asked.gold is None else "ab"[asked.gold],
        "check": asked.gold is not None and bool(labels.project.checks),
        "display": assignment.display,
        "shown_at": _iso(vote.shown_at),
        "decided_at": _iso(vote.decided_at),
        "client_ms": vote.client_ms,
        "undoes": vote.supersedes,
        "stands": assignment.vote_id == vote.id,
        **dict(zip(("prompt", "columns"), texts.prompts[asked.prompt], strict=True)),
        "completions": [{"text": texts.completions[n], "origins": texts.origins.get(n, [])} for n in asked.completions],
    }


def _iso(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
