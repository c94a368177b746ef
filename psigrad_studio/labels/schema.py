"""The tables of the database of labels.

Times are milliseconds since 1970 UTC. Texts by models or people are stored as ASCII JSON (`Document`), so that all characters,
also NUL and lone surrogates, are read back unchanged from SQLite and PostgreSQL. `votes` and `audit` are append-only: triggers of
the database reject changes and deletions of rows (see `tables`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, Integer, MetaData, Text, UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

KINDS = ("pair", "ranking", "rating-5", "rating-10")
ROLES = ("viewer", "labeller", "admin")
ACTIONS = ("vote", "skip", "undo")
CHOICES = ("a", "b", "tie", "both_bad")
_MAIN = " + ".join(f"(CASE WHEN {name} IS NULL THEN 0 ELSE 1 END)" for name in ("choice", "ranks", "rating"))
ANSWERED = f"({_MAIN}) <= 1 AND (({_MAIN}) = 1 OR answers IS NOT NULL) = (action = 'vote')"

_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
# SQLite numbers rows automatically only if the column is exactly INTEGER.
Big = BigInteger().with_variant(Integer(), "sqlite")


class Document(TypeDecorator[Any]):
    """A column type for JSON values, which are stored as ASCII text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Return the JSON text to store, or None."""
        return None if value is None else json.dumps(value, ensure_ascii=True, allow_nan=False)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Return the value that the stored JSON text represents, or None."""
        return None if value is None else json.loads(value)


Id = Annotated[int, mapped_column(Big, primary_key=True)]
Doc = Annotated[Any, mapped_column(Document)]


class Base(DeclarativeBase):
    """The base class of the tables."""

    metadata = MetaData(naming_convention=_CONVENTION)
    type_annotation_map: ClassVar[dict[Any, Any]] = {int: Big, str: Text()}


def _ref(column: str) -> Any:
    return mapped_column(ForeignKey(column))


def _among(column: str, values: tuple[str, ...]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(map(repr, values))})", name=column)


class User(Base):
    """A person. `folded` is the name used for comparison; `password_hash` is null for users who cannot log in by password."""

    __tablename__ = "users"
    id: Mapped[Id]
    name: Mapped[str]
    folded: Mapped[str] = mapped_column(unique=True)
    password_hash: Mapped[str | None]
    admin: Mapped[bool]
    created_at: Mapped[int]
    disabled_at: Mapped[int | None]


class LoginSession(Base):
    """A session of a logged-in person. Only a hash of its token is stored."""

    __tablename__ = "sessions"
    id: Mapped[Id]
    user_id: Mapped[int] = _ref("users.id")
    token_hash: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[int]
    seen_at: Mapped[int]
    expires_at: Mapped[int]
    ended_at: Mapped[int | None]


class ApiToken(Base):
    """An API token of a program that acts for a person, with at most `role`, and only in `project_id` if that is set."""

    __tablename__ = "api_tokens"
    __table_args__ = (_among("role", ROLES),)
    id: Mapped[Id]
    user_id: Mapped[int] = _ref("users.id")
    project_id: Mapped[int | None] = _ref("projects.id")
    name: Mapped[str]
    role: Mapped[str]
    token_hash: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[int]
    expires_at: Mapped[int | None]
    revoked_at: Mapped[int | None]
    used_at: Mapped[int | None]


class Invite(Base):
    """An invite link, which makes one person a member of a project, or, without a project, an administrator of the studio."""

    __tablename__ = "invites"
    __table_args__ = (_among("role", ROLES),)
    id: Mapped[Id]
    project_id: Mapped[int | None] = _ref("projects.id")
    role: Mapped[str]
    token_hash: Mapped[str] = mapped_column(unique=True)
    created_by: Mapped[int | None] = _ref("users.id")
    created_at: Mapped[int]
    expires_at: Mapped[int]
    accepted_by: Mapped[int | None] = _ref("users.id")
    accepted_at: Mapped[int | None]
    revoked_at: Mapped[int | None]


class LoginFailure(Base):
    """A login with a wrong password. Failures are counted to prevent guessing."""

    __tablename__ = "login_failures"
    __table_args__ = (Index(None, "folded", "at"),)
    id: Mapped[Id]
    folded: Mapped[str]
    at: Mapped[int]


class Membership(Base):
    """The role of a person in a project."""

    __tablename__ = "memberships"
    __table_args__ = (_among("role", ROLES),)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), primary_key=True)
    project_id: Mapped[int] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    role: Mapped[str]
    created_at: Mapped[int]


class Project(Base):
    """A project that asks people one question about many completions.

    `overlap` people answer each task. `strengths` is the number of grades of a choice (0: not asked). `seed` determines the
    display orders. `questions` are the custom questions (null: none). `overall` is false if only the custom questions are asked.
    `checks` of a hundred shown tasks are attention checks (null: none).
    """

    __tablename__ = "projects"
    __table_args__ = (_among("kind", KINDS), CheckConstraint("overlap >= 1", name="overlap"))
    id: Mapped[Id]
    name: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    instructions: Mapped[Doc]
    overlap: Mapped[int]
    lease_ms: Mapped[int]
    ties: Mapped[bool]
    both_bad: Mapped[bool]
    strengths: Mapped[int]
    seed: Mapped[int]
    created_at: Mapped[int]
    closed_at: Mapped[int | None]
    questions: Mapped[Doc | None]
    overall: Mapped[bool | None]
    checks: Mapped[int | None]


class StoredPrompt(Base):
    """A prompt, stored once per project. `columns` are the dataset columns that are exported with it."""

    __tablename__ = "prompts"
    __table_args__ = (UniqueConstraint("project_id", "hash"),)
    id: Mapped[Id]
    project_id: Mapped[int] = _ref("projects.id")
    hash: Mapped[str]
    content: Mapped[Doc]
    columns: Mapped[Doc]


