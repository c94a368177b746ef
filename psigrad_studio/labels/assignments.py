"""Assignments: leasing a task to a person, and storing the answer.

A task has a seat for each answer that it needs. Nobody sees the origin of a completion or the answers of others. Leases expire by
the clock alone; no clean-up is needed. Each answer, skip and undo has a key chosen by the client. A repeated call with the same
key returns the same receipt and stores nothing new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import and_, exists, func, or_, select, update
from sqlalchemy.orm import Session

from psigrad import seeds
from psigrad.errors import nearest
from psigrad_studio.labels import people, questions
from psigrad_studio.labels.database import now, reads, writes
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.questions import Question
from psigrad_studio.labels.refusals import Conflict, Missing, Refusal
from psigrad_studio.labels.schema import (
    Assignment,
    LabelTask,
    Project,
    Seat,
    StoredCompletion,
    StoredPrompt,
    TaskItem,
    User,
    Vote,
)

CHOICES = ("left", "right", "tie", "both_bad")
LONGEST_REASON = 10_000


@dataclass(frozen=True)
class ShownTask:
    """A task as it is displayed: the completions in the order drawn for this person, and nothing that identifies them.

    `lease_until` is in milliseconds since 1970 UTC.
    """

    assignment: int
    kind: str
    prompt: Any
    completions: list[Any]
    lease_until: int


@dataclass(frozen=True)
class LabelAnswer:
    """An answer as the page sends it, with sides and order as displayed.

    `choice` is for a pair, `ranks` (one for each completion, in display order, 1 is best) for a ranking, `rating` for a rating.
    `answers` are those to the custom questions by name, each an object with `value` (left, right or tie; a list of ratings in
    display order; an option; a text), `strength` and `reason`. `client_ms` is the time that the page measured.
    """

    choice: str | None = None
    ranks: tuple[int, ...] | None = None
    rating: int | None = None
    strength: int | None = None
    reason: str | None = None
    client_ms: int | None = None
    answers: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Receipt:
    """The receipt of a stored row: its number, and the time. `undone` is the number of the row that an undo took back."""

    vote: int
    assignment: int
    action: str
    decided_at: int
    undone: int | None = None


@writes
def next_task(session: Session, person: Person, project_id: int) -> ShownTask | None:
    """Lease a task to a person, and return it: their current task, or a new one that they have not answered.

    Return None if there is no task for them now: all are answered, skipped by them, or leased to others. Raises `Conflict` if the
    project is closed.
    """
    project = _open_project(session, person, project_id)
    seat = _held(session, person, project) or _check(session, person, project) or _free(session, person, project)
    if seat is None:
        return None
    return _show(session, project, _assign(session, person, project, seat), seat)


def _open_project(session: Session, person: Person, project_id: int) -> Project:
    project = _locked_project(session, person, project_id)
    _must_be_open(project)
    return project


def _locked_project(session: Session, person: Person, project_id: int) -> Project:
    """Return the project, and lock the person's row, so that two calls of one person run one after the other."""
    project = people.require(session, person, project_id, "label")
    session.execute(select(User.id).where(User.id == person.id).with_for_update(key_share=True))
    return project


def _held(session: Session, person: Person, project: Project) -> Seat | None:
    """Return the seat that is leased to the person, with its lease renewed; the latest if there are several; None without."""
    mine = select(Seat.id).where(Seat.user_id == person.id, Seat.project_id == project.id, Seat.done.is_(False))
    mine = mine.order_by(Seat.lease_until.desc(), Seat.id).limit(1).with_for_update(skip_locked=True)
    return _take(session, person, project, mine)


