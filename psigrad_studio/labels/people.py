"""Users, logins, sessions, API tokens and roles: identity and permissions. `invites` adds people.

A viewer may see results. A labeller may label, and sees only their own answers. An admin of a project may do both, and manages
it. An administrator of the studio (`admin`) is an admin of every project.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from psigrad_studio.labels import passwords
from psigrad_studio.labels.database import Database, now, reads, writes
from psigrad_studio.labels.refusals import Conflict, Forbidden, Missing, Refusal, TooMany, Unknown
from psigrad_studio.labels.schema import ROLES, ApiToken, Audit, LoginFailure, LoginSession, Membership, Project, User

MAY = {"viewer": {"see", "results"}, "labeller": {"see", "label"}, "admin": {"see", "results", "label", "manage"}}
LOCAL = "local"
HOUR = 3_600_000
SESSION_FOR, SESSION_IDLE = 30 * 24 * HOUR, 24 * HOUR
SEEN_EVERY = 60_000
FAILURES, FAILURES_WITHIN = 10, HOUR // 4
# Latin, Cyrillic and Greek letters and digits -> the letter that they resemble: the most common of Unicode's confusables.
_CAPITALS = str.maketrans("IІΙӀ1|0", "llllllo")
_ALIKE = str.maketrans("аеорсухіјѕһԁԛԝӏѵкмтвнгпαορνυχικτηωγϲϳıɩɡɑ", "aeopcyxijshdqwlvkmtbhrnaopvuxiktnwycjiiga")
# The prefixes of keys under which failures are counted, besides names, which have no such characters.
_DEVICE, _CHANGE = "\x01device", "\x01change"


@dataclass(frozen=True)
class Person:
    """The person on whose behalf a function is called.

    If it is a program with a token, it may do no more than `role`, and nothing outside `project_id` if that is set.
    """

    id: int
    name: str
    admin: bool = False
    role: str = "admin"
    project_id: int | None = None


@dataclass(frozen=True)
class Login:
    """A new session: the token for the cookie, the secret that its pages send, and its end (milliseconds since 1970 UTC)."""

    person: Person
    token: str = field(repr=False)
    csrf: str = field(repr=False)
    expires_at: int
    device: str = field(default="", repr=False)
    """The value that the browser sends at the next login. It is valid until the password is changed."""


def actions(session: Session, person: Person, project_id: int) -> set[str]:
    """Return the permissions of a person in a project: a subset of see, results, label and manage."""
    user = session.get(User, person.id)
    if user is None or user.disabled_at is not None or person.project_id not in (None, project_id):
        return set()
    member = session.get(Membership, (person.id, project_id))
    role = "admin" if user.admin else member.role if member else ""
    return MAY.get(role, set()) & MAY[person.role]


def require(session: Session, person: Person, project_id: int, action: str) -> Project:
    """Return the project, if `person` may do `action` there. Raises `Missing` if they may not see it, otherwise `Forbidden`."""
    allowed = actions(session, person, project_id)
    project = session.get(Project, project_id) if "see" in allowed else None
    if project is None:
        raise Missing(f"There is no project {project_id} that {person.name!r} belongs to; ask its admin for an invite.")
    if action not in allowed:
        words = {"label": "label", "results": "see the results", "manage": "manage it"}
        raise Forbidden(f"{person.name!r} may not {words.get(action, action)} in project {project.name!r}; ask its admin.")
    return project


def require_admin(session: Session, person: Person) -> None:
    """Raise `Forbidden` unless `person` is an administrator of the studio."""
    user = session.get(User, person.id)
    if user is None or user.disabled_at is not None or not user.admin or person.role != "admin" or person.project_id is not None:
        raise Forbidden(f"{person.name!r} is not an administrator of this studio; ask an administrator.")


def note(session: Session, person: Person | None, project_id: int | None, action: str, **about: object) -> None:
    """Add a row to the audit log: who did which action in which project, with details."""
    at, who = now(session), person.id if person else None
    session.add(Audit(at=at, user_id=who, project_id=project_id, action=action, about=about))


def folded(name: str) -> str:
    """Return a name in the form used for comparison: no two people differ only in case, width or spaces."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def skeleton(name: str) -> str:
    """Return a name with letters and digits that look alike merged. Two users may not have names with the same skeleton."""
    plain = unicodedata.normalize("NFKC", name).translate(_CAPITALS)
    return folded(plain).translate(_ALIKE).replace("rn", "m").replace("vv", "w")


def new_user(session: Session, name: str, password: str | None, *, admin: bool = False) -> User:
    """Create a user with this password hash. Raises `Refusal` if the name has invisible characters, `Conflict` if it is taken."""
    name = " ".join(name.split())
    _must_be_shown(name)
    if password is not None and skeleton(name) == LOCAL:
        raise Conflict(f"The name {name!r} is reserved for the studio's owner; choose another.")
    if session.scalar(select(User.id).where(User.folded == folded(name))) is not None:
        raise Conflict(f"The name {name!r} is taken; choose another.")
    if alike := next((other for other in session.scalars(select(User.name)) if skeleton(other) == skeleton(name)), None):
        raise Conflict(f"The name {name!r} looks like {alike!r}; choose another.")
    user = User(name=name, folded=folded(name), password_hash=password, admin=admin, created_at=now(session))
    session.add(user)
    session.flush()
    return user


