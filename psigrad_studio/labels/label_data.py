"""The current answers of a project with their tasks: the input of results and exports. Answers taken back are not current."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from psigrad_studio.labels.questions import Question
from psigrad_studio.labels.schema import (
    Assignment,
    LabelTask,
    Origin,
    Project,
    Seat,
    StoredCompletion,
    StoredPrompt,
    TaskItem,
    User,
    Vote,
)

_WHOLE, _REAL = ("step", "row", "k", "version", "seed"), ("reward", "advantage")
_TEXT = ("run", "kind", "finish_reason", "status", "sampler", "source")


@dataclass(frozen=True)
class CurrentAnswer:
    """One answer (`action` vote) or skip that was not taken back. `display[i]` is the place of the item shown i-th.

    `answers` are those to the custom questions. `ratings`, by place, are set if the labels are those of a rated aspect.
    """

    id: int
    task: int
    user: int
    action: str
    choice: str | None
    ranks: list[int] | None
    rating: int | None
    strength: float | None
    answers: dict[str, Any] | None
    display: list[int]
    ratings: list[int] | None = None


@dataclass(frozen=True)
class TaskSummary:
    """A task: its prompt, and its completions by place. `seats` is the number of answers wanted."""

    id: int
    prompt: int
    completions: list[int]
    gold: int | None
    seats: int


@dataclass(frozen=True)
class ProjectLabels:
    """The tasks, answers, skips and names of a project.

    `checks` are the answers to attention checks, if the project uses them; `answers` does not contain them. `kind` and `grades`
    (of strength) determine the meaning of the answers.
    """

    project: Project
    kind: str
    grades: int
    overall: bool
    questions: list[Question]
    tasks: dict[int, TaskSummary]
    answers: list[CurrentAnswer]
    checks: list[CurrentAnswer]
    skips: list[CurrentAnswer]
    names: dict[int, str]
    """The names of people, by number."""

    def by_task(self) -> dict[int, list[CurrentAnswer]]:
        """Return the answers to each task that has any."""
        found: dict[int, list[CurrentAnswer]] = {}
        for answer in self.answers:
            found.setdefault(answer.task, []).append(answer)
        return found


@dataclass(frozen=True)
class LabelTexts:
    """Prompts, completions and their origins, by number."""

    prompts: dict[int, tuple[Any, dict[str, Any]]]
    """The content and the dataset columns of each prompt."""
    completions: dict[int, Any]
    origins: dict[int, list[dict[str, Any]]] = field(default_factory=dict)


def load(session: Session, project: Project) -> ProjectLabels:
    """Return the labels of a project in this transaction."""
    items: dict[int, list[int]] = {}
    places = select(TaskItem.task_id, TaskItem.completion_id).join(LabelTask).where(LabelTask.project_id == project.id)
    for task, completion in session.execute(places.order_by(TaskItem.task_id, TaskItem.place)):
        items.setdefault(task, []).append(completion)
    counted = select(Seat.task_id, func.count()).where(Seat.project_id == project.id).group_by(Seat.task_id)
    seats = dict(session.execute(counted).all())
    rows = session.execute(
        select(LabelTask.id, LabelTask.prompt_id, LabelTask.gold).where(LabelTask.project_id == project.id).order_by(LabelTask.id)
    )
    tasks = {n: TaskSummary(n, prompt, items[n], gold, seats.get(n, 0)) for n, prompt, gold in rows}
    columns = (Vote.id, Assignment.task_id, Vote.user_id, Vote.action)
    said = (Vote.choice, Vote.ranks, Vote.rating, Vote.strength, Vote.answers)
    votes = select(*columns, *said, Assignment.display).join(Assignment, Assignment.vote_id == Vote.id)
    found = [CurrentAnswer(*row) for row in session.execute(votes.where(Vote.project_id == project.id).order_by(Vote.id))]
    names = dict(session.execute(select(User.id, User.name).where(User.id.in_({s.user for s in found}))).all())
    votes_, skips = ([s for s in found if s.action == action] for action in ("vote", "skip"))
    planted = {n for n, task in tasks.items() if task.gold is not None and project.checks}
    answers, checks = ([s for s in votes_ if (s.task in planted) is known] for known in (False, True))
    own = [Question(**one) for one in project.questions or ()]
    return ProjectLabels(
        project, project.kind, project.strengths, project.overall is not False, own, tasks, answers, checks, skips, names
    )


def texts(session: Session, project: Project) -> LabelTexts:
    """Return the prompts and completions of a project, with their origins."""
    prompts = session.execute(
        select(StoredPrompt.id, StoredPrompt.content, StoredPrompt.columns).where(StoredPrompt.project_id == project.id)
    )
    of_project = (
        select(StoredCompletion.id, StoredCompletion.content).join(StoredPrompt).where(StoredPrompt.project_id == project.id)
    )
    found = LabelTexts({n: (content, columns) for n, content, columns in prompts}, dict(session.execute(of_project).all()))
    found.origins.update(origins(session, project))
    return found


def origins(session: Session, project: Project) -> dict[int, list[dict[str, Any]]]:
    """Return the origins of each completion.

    A text that was sampled twice has several origins. All origins have the same keys.
    """
    rows = (
        select(Origin.completion_id, Origin.about)
        .join(StoredCompletion)
        .join(StoredPrompt)
        .where(StoredPrompt.project_id == project.id)
    )
    found: dict[int, list[dict[str, Any]]] = {}
    for completion, about in session.execute(rows.order_by(Origin.id)):
        found.setdefault(completion, []).append(_uniform(about))
    return found


def _uniform(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with one type for each key, or null, since each column of a table has one type."""
    row: dict[str, Any] = {name: str(about[name]) if name in about else None for name in _TEXT}
    for name in _WHOLE:
        value = about.get(name)
        row[name] = value if type(value) is int and abs(value) < 2**63 else None
    for name in _REAL:
        value = about.get(name)
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        row[name] = float(value) if real else None  # type: ignore[arg-type]
    return row


def mean_rating(answers: Iterable[CurrentAnswer]) -> float:
    """Return the mean rating of one item, rounded, so that equal means computed from different ratings are equal."""
    ratings = [answer.rating or 0 for answer in answers]
    return round(sum(ratings) / len(ratings), 9)


def mean_ranks(answers: Iterable[CurrentAnswer], items: int) -> list[float]:
    """Return the mean rank of each item over all answers."""
    ranks = [answer.ranks or [] for answer in answers]
    return [sum(r[place] for r in ranks) / len(ranks) for place in range(items)]
