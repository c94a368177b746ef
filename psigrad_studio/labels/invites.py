"""Invite links. There is no default account or password. `first` creates the link for the first administrator."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from psigrad_studio.labels import passwords, people
from psigrad_studio.labels.database import Database, now, reads, writes
from psigrad_studio.labels.people import HOUR, Login, Person
from psigrad_studio.labels.refusals import Conflict, Missing, Refusal
from psigrad_studio.labels.schema import ROLES, Invite, Membership, Project, User

LASTS = 7 * 24 * HOUR


@dataclass(frozen=True)
class Invitation:
    """The content of an invite link: the role, the project (None: the whole studio), and the expiry."""

    role: str
    project: str | None
    expires_at: int


@writes
def first(session: Session) -> str:
    """Return the token of a link for the first administrator, and revoke earlier ones.

    Raises `Conflict` if somebody can already log in.
    """
    if session.scalar(select(User.id).where(User.password_hash.is_not(None)).limit(1)) is not None:
        raise Conflict("This studio has an administrator already; ask them for an invite.")
    open_ones = update(Invite).where(Invite.created_by.is_(None), Invite.accepted_at.is_(None), Invite.revoked_at.is_(None))
    session.execute(open_ones.values(revoked_at=now(session)))
    return _make(session, None, None, "admin", LASTS)


@writes
def invite(session: Session, person: Person, project_id: int | None, role: str, lasts_ms: int = LASTS) -> str:
    """Return the token of a link that one person may use once. Without a project, that person becomes a studio administrator.

    Raises `Forbidden` if `person` does not manage the project.
    """
    if role not in ROLES or (project_id is None and role != "admin"):
        raise Refusal(f"The role is {role!r}; expected one of {', '.join(ROLES)} (without a project, only admin).")
    if project_id is None:
        people.require_admin(session, person)
    else:
        people.require(session, person, project_id, "manage")
    return _make(session, person, project_id, role, lasts_ms)


def _make(session: Session, person: Person | None, project_id: int | None, role: str, lasts_ms: int) -> str:
    token, at = passwords.token("invite"), now(session)
    row = Invite(
        project_id=project_id,
        role=role,
        token_hash=passwords.hash_token(token),
        created_by=person.id if person else None,
        created_at=at,
        expires_at=at + lasts_ms,
    )
    session.add(row)
    session.flush()
    people.note(session, person, project_id, "invited", invite=row.id, role=role)
    return token


@reads
def look(session: Session, token: str) -> Invitation:
    """Return the content of an invite link. Raises `Missing` if it is used, revoked or expired."""
    row = _open(session, token)
    project = session.get(Project, row.project_id) if row.project_id is not None else None
    return Invitation(row.role, project.name if project else None, row.expires_at)


@reads
def pending(session: Session, person: Person, project_id: int) -> list[dict[str, object]]:
    """Return the links of a project that can still be used, without their tokens."""
    people.require(session, person, project_id, "manage")
    rows = select(Invite).where(Invite.project_id == project_id, Invite.accepted_at.is_(None), Invite.revoked_at.is_(None))
    found = session.scalars(rows.where(Invite.expires_at > now(session)).order_by(Invite.id))
    return [{"id": row.id, "role": row.role, "created_at": row.created_at, "expires_at": row.expires_at} for row in found]


@writes
def revoke(session: Session, person: Person, invite_id: int) -> None:
    """Revoke a link. Raises `Missing` if no link has that number, or `person` may not revoke it."""
    row = session.get(Invite, invite_id)
    if row is None:
        raise Missing(f"There is no invite {invite_id}.")
    if row.project_id is None:
        people.require_admin(session, person)
    else:
        people.require(session, person, row.project_id, "manage")
    row.revoked_at = row.revoked_at or now(session)
    people.note(session, person, row.project_id, "invite revoked", invite=invite_id)


def accept(database: Database, token: str, name: str, password: str) -> Login:
    """Create a user by a link, and log them in. Raises `Missing` if the link is used up, `Conflict` if the name is taken."""
    look(database, token)
    return _accept(database, token, name, passwords.hash_password(password, name=name))


@writes
def _accept(session: Session, token: str, name: str, hashed: str) -> Login:
    row = _open(session, token)
    user = people.new_user(session, name, hashed)
    _use(session, row, user)
    return people.open_session(session, user)


@writes
def join(session: Session, person: Person, token: str) -> int | None:
    """Use a link as an existing user, and return the project. A higher role in the project is kept."""
    row = _open(session, token)
    _use(session, row, session.get_one(User, person.id))
    return row.project_id


def _use(session: Session, row: Invite, user: User) -> None:
    at = now(session)
    # One statement, so that only one of two simultaneous users succeeds.
    taken = update(Invite).where(Invite.id == row.id, Invite.accepted_at.is_(None)).values(accepted_by=user.id, accepted_at=at)
    if session.execute(taken.returning(Invite.id)).all() == []:
        raise Missing("This invite has been used; ask for a new one.")
    if row.project_id is None:
        user.admin = True
    else:
        member = session.get(Membership, (user.id, row.project_id))
        if member is None:
            session.add(Membership(user_id=user.id, project_id=row.project_id, role=row.role, created_at=at))
        elif ROLES.index(member.role) < ROLES.index(row.role):
            member.role = row.role
    people.note(session, Person(user.id, user.name), row.project_id, "invite accepted", invite=row.id, role=row.role)


def _open(session: Session, token: str) -> Invite:
    row = session.scalar(select(Invite).where(Invite.token_hash == passwords.hash_token(token)))
    if row is None or row.accepted_at is not None or row.revoked_at is not None or row.expires_at <= now(session):
        raise Missing("This invite is unknown, used or expired; ask for a new one.")
    return row
