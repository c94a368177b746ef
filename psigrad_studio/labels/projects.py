"""Projects: questions, overlap and members."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import delete, func, insert, or_, select
from sqlalchemy.orm import Session

from psigrad.errors import nearest
from psigrad_studio.labels import people
from psigrad_studio.labels import questions as own
from psigrad_studio.labels.database import now, reads, writes
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.questions import Question
from psigrad_studio.labels.refusals import Conflict, Missing, Refusal
from psigrad_studio.labels.schema import KINDS, ROLES, Assignment, LabelTask, Membership, Project, Seat, User, Vote

CHANGEABLE = frozenset({"name", "instructions", "overlap", "lease_s", "ties", "both_bad", "strengths", "questions", "checks"})


@dataclass(frozen=True)
class ProjectSettings:
    """The settings of a project: the question that people answer, and how tasks are given out."""

    name: str
    kind: str = "pair"
    """pair, ranking, rating-5 or rating-10."""
    instructions: str = ""
    overlap: int = 1
    """The number of people who answer each task, unless an import overrides it."""
    lease_s: int = 600
    """The seconds for which a task is reserved for the person who was shown it."""
    ties: bool = True
    """True if a tie may be chosen, or ranks may be equal."""
    both_bad: bool = True
    """True if "both bad" may be chosen (pairs)."""
    strengths: int = 0
    """The number of grades, from 1, for how much better the chosen completion is (pairs); 0: people are not asked."""
    seed: int | None = None
    """The seed of the display orders; drawn at random unless given."""
    questions: tuple[Question, ...] = ()
    """Custom questions, asked in this order."""
    overall: bool = True
    """True if the main question, which `kind` defines, is asked. False: only `questions` are asked."""
    checks: int = 10
    """The number of attention checks per hundred shown tasks, if tasks with a known answer were imported.

    With 0, tasks with a known answer are ordinary tasks.
    """

    def __post_init__(self) -> None:
        made = tuple(q if isinstance(q, Question) else Question(**q) for q in self.questions)
        object.__setattr__(self, "questions", made)
        for name, ok, expected in (
            ("name", 1 <= len(self.name.strip()) <= 120 and self.name.isprintable(), "1 to 120 printable characters"),
            ("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}{nearest(self.kind, KINDS)}"),
            ("instructions", len(self.instructions) <= 20_000, "at most 20000 characters"),
            ("overlap", 1 <= self.overlap <= 1000, "1 to 1000"),
            ("lease_s", 10 <= self.lease_s <= 7 * 86_400, "10 seconds to a week"),
            ("strengths", 0 <= self.strengths <= 9, "0 to 9"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "0 to 2^63 - 1"),
            ("checks", 0 <= self.checks <= 50, "0 to 50"),
        ):
            if not ok:
                given = getattr(self, name)
                raise Refusal(f"{name} is {str(given)[:80]!r}; expected {expected}.")
        own.check(self.kind, self.overall, self.questions)


@dataclass(frozen=True)
class ProjectInfo:
    """A project, with the permissions of one person: `may` is a subset of see, results, label and manage."""

    id: int
    settings: ProjectSettings
    created_at: int
    closed_at: int | None
    may: frozenset[str]


@dataclass(frozen=True)
class ProjectProgress:
    """The progress of a project.

    `answered` of `wanted` answers exist. `leased` counts tasks in progress, and `skipped` current skips.
    """

    tasks: int
    wanted: int
    answered: int
    leased: int
    skipped: int
    by_person: dict[str, int]
    """The number of current answers by name."""


@writes
def create(session: Session, person: Person, settings: ProjectSettings) -> int:
    """Create a project with `person` as its admin, and return its number. Raises `Conflict` if the name is taken."""
    return _create(session, person, settings)


def _create(session: Session, person: Person, settings: ProjectSettings) -> int:
    people.require_admin(session, person)
    name = settings.name.strip()
    if session.scalar(select(Project.id).where(Project.name == name)) is not None:
        raise Conflict(f"There is a project {name!r}; choose another name.")
    seed = secrets.randbits(63) if settings.seed is None else settings.seed
    project = Project(**_columns(replace(settings, name=name, seed=seed)), created_at=now(session))
    session.add(project)
    session.flush()
    session.add(Membership(user_id=person.id, project_id=project.id, role="admin", created_at=now(session)))
    people.note(session, person, project.id, "project created")
    return project.id


@reads
def info(session: Session, person: Person, project_id: int) -> ProjectInfo:
    """Return one project. Raises `Missing` if `person` may not see it."""
    project = people.require(session, person, project_id, "see")
    return _info(session, person, project)


@reads
def mine(session: Session, person: Person) -> list[ProjectInfo]:
    """Return every project that `person` may see, oldest first."""
    found = [_info(session, person, project) for project in session.scalars(select(Project).order_by(Project.id))]
    return [each for each in found if each.may]


@writes
def pairs_project(session: Session, person: Person, name: str, instructions: str) -> int:
    """Return the number of the project of pairs with this name, and create it if there is none.

    Raises `Conflict` if it is closed, and an error of `people.require` if `person` may not label in it.
    """
    project = session.scalar(select(Project).where(Project.name == name))
    if project is None:
        return _create(session, person, ProjectSettings(name, instructions=instructions))
    people.require(session, person, project.id, "label")
    if project.closed_at is not None:
        raise Conflict(f"Project {name!r} is closed; ask its admin to open it again.")
    return project.id


@writes
def change(session: Session, person: Person, project_id: int, changes: Mapping[str, Any]) -> None:
    """Change instructions, lease_s, ties, both_bad, strengths, checks or name, raise the overlap, or add or reword questions.

    Existing answers do not change. A higher overlap adds answers to every task that has fewer. A lower overlap is refused, since
    the answers may exist already. A change of `strengths` is refused if an answer already has a strength. With `checks` 0, tasks
    with a known answer become ordinary tasks.
    """
    project = people.require(session, person, project_id, "manage")
    settings = _settings(project)
    if unknown := set(changes) - CHANGEABLE:
        raise Refusal(f"{', '.join(sorted(unknown))} cannot be changed after the project is created; create another project.")
    new = replace(settings, **changes)
    own.changed(settings.questions, new.questions)
    if new.overlap < settings.overlap:
        raise Refusal(f"The overlap is {settings.overlap} and can't be lowered to {new.overlap}; it can only be raised.")
    if settings.strengths not in (0, new.strengths) and _has_strengths(session, project_id):
        raise Refusal(f"There are answers with a strength out of {settings.strengths}; for another scale, create a new project.")
    if session.scalar(select(Project.id).where(Project.name == new.name, Project.id != project_id)) is not None:
        raise Conflict(f"There is a project {new.name!r}; choose another name.")
    for column, value in _columns(new).items():
        setattr(project, column, value)
    if new.checks and not settings.checks:
        _free_known(session, project_id)
    if new.overlap > settings.overlap or (settings.checks and not new.checks):
        _add_seats(session, project_id, new, known_alone=new.overlap == settings.overlap)
    people.note(session, person, project_id, "project changed", **{**changes, "questions": len(new.questions)})


def _has_strengths(session: Session, project_id: int) -> bool:
    """Return True if a current answer has a strength, to the main question or to a custom one."""
    said = select(Vote.strength, Vote.answers).join(Assignment, Assignment.vote_id == Vote.id)
    return any(
        strength is not None or any("strength" in one for one in (answers or {}).values())
        for strength, answers in session.execute(said.where(Vote.project_id == project_id))
    )


def _free_known(session: Session, project_id: int) -> None:
    """Remove the free seats of tasks with a known answer, since an attention check gets a seat when it is shown to a person."""
    known = select(LabelTask.id).where(LabelTask.project_id == project_id, LabelTask.gold.is_not(None))
    free = or_(Seat.lease_until.is_(None), Seat.lease_until <= now(session))
    session.execute(delete(Seat).where(Seat.task_id.in_(known), Seat.done.is_(False), free))


def _add_seats(session: Session, project_id: int, settings: ProjectSettings, *, known_alone: bool) -> None:
    """Add seats up to the overlap to tasks that are not attention checks, or with `known_alone` to tasks with a known answer."""
    tasks = select(LabelTask.id, func.count(Seat.id), func.coalesce(func.max(Seat.turn), 0))
    tasks = tasks.outerjoin(Seat, Seat.task_id == LabelTask.id).where(LabelTask.project_id == project_id)
    if settings.checks or known_alone:
        tasks = tasks.where(LabelTask.gold.is_not(None) if known_alone else LabelTask.gold.is_(None))
    rows = [
        {"project_id": project_id, "task_id": task, "turn": turn, "done": False}
        for task, there, turn in session.execute(tasks.group_by(LabelTask.id).order_by(LabelTask.id))
        for _ in range(settings.overlap - there)
    ]
    if rows:
        session.execute(insert(Seat), rows)


@writes
def close(session: Session, person: Person, project_id: int, closed: bool = True) -> None:
    """Close a project, so that it accepts no answers, or open it again if `closed` is False."""
    project = people.require(session, person, project_id, "manage")
    project.closed_at = (project.closed_at or now(session)) if closed else None
    people.note(session, person, project_id, "project closed" if closed else "project opened")


@reads
def members(session: Session, person: Person, project_id: int) -> list[dict[str, Any]]:
    """Return the members by name: `id`, `name`, `role`, and `disabled`."""
    people.require(session, person, project_id, "manage")
    rows = select(User, Membership.role).join(Membership, Membership.user_id == User.id)
    found = session.execute(rows.where(Membership.project_id == project_id).order_by(User.folded))
    return [{"id": u.id, "name": u.name, "role": role, "disabled": u.disabled_at is not None} for u, role in found]


@writes
def set_role(session: Session, person: Person, project_id: int, user_id: int, role: str | None) -> None:
    """Give a user a role in the project, or remove it (None). Their answers stay."""
    people.require(session, person, project_id, "manage")
    if role is not None and role not in ROLES:
        raise Refusal(f"The role is {role!r}; expected one of {', '.join(ROLES)}{nearest(role, ROLES)}.")
    member = session.get(Membership, (user_id, project_id))
    if session.get(User, user_id) is None or (role is None and member is None):
        raise Missing(f"There is no user {user_id} in this project.")
    if role is None:
        session.delete(member)
    elif member is None:
        session.add(Membership(user_id=user_id, project_id=project_id, role=role, created_at=now(session)))
    else:
        member.role = role
    people.note(session, person, project_id, "role set", user=user_id, role=role)


@reads
def progress(session: Session, person: Person, project_id: int) -> ProjectProgress:
    """Return the progress of a project, counted from the answers."""
    people.require(session, person, project_id, "results")
    in_project = Seat.project_id == project_id
    counted = select(func.count()).select_from(Seat).where(in_project)
    standing = select(Vote.action, User.name, func.count()).join(Assignment, Assignment.vote_id == Vote.id)
    standing = standing.join(User, User.id == Vote.user_id).where(Vote.project_id == project_id)
    rows = session.execute(standing.group_by(Vote.action, User.name).order_by(User.name)).all()
    tasks = select(func.count()).select_from(LabelTask).where(LabelTask.project_id == project_id)
    return ProjectProgress(
        tasks=session.scalar(tasks) or 0,
        wanted=session.scalar(counted) or 0,
        answered=sum(n for action, _, n in rows if action == "vote"),
        leased=session.scalar(counted.where(Seat.done.is_(False), Seat.lease_until > now(session))) or 0,
        skipped=sum(n for action, _, n in rows if action == "skip"),
        by_person={name: n for action, name, n in rows if action == "vote"},
    )


def _info(session: Session, person: Person, project: Project) -> ProjectInfo:
    may = frozenset(people.actions(session, person, project.id))
    return ProjectInfo(project.id, _settings(project), project.created_at, project.closed_at, may)


def _settings(project: Project) -> ProjectSettings:
    return ProjectSettings(
        name=project.name,
        kind=project.kind,
        instructions=project.instructions,
        overlap=project.overlap,
        lease_s=project.lease_ms // 1000,
        ties=project.ties,
        both_bad=project.both_bad,
        strengths=project.strengths,
        seed=project.seed,
        questions=tuple(Question(**one) for one in project.questions or ()),
        overall=project.overall is not False,
        checks=project.checks or 0,
    )


def _columns(settings: ProjectSettings) -> dict[str, Any]:
    same = {name: value for name, value in vars(settings).items() if name != "lease_s"}
    return same | {"lease_ms": settings.lease_s * 1000, "questions": [asdict(question) for question in settings.questions]}