def _check(session: Session, person: Person, project: Project) -> Seat | None:
    """Return a new seat at a task with a known answer (an attention check), if one is due; otherwise None.

    A random draw for each person decides if it is due, so that nobody can predict it. If the project has only such tasks, all of
    them are given, one after the other.
    """
    if not project.checks:
        return None
    met = select(Assignment.task_id).where(Assignment.user_id == person.id, Assignment.project_id == project.id)
    of_project = select(LabelTask.id).where(LabelTask.project_id == project.id)
    count = session.scalar(select(func.count()).select_from(met.subquery())) or 0
    drawn = 100 * seeds.derive(project.seed, "check", person.id, count) / 2**63
    if drawn >= project.checks and session.scalar(of_project.where(LabelTask.gold.is_(None)).limit(1)) is not None:
        return None
    task = session.scalar(of_project.where(LabelTask.gold.is_not(None), LabelTask.id.not_in(met)).order_by(LabelTask.id).limit(1))
    if task is None:
        return None
    until = now(session) + project.lease_ms
    seat = Seat(project_id=project.id, task_id=task, turn=0, user_id=person.id, lease_until=until, done=False)
    session.add(seat)
    session.flush()
    return seat


def _free(session: Session, person: Person, project: Project, task_id: int | None = None) -> Seat | None:
    """Return a free seat at a task (or at `task_id`) to which the person has no current answer."""
    free = [Seat.project_id == project.id, Seat.done.is_(False)]
    free.append(or_(Seat.lease_until.is_(None), Seat.lease_until <= now(session)))
    if task_id is None:
        theirs = and_(Assignment.task_id == Seat.task_id, Assignment.user_id == person.id, Assignment.vote_id.is_not(None))
        free.append(~exists().where(theirs))
    else:
        free.append(Seat.task_id == task_id)
    one = select(Seat.id).where(*free).order_by(Seat.turn, Seat.id).limit(1)
    return _take(session, person, project, one.with_for_update(skip_locked=True))


def _take(session: Session, person: Person, project: Project, which: Any) -> Seat | None:
    until = now(session) + project.lease_ms
    lease = update(Seat).where(Seat.id == which.scalar_subquery()).values(user_id=person.id, lease_until=until)
    found = session.scalars(lease.returning(Seat), execution_options={"populate_existing": True}).all()
    return found[0] if found else None


def _assign(session: Session, person: Person, project: Project, seat: Seat) -> Assignment:
    row = session.scalar(select(Assignment).where(Assignment.task_id == seat.task_id, Assignment.user_id == person.id))
    if row is None:
        places = session.scalars(select(TaskItem.place).where(TaskItem.task_id == seat.task_id)).all()
        order = seeds.permutation(len(places), project.seed, "display", seat.task_id, person.id).tolist()
        row = Assignment(project_id=project.id, task_id=seat.task_id, user_id=person.id, display=order)
        session.add(row)
    row.shown_at = now(session)
    session.flush()
    return row


def _show(session: Session, project: Project, assignment: Assignment, seat: Seat) -> ShownTask:
    task = session.get_one(LabelTask, assignment.task_id)
    items = select(TaskItem.place, StoredCompletion.content).join(StoredCompletion, StoredCompletion.id == TaskItem.completion_id)
    content: dict[int, Any] = dict(session.execute(items.where(TaskItem.task_id == task.id)).all())
    shown = [content[place] for place in assignment.display]
    prompt = session.get_one(StoredPrompt, task.prompt_id).content
    return ShownTask(assignment.id, project.kind, prompt, shown, seat.lease_until or 0)


@writes
def renew(session: Session, person: Person, assignment_id: int) -> int:
    """Renew the lease of a task, and return its new end. Raises `Conflict` if it went to another person or is answered."""
    assignment, project = _mine(session, person, assignment_id)
    until = now(session) + project.lease_ms
    if not _hold(session, person, assignment, lease_until=until):
        raise _lost(assignment)
    return until


@writes
def vote(session: Session, person: Person, assignment_id: int, answer: LabelAnswer, key: str) -> Receipt:
    """Store an answer. It is on the disk when this returns.

    An expired lease still counts if nobody else took the task. Raises `Conflict` if somebody did, if the person has already
    answered (undo first), and if `key` was used for another call.
    """
    assignment, project = _mine(session, person, assignment_id)
    # Without the measured time, since a page that repeats a call may have measured another one.
    digest = _digest("vote", assignment_id, _said(replace(answer, client_ms=None)))
    if (old := _repeated(session, person, key, digest)) is not None:
        return old
    _must_be_open(project)
    stored = _canonical(project, answer, assignment.display) | _aside(answer.reason, answer.client_ms)
    if not _finish(session, person, project, assignment):
        raise _lost(assignment)
    return _store(session, assignment, key, digest, "vote", stored)


