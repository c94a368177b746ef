"""Consistency checks of the database of labels."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from psigrad_studio.labels.database import reads
from psigrad_studio.labels.schema import Assignment, Seat, Vote


@reads
def faults(session: Session) -> list[str]:
    """Return all inconsistencies with the votes, one sentence each; empty if there are none."""
    found = _damage(session)
    undone = set(session.scalars(select(Vote.supersedes).where(Vote.supersedes.is_not(None))))
    standing: dict[int, list[tuple[int, str]]] = {}
    for number, assignment, action in session.execute(select(Vote.id, Vote.assignment_id, Vote.action).order_by(Vote.id)):
        if action != "undo" and number not in undone:
            standing.setdefault(assignment, []).append((number, action))
    answered: set[tuple[int, int]] = set()
    for row in session.scalars(select(Assignment)):
        mine = standing.get(row.id, [])
        if len(mine) > 1:
            found.append(f"assignment {row.id} has {len(mine)} standing answers")
        if row.vote_id != (mine[-1][0] if mine else None):
            found.append(f"assignment {row.id} points at vote {row.vote_id}, and {mine} stand")
        if mine and mine[-1][1] == "vote":
            answered.add((row.task_id, row.user_id))
    done = Counter((seat.task_id, seat.user_id) for seat in session.scalars(select(Seat).where(Seat.done)))
    found += [f"task {t} has {n} seats done by user {u}" for (t, u), n in done.items() if n > 1]
    found += [f"task {t} is answered by user {u} without a seat" for t, u in sorted(answered - set(done))]
    found += [f"task {t} has a seat done by user {u} without an answer" for t, u in sorted(set(done) - answered)]
    return found


def _damage(session: Session) -> list[str]:
    """Return the results of SQLite's own checks. PostgreSQL enforces its references itself."""
    if session.get_bind().dialect.name != "sqlite":
        return []
    found = [str(row[0]) for row in session.execute(text("PRAGMA integrity_check"))]
    return [line for line in found if line != "ok"] + [str(row) for row in session.execute(text("PRAGMA foreign_key_check"))]