def _must_be_shown(name: str) -> None:
    if not 1 <= len(name) <= 80 or not name.isprintable():
        raise Refusal("A name has 1 to 80 printable characters; choose another.")


@writes
def local(session: Session) -> Person:
    """Return the local user, who needs no login: an administrator without a password, created on the first call."""
    user = session.scalar(select(User).where(User.folded == LOCAL))
    if user is None:
        user = new_user(session, LOCAL, None, admin=True)
    return _person(user)


def log_in(database: Database, name: str, password: str, device: str = "") -> Login:
    """Log a user in by name and password, and return the new session.

    Raises `Unknown` for a wrong name or password (with the same message), and `TooMany` after ten failures in a quarter of an
    hour. Failures are counted separately for each `device` that has logged in before (see `Login.device`), and together for all
    others under the name. So guesses from other devices do not lock users out of the browsers that they use.
    """
    if not name.isprintable():
        raise Unknown("Name or password is wrong.")
    count, stored = _stored_password(database, folded(name), device)
    # This is outside a transaction, since hashing takes a tenth of a second, too long to hold a lock.
    good = passwords.check_password(password, stored)
    login = _begin_session(database, folded(name), stored if good else None, count)
    if login is None:
        raise Unknown("Name or password is wrong.")
    return login


@reads
def _stored_password(session: Session, key: str, device: str) -> tuple[str, str | None]:
    """Return (the key under which failures are counted, the password hash or None). Raises `TooMany` after too many failures."""
    stored = session.scalar(select(User.password_hash).where(User.folded == key, User.disabled_at.is_(None)))
    count = f"{_DEVICE} {device}" if stored is not None and passwords.device_holds(device, stored) else key
    _refuse_guesses(session, count)
    return count, stored


@writes
def _begin_session(session: Session, key: str, stored: str | None, count: str) -> Login | None:
    user = session.scalar(select(User).where(User.folded == key, User.disabled_at.is_(None)))
    # The password may have changed meanwhile.
    if user is None or stored is None or user.password_hash != stored:
        _count_guess(session, count)
        return None
    return open_session(session, user)


def _refuse_guesses(session: Session, count: str) -> None:
    since = now(session) - FAILURES_WITHIN
    failures = select(func.count()).select_from(LoginFailure).where(LoginFailure.folded == count[:200], LoginFailure.at > since)
    if (session.scalar(failures) or 0) >= FAILURES:
        raise TooMany("Too many wrong passwords; wait a quarter of an hour, or use a browser where you have logged in before.")


def _count_guess(session: Session, count: str) -> None:
    session.execute(delete(LoginFailure).where(LoginFailure.at <= now(session) - FAILURES_WITHIN))
    session.add(LoginFailure(folded=count[:200], at=now(session)))


def open_session(session: Session, user: User) -> Login:
    """Return a new session of a user. The token is always new, which prevents session fixation."""
    csrf, start = passwords.token("csrf"), now(session)
    token = passwords.session_token(csrf)
    until = start + SESSION_FOR
    hashed = passwords.hash_token(token)
    session.add(LoginSession(user_id=user.id, token_hash=hashed, created_at=start, seen_at=start, expires_at=until))
    device = passwords.new_device(user.password_hash) if user.password_hash else ""
    return Login(_person(user), token, csrf, until, device)


def who(database: Database, token: str | None) -> Person:
    """Return the person to whom a session token or an API token belongs.

    Raises `Unknown` if it is missing, wrong, ended or expired.
    """
    hashed = passwords.hash_token(token or "")
    person, stale = _found(database, hashed)
    if person is None:
        raise Unknown("The session or token is unknown or has expired; log in again.")
    if stale:
        _seen(database, hashed)
    return person


@reads
def _found(session: Session, hashed: str) -> tuple[Person | None, bool]:
    at = now(session)
    row = session.scalar(select(LoginSession).where(LoginSession.token_hash == hashed))
    if row is not None:
        user = session.get_one(User, row.user_id)
        live = row.ended_at is None and row.expires_at > at and row.seen_at + SESSION_IDLE > at and user.disabled_at is None
        return (_person(user) if live else None), row.seen_at + SEEN_EVERY <= at
    key = session.scalar(select(ApiToken).where(ApiToken.token_hash == hashed))
    if key is None or key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= at):
        return None, False
    user = session.get_one(User, key.user_id)
    person = Person(user.id, user.name, user.admin and key.role == "admin", key.role, key.project_id)
    return (person if user.disabled_at is None else None), (key.used_at or 0) + SEEN_EVERY <= at