@writes
def skip(session: Session, person: Person, assignment_id: int, key: str, reason: str | None = None) -> Receipt:
    """Skip a task, which is then left to others. It is not shown to this person again unless they undo the skip."""
    assignment, project = _mine(session, person, assignment_id)
    digest = _digest("skip", assignment_id, reason)
    if (old := _repeated(session, person, key, digest)) is not None:
        return old
    _must_be_open(project)
    if not _hold(session, person, assignment, user_id=None, lease_until=None):
        raise _lost(assignment)
    return _store(session, assignment, key, digest, "skip", _aside(reason, None))


@writes
def record(session: Session, person: Person, task_id: int, display: Sequence[int], answer: LabelAnswer, key: str) -> Receipt:
    """Store an answer to a task that another page showed. `display` are the places of the completions, in the order shown.

    If the task was shown to the person before, the order drawn then stays, and the choice is converted to it. Raises `Conflict`
    if the person has already answered the task, or if it is leased to somebody else.
    """
    task = session.get(LabelTask, task_id)
    if task is None:
        raise Missing(f"There is no task {task_id}.")
    project = _open_project(session, person, task.project_id)
    digest = _digest("record", task_id, [list(display), _said(answer)])
    if (old := _repeated(session, person, key, digest)) is not None:
        return old
    row = session.scalar(select(Assignment).where(Assignment.task_id == task_id, Assignment.user_id == person.id))
    row = row or Assignment(project_id=project.id, task_id=task_id, user_id=person.id, display=list(display))
    if not _finish(session, person, project, row):
        raise Conflict("These completions were compared before, or somebody else is comparing them now, so nothing was stored.")
    row.shown_at = now(session)
    session.add(row)
    session.flush()
    # Another page asks only the main question.
    stored = _canonical(project, answer, list(display), whole=False) | _aside(answer.reason, answer.client_ms)
    return _store(session, row, key, digest, "vote", stored)


@writes
def undo(session: Session, person: Person, project_id: int, key: str, only: int | None = None) -> Receipt:
    """Take back the person's last current answer or skip in a project. `next_task` then returns that task to them again.

    Another call with a new key undoes the previous one. If `only` is the number of a vote, only that vote is taken back. Raises
    `Conflict` if there is nothing to take back, or if the skipped task is now leased to somebody else.
    """
    project = _locked_project(session, person, project_id)
    digest = _digest("undo", project_id, None)
    if (old := _repeated(session, person, key, digest)) is not None:
        return old
    _must_be_open(project)
    last = select(Assignment).where(Assignment.user_id == person.id, Assignment.project_id == project_id)
    assignment = session.scalar(last.where(Assignment.vote_id.is_not(None)).order_by(Assignment.vote_id.desc()).limit(1))
    if assignment is None:
        raise Conflict("There is nothing to undo.")
    if only is not None and assignment.vote_id != only:
        raise Conflict("You have answered another task since; undo the newer answer first.")
    undone = session.get_one(Vote, assignment.vote_id)
    until = now(session) + project.lease_ms
    if undone.action == "vote":
        back = _hold(session, person, assignment, was_done=True, done=False, lease_until=until)
    else:
        back = _free(session, person, project, assignment.task_id) is not None
    if not back:
        raise Conflict("Somebody else has the task that you skipped, so you cannot undo the skip.")
    return _store(session, assignment, key, digest, "undo", {"supersedes": undone.id})