class StoredCompletion(Base):
    """A completion of a prompt, stored once per prompt even if it was sampled several times."""

    __tablename__ = "completions"
    __table_args__ = (UniqueConstraint("prompt_id", "hash"),)
    id: Mapped[Id]
    prompt_id: Mapped[int] = _ref("prompts.id")
    hash: Mapped[str]
    content: Mapped[Doc]


class Origin(Base):
    """An origin of a completion: run, step and rollout, or file and line. `about` contains all known fields."""

    __tablename__ = "origins"
    __table_args__ = (UniqueConstraint("completion_id", "hash"),)
    id: Mapped[Id]
    completion_id: Mapped[int] = _ref("completions.id")
    hash: Mapped[str]
    sampler: Mapped[str | None]
    run: Mapped[str | None]
    step: Mapped[int | None]
    about: Mapped[Doc]


class LabelTask(Base):
    """One task to answer: a pair, a list to rank, or one completion to rate. `hash` is that of the unordered set of completions.

    `gold` is the known answer of an attention check: the place of the best item, or the rating.
    """

    __tablename__ = "tasks"
    __table_args__ = (UniqueConstraint("project_id", "hash"),)
    id: Mapped[Id]
    project_id: Mapped[int] = _ref("projects.id")
    prompt_id: Mapped[int] = _ref("prompts.id")
    hash: Mapped[str]
    gold: Mapped[int | None]
    created_at: Mapped[int]


class TaskItem(Base):
    """One completion of a task, with its place. Places are in order of the completions' hashes, which reveals nothing."""

    __tablename__ = "items"
    __table_args__ = (UniqueConstraint("task_id", "completion_id"),)
    task_id: Mapped[int] = mapped_column(ForeignKey("tasks.id"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)
    completion_id: Mapped[int] = mapped_column(ForeignKey("completions.id"), index=True)


class Seat(Base):
    """A slot for one answer to a task. A task has as many seats as it needs answers.

    Seats are given out in order of `turn`, then of `id`. A seat is free if it is not `done` and its lease is null or over. All of
    this is in one row, so that a single statement takes a seat, and a second request sees that it is taken.
    """

    __tablename__ = "seats"
    __table_args__ = (
        UniqueConstraint("task_id", "user_id"),
        Index(None, "project_id", "done", "turn", "id"),
        Index(None, "user_id", "project_id", "done"),
        CheckConstraint("user_id IS NOT NULL OR (lease_until IS NULL AND NOT done)", name="taken"),
    )
    id: Mapped[Id]
    project_id: Mapped[int] = _ref("projects.id")
    task_id: Mapped[int] = _ref("tasks.id")
    turn: Mapped[int]
    user_id: Mapped[int | None] = _ref("users.id")
    lease_until: Mapped[int | None]
    done: Mapped[bool]


class Assignment(Base):
    """A task that is or was shown to one person. `display[i]` is the place of the item shown i-th, which never changes.

    `vote_id` is the person's current vote or skip; null if there is none.
    """

    __tablename__ = "assignments"
    __table_args__ = (
        UniqueConstraint("task_id", "user_id"),
        Index(None, "user_id", "project_id", "vote_id"),
        Index(None, "vote_id"),
    )
    id: Mapped[Id]
    project_id: Mapped[int] = _ref("projects.id")
    task_id: Mapped[int] = _ref("tasks.id")
    user_id: Mapped[int] = _ref("users.id")
    display: Mapped[Doc]
    shown_at: Mapped[int]
    vote_id: Mapped[int | None] = mapped_column(ForeignKey("votes.id", use_alter=True, name="fk_assignments_vote_id"))


class Vote(Base):
    """An action of a person on an assignment. Rows are never changed; an undo is a row that `supersedes` another.

    `choice` names the item by its place (a is 0, b is 1), not by the side on which it was shown. `ranks[place]` is the rank of an
    item; 1 is the best. `answers` are those to the custom questions, by name. With `key`, a client can safely repeat a
    submission. `digest` distinguishes a repetition from another use of the key.
    """

    __tablename__ = "votes"
    __table_args__ = (
        UniqueConstraint("user_id", "key"),
        Index(None, "assignment_id"),
        Index(None, "project_id", "id"),
        _among("action", ACTIONS),
        _among("choice", CHOICES),
        CheckConstraint("(action = 'undo') = (supersedes IS NOT NULL)", name="supersedes"),
        CheckConstraint(ANSWERED, name="answer"),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[Id]
    project_id: Mapped[int] = _ref("projects.id")
    assignment_id: Mapped[int] = _ref("assignments.id")
    user_id: Mapped[int] = _ref("users.id")
    key: Mapped[str]
    digest: Mapped[str]
    action: Mapped[str]
    choice: Mapped[str | None]
    ranks: Mapped[Doc | None]
    rating: Mapped[int | None]
    strength: Mapped[int | None]
    reason: Mapped[Doc | None]
    shown_at: Mapped[int]
    decided_at: Mapped[int]
    client_ms: Mapped[int | None]
    answers: Mapped[Doc | None]
    supersedes: Mapped[int | None] = mapped_column(ForeignKey("votes.id"), unique=True)


class Audit(Base):
    """One entry of the log of all actions except labelling. The table is append-only."""

    __tablename__ = "audit"
    __table_args__ = ({"sqlite_autoincrement": True},)
    id: Mapped[Id]
    at: Mapped[int]
    user_id: Mapped[int | None] = _ref("users.id")
    project_id: Mapped[int | None] = _ref("projects.id")
    action: Mapped[str]
    about: Mapped[Doc]