@writes
def _seen(session: Session, hashed: str) -> None:
    for row in session.scalars(select(LoginSession).where(LoginSession.token_hash == hashed)):
        row.seen_at = max(row.seen_at, now(session))
    for key in session.scalars(select(ApiToken).where(ApiToken.token_hash == hashed)):
        key.used_at = now(session)


@writes
def log_out(session: Session, token: str) -> None:
    """End a session. Ending an ended session does nothing."""
    for row in session.scalars(select(LoginSession).where(LoginSession.token_hash == passwords.hash_token(token))):
        row.ended_at = row.ended_at or now(session)


def change_password(database: Database, person: Person, old: str, new: str) -> None:
    """Set a new password and end all sessions of the person.

    Raises `Forbidden` if the old password is wrong, and `TooMany` after ten such failures in a quarter of an hour. These failures
    do not prevent logins.
    """
    if not passwords.check_password(old, _own_password(database, person)):
        _wrong_old_password(database, person)
        raise Forbidden("The old password is wrong; nothing was changed.")
    _set_password(database, person, passwords.hash_password(new, name=person.name))


@reads
def _own_password(session: Session, person: Person) -> str | None:
    _refuse_guesses(session, f"{_CHANGE} {person.id}")
    return session.get_one(User, person.id).password_hash


@writes
def _wrong_old_password(session: Session, person: Person) -> None:
    _count_guess(session, f"{_CHANGE} {person.id}")


@writes
def _set_password(session: Session, person: Person, hashed: str) -> None:
    session.get_one(User, person.id).password_hash = hashed
    end_sessions(session, person.id)
    note(session, person, None, "password changed")


def end_sessions(session: Session, user_id: int) -> None:
    """End all sessions of a user."""
    for row in session.scalars(select(LoginSession).where(LoginSession.user_id == user_id, LoginSession.ended_at.is_(None))):
        row.ended_at = now(session)


@writes
def make_token(
    session: Session,
    person: Person,
    name: str,
    role: str = "labeller",
    *,
    project_id: int | None = None,
    lasts_ms: int | None = None,
) -> tuple[int, str]:
    """Create an API token for a program that acts for `person`. Return its number and the token, which cannot be shown again.

    It may do no more than `role`, and cannot create tokens. Raises `Refusal` on an unknown role.
    """
    if person.role != "admin" or person.project_id is not None:
        raise Forbidden("A token cannot create tokens; log in with a password.")
    if role not in ROLES:
        raise Refusal(f"The role is {role!r}; expected one of {', '.join(ROLES)}.")
    _must_be_shown(name)
    if project_id is not None:
        require(session, person, project_id, "see")
    value, at = passwords.token("api"), now(session)
    row = ApiToken(
        user_id=person.id,
        project_id=project_id,
        name=name,
        role=role,
        token_hash=passwords.hash_token(value),
        created_at=at,
        expires_at=None if lasts_ms is None else at + lasts_ms,
    )
    session.add(row)
    session.flush()
    note(session, person, project_id, "token made", token=row.id, role=role)
    return row.id, value


@reads
def tokens(session: Session, person: Person) -> list[dict[str, object]]:
    """Return the person's API tokens, without the secret values."""
    rows = session.scalars(select(ApiToken).where(ApiToken.user_id == person.id).order_by(ApiToken.id))
    names = ("id", "name", "role", "project_id", "created_at", "expires_at", "revoked_at", "used_at")
    return [{name: getattr(row, name) for name in names} for row in rows]


@writes
def revoke_token(session: Session, person: Person, token_id: int) -> None:
    """End one of the person's own API tokens. Raises `Missing` if no token has that number."""
    row = session.get(ApiToken, token_id)
    if row is None or row.user_id != person.id:
        raise Missing(f"{person.name!r} has no token {token_id}.")
    row.revoked_at = row.revoked_at or now(session)
    note(session, person, row.project_id, "token revoked", token=token_id)


@reads
def everyone(session: Session, person: Person) -> list[dict[str, object]]:
    """Return all users of the studio: `id`, `name`, `admin`, `created_at`, `disabled_at`. For its administrators."""
    require_admin(session, person)
    names = ("id", "name", "admin", "created_at", "disabled_at")
    return [{name: getattr(user, name) for name in names} for user in session.scalars(select(User).order_by(User.folded))]


@writes
def disable(session: Session, person: Person, user_id: int) -> None:
    """Disable a user: all sessions and tokens end immediately. The user's answers stay."""
    require_admin(session, person)
    user = session.get(User, user_id)
    if user is None:
        raise Missing(f"There is no user {user_id}.")
    if user.id == person.id:
        raise Conflict("You cannot disable your own account; ask another administrator.")
    user.disabled_at = user.disabled_at or now(session)
    end_sessions(session, user_id)
    note(session, person, None, "user disabled", user=user_id)


def _person(user: User) -> Person:
    return Person(user.id, user.name, user.admin)