@reads
def mine(session: Session, person: Person, project_id: int) -> dict[str, int]:
    """Return the number of current answers and skips of this person in a project."""
    people.require(session, person, project_id, "label")
    rows = select(Vote.action).join(Assignment, Assignment.vote_id == Vote.id)
    found = session.scalars(rows.where(Vote.user_id == person.id, Vote.project_id == project_id)).all()
    return {"answered": found.count("vote"), "skipped": found.count("skip")}


@reads
def left(session: Session, person: Person, project_id: int) -> int:
    """Return the number of tasks that `next_task` could give this person now."""
    people.require(session, person, project_id, "label")
    theirs = and_(Assignment.task_id == Seat.task_id, Assignment.user_id == person.id, Assignment.vote_id.is_not(None))
    free = or_(Seat.lease_until.is_(None), Seat.lease_until <= now(session), Seat.user_id == person.id)
    tasks = select(func.count(Seat.task_id.distinct())).where(Seat.project_id == project_id, Seat.done.is_(False), free)
    return session.scalar(tasks.where(~exists().where(theirs))) or 0


def _mine(session: Session, person: Person, assignment_id: int) -> tuple[Assignment, Project]:
    assignment = session.get(Assignment, assignment_id)
    if assignment is None or assignment.user_id != person.id:
        raise Missing(f"There is no task {assignment_id} that was shown to {person.name!r}.")
    project = _locked_project(session, person, assignment.project_id)
    session.refresh(assignment)
    return assignment, project


def _must_be_open(project: Project) -> None:
    if project.closed_at is not None:
        raise Conflict(f"Project {project.name!r} is closed; ask its admin to open it again.")


def _hold(session: Session, person: Person, assignment: Assignment, *, was_done: bool = False, **values: Any) -> bool:
    """Set these columns of the person's seat at the task. Return False if they have none."""
    seat = update(Seat).where(Seat.task_id == assignment.task_id, Seat.user_id == person.id, Seat.done.is_(was_done))
    return bool(session.execute(seat.values(**values).returning(Seat.id)).all())


def _finish(session: Session, person: Person, project: Project, assignment: Assignment) -> bool:
    """Mark the person's seat at the task as done. If it went to somebody else, use a free one; return False if there is none."""
    done: dict[str, Any] = {"done": True, "lease_until": None}
    if _hold(session, person, assignment, **done):
        return True
    if assignment.vote_id is not None or _free(session, person, project, assignment.task_id) is None:
        return False
    return _hold(session, person, assignment, **done)


def _lost(assignment: Assignment) -> Conflict:
    if assignment.vote_id is not None:
        return Conflict("You have answered or skipped this task; undo that first.")
    return Conflict("The time for this task ran out, and somebody else has it now; continue with the next task.")


def _repeated(session: Session, person: Person, key: str, digest: str) -> Receipt | None:
    """Return the receipt of an earlier call with the same key. Raises `Conflict` if that was a different call."""
    if not 8 <= len(key) <= 200 or not key.isascii() or not key.isprintable():
        raise Refusal("The key of a submission must have 8 to 200 ASCII characters, such as a random UUID.")
    row = session.scalar(select(Vote).where(Vote.user_id == person.id, Vote.key == key))
    if row is None:
        return None
    if row.digest != digest:
        raise Conflict("This key was used for another submission; send a new key with each submission.")
    return _receipt(row)


def _store(session: Session, assignment: Assignment, key: str, digest: str, action: str, columns: dict[str, Any]) -> Receipt:
    row = Vote(
        project_id=assignment.project_id,
        assignment_id=assignment.id,
        user_id=assignment.user_id,
        key=key,
        digest=digest,
        action=action,
        shown_at=assignment.shown_at,
        decided_at=now(session),
        **columns,
    )
    session.add(row)
    session.flush()
    assignment.vote_id = None if action == "undo" else row.id
    return _receipt(row)


def _receipt(row: Vote) -> Receipt:
    return Receipt(row.id, row.assignment_id, row.action, row.decided_at, row.supersedes)


def _said(answer: LabelAnswer) -> dict[str, Any]:
    """Return an answer as JSON, from which its digest is computed.

    Empty `answers` are omitted, so that digests are the same as in versions without this field.
    """
    return {name: value for name, value in asdict(answer).items() if name != "answers" or value}


def _digest(action: str, of: int, what: object) -> str:
    return hashlib.sha256(json.dumps([action, of, what], sort_keys=True).encode()).hexdigest()


def _aside(reason: str | None, client_ms: int | None) -> dict[str, Any]:
    if reason is not None and len(reason) > LONGEST_REASON:
        raise Refusal(f"The reason has {len(reason)} characters; at most {LONGEST_REASON} are allowed.")
    if client_ms is not None and not 0 <= client_ms < 2**53:
        raise Refusal(f"client_ms is {client_ms}; expected milliseconds, 0 or more.")
    return {"reason": reason or None, "client_ms": client_ms}


def _canonical(project: Project, answer: LabelAnswer, display: list[int], *, whole: bool = True) -> dict[str, Any]:
    """Return the database columns of an answer, with displayed sides converted to places.

    Raises `Refusal` if the answer does not fit the questions.
    """
    main = _main(project, answer, display, asked=project.overall is not False)
    asked = [Question(**one) for one in project.questions or ()]
    own = questions.stored(asked, project.strengths, answer.answers or {}, display, whole=whole)
    if not main and own is None:
        raise Refusal("None of the questions is answered; answer one, or skip the task.")
    return main | {"answers": own}


def _main(project: Project, answer: LabelAnswer, display: list[int], *, asked: bool) -> dict[str, Any]:
    wanted = {"pair": "choice", "ranking": "ranks"}.get(project.kind, "rating") if asked else None
    given = [name for name in ("choice", "ranks", "rating") if getattr(answer, name) is not None]
    if given != ([wanted] if wanted else []):
        only = wanted or "answers to its own questions"
        raise Refusal(f"The answer has {' and '.join(given) or 'nothing'}; expected only {only}.")
    if wanted != "choice":
        _check_strength(answer, 0, decided=False)
    if wanted is None:
        return {}
    if wanted == "ranks":
        return {"ranks": _places(project, answer.ranks or (), display)}
    if wanted == "rating":
        top = int(project.kind.removeprefix("rating-"))
        if not 1 <= (answer.rating or 0) <= top:
            raise Refusal(f"The rating is {answer.rating}; expected 1 to {top}.")
        return {"rating": answer.rating}
    allowed = [c for c in CHOICES if (c != "tie" or project.ties) and (c != "both_bad" or project.both_bad)]
    choice = answer.choice or ""
    if choice not in allowed:
        raise Refusal(f"The choice is {choice[:40]!r}; expected one of {', '.join(allowed)}{nearest(choice, allowed)}.")
    _check_strength(answer, project.strengths, decided=choice in ("left", "right"))
    chosen = "ab"[display[CHOICES.index(choice)]] if choice in ("left", "right") else choice
    return {"choice": chosen, "strength": answer.strength}


def _check_strength(answer: LabelAnswer, grades: int, *, decided: bool) -> None:
    if answer.strength is None:
        return
    if not grades or not decided or not 1 <= answer.strength <= grades:
        expected = f"1 to {grades}, together with a chosen side" if grades else "none in this project"
        raise Refusal(f"The strength is {answer.strength}; expected {expected}.")


def _places(project: Project, ranks: tuple[int, ...], display: list[int]) -> list[int]:
    """Return ranks from 1, indexed by place. Equal items share a rank, and the next rank is 1 + the number of better items."""
    better = [1 + sum(other < rank for other in ranks) for rank in ranks]
    if len(ranks) != len(display) or list(ranks) != better:
        raise Refusal(
            f"The ranks are {list(ranks)[:20]}; expected {len(display)} ranks from 1, as in 1, 2, 2, 4 where two are equal."
        )
    if not project.ties and len(set(ranks)) < len(ranks):
        raise Refusal(f"The ranks are {list(ranks)[:20]}; this project takes no equal ranks.")
    by_place = [0] * len(display)
    for place, rank in zip(display, ranks, strict=True):
        by_place[place] = rank
    return by_place
