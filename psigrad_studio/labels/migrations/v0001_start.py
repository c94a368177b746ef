"""The first tables, and the triggers that make `votes` and `audit` append-only and display orders final."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ROLES = "role IN ('viewer', 'labeller', 'admin')"
ONE_ANSWER = (
    "(CASE WHEN choice IS NULL THEN 0 ELSE 1 END) + (CASE WHEN ranks IS NULL THEN 0 ELSE 1 END)"
    " + (CASE WHEN rating IS NULL THEN 0 ELSE 1 END) = (CASE WHEN action = 'vote' THEN 1 ELSE 0 END)"
)


def upgrade() -> None:
    """Make everything."""
    _people()
    _material()
    _labelling()
    _votes()
    if op.get_bind().dialect.name == "sqlite":
        _guards_sqlite()
    else:
        op.create_foreign_key("fk_assignments_vote_id", "assignments", "votes", ["vote_id"], ["id"])
        _guards_postgresql()


def _table(name: str, *parts: sa.schema.SchemaItem, **options: bool) -> None:
    """A table with its `id` first."""
    op.create_table(name, _int("id"), *parts, sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{name}")), **options)


def _int(name: str, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, BIG, nullable=null)


def _text(name: str, null: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=null)


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), nullable=False)


def _to(table: str, column: str, target: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{target}.id"], name=op.f(f"fk_{table}_{column}"))


def _unique(table: str, *columns: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(*columns, name=op.f(f"uq_{table}_{'_'.join(columns)}"))


def _check(table: str, name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(f"ck_{table}_{name}"))


def _index(table: str, *columns: str) -> None:
    op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, list(columns))


def _people() -> None:
    t = "users"
    _table(
        t,
        *(_text("name"), _text("folded"), _text("password_hash", null=True), _flag("admin")),
        *(_int("created_at"), _int("disabled_at", null=True), _unique(t, "folded")),
    )
    t = "projects"
    _table(
        t,
        *(_text("name"), _text("kind"), _text("instructions"), _int("overlap"), _int("lease_ms"), _flag("ties")),
        *(_flag("both_bad"), _int("strengths"), _int("seed"), _int("created_at"), _int("closed_at", null=True)),
        *(_unique(t, "name"), _check(t, "kind", "kind IN ('pair', 'ranking', 'rating-5', 'rating-10')")),
        _check(t, "overlap", "overlap >= 1"),
    )
    t = "sessions"
    _table(
        t,
        *(_int("user_id"), _text("token_hash"), _int("created_at"), _int("seen_at"), _int("expires_at")),
        *(_int("ended_at", null=True), _to(t, "user_id", "users"), _unique(t, "token_hash")),
    )
    t = "api_tokens"
    _table(
        t,
        *(_int("user_id"), _int("project_id", null=True), _text("name"), _text("role"), _text("token_hash")),
        *(_int("created_at"), _int("expires_at", null=True), _int("revoked_at", null=True), _int("used_at", null=True)),
        *(_to(t, "user_id", "users"), _to(t, "project_id", "projects"), _unique(t, "token_hash"), _check(t, "role", ROLES)),
    )
    t = "invites"
    _table(
        t,
        *(_int("project_id", null=True), _text("role"), _text("token_hash"), _int("created_by", null=True)),
        *(_int("created_at"), _int("expires_at"), _int("accepted_by", null=True), _int("accepted_at", null=True)),
        *(_int("revoked_at", null=True), _to(t, "project_id", "projects"), _to(t, "created_by", "users")),
        *(_to(t, "accepted_by", "users"), _unique(t, "token_hash"), _check(t, "role", ROLES)),
    )
    _table("login_failures", _text("folded"), _int("at"))
    _index("login_failures", "folded", "at")
    t = "memberships"
    op.create_table(
        t,
        *(_int("user_id"), _int("project_id"), _text("role"), _int("created_at"), _check(t, "role", ROLES)),
        *(_to(t, "user_id", "users"), _to(t, "project_id", "projects")),
        sa.PrimaryKeyConstraint("user_id", "project_id", name=op.f("pk_memberships")),
    )
    t = "audit"
    _table(
        t,
        *(_int("at"), _int("user_id", null=True), _int("project_id", null=True), _text("action"), _text("about")),
        *(_to(t, "user_id", "users"), _to(t, "project_id", "projects")),
        sqlite_autoincrement=True,
    )


def _material() -> None:
    t = "prompts"
    _table(
        t,
        *(_int("project_id"), _text("hash"), _text("content"), _text("columns")),
        *(_to(t, "project_id", "projects"), _unique(t, "project_id", "hash")),
    )
    t = "completions"
    _table(
        t,
        *(_int("prompt_id"), _text("hash"), _text("content")),
        *(_to(t, "prompt_id", "prompts"), _unique(t, "prompt_id", "hash")),
    )
    t = "origins"
    _table(
        t,
        *(_int("completion_id"), _text("hash"), _text("sampler", null=True), _text("run", null=True), _int("step", null=True)),
        *(_text("about"), _to(t, "completion_id", "completions"), _unique(t, "completion_id", "hash")),
    )


def _labelling() -> None:
    t = "tasks"
    _table(
        t,
        *(_int("project_id"), _int("prompt_id"), _text("hash"), _int("gold", null=True), _int("created_at")),
        *(_to(t, "project_id", "projects"), _to(t, "prompt_id", "prompts"), _unique(t, "project_id", "hash")),
    )
    t = "items"
    op.create_table(
        t,
        *(_int("task_id"), _int("place"), _int("completion_id")),
        *(_to(t, "task_id", "tasks"), _to(t, "completion_id", "completions"), _unique(t, "task_id", "completion_id")),
        sa.PrimaryKeyConstraint("task_id", "place", name=op.f("pk_items")),
    )
    _index(t, "completion_id")
    t = "seats"
    _table(
        t,
        *(_int("project_id"), _int("task_id"), _int("turn"), _int("user_id", null=True), _int("lease_until", null=True)),
        *(_flag("done"), _to(t, "project_id", "projects"), _to(t, "task_id", "tasks"), _to(t, "user_id", "users")),
        *(_unique(t, "task_id", "user_id"),),
        _check(t, "taken", "user_id IS NOT NULL OR (lease_until IS NULL AND NOT done)"),
    )
    _index(t, "project_id", "done", "turn", "id")
    _index(t, "user_id", "project_id", "done")
    t = "assignments"
    # votes and assignments point at one another: SQLite takes a reference to a table to come, PostgreSQL gets it afterwards
    forward = [_to(t, "vote_id", "votes")] if op.get_bind().dialect.name == "sqlite" else []
    _table(
        t,
        *(_int("project_id"), _int("task_id"), _int("user_id"), _text("display"), _int("shown_at"), _int("vote_id", null=True)),
        *(_to(t, "project_id", "projects"), _to(t, "task_id", "tasks"), _to(t, "user_id", "users"), *forward),
        _unique(t, "task_id", "user_id"),
    )
    _index(t, "user_id", "project_id", "vote_id")
    _index(t, "vote_id")


def _votes() -> None:
    t = "votes"
    _table(
        t,
        *(_int("project_id"), _int("assignment_id"), _int("user_id"), _text("key"), _text("digest"), _text("action")),
        *(_text("choice", null=True), _text("ranks", null=True), _int("rating", null=True), _int("strength", null=True)),
        *(_text("reason", null=True), _int("shown_at"), _int("decided_at"), _int("client_ms", null=True)),
        *(_int("supersedes", null=True), _to(t, "project_id", "projects"), _to(t, "assignment_id", "assignments")),
        *(_to(t, "user_id", "users"), _to(t, "supersedes", "votes"), _unique(t, "user_id", "key"), _unique(t, "supersedes")),
        _check(t, "action", "action IN ('vote', 'skip', 'undo')"),
        _check(t, "choice", "choice IN ('a', 'b', 'tie', 'both_bad')"),
        _check(t, "supersedes", "(action = 'undo') = (supersedes IS NOT NULL)"),
        _check(t, "answer", ONE_ANSWER),
        sqlite_autoincrement=True,
    )
    _index(t, "assignment_id")
    _index(t, "project_id", "id")


def _guards_sqlite() -> None:
    for table in ("votes", "audit"):
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
    # INSERT OR REPLACE deletes without asking the triggers above
    op.execute(
        "CREATE TRIGGER votes_no_replace BEFORE INSERT ON votes WHEN EXISTS (SELECT 1 FROM votes WHERE id = NEW.id "
        "OR (user_id = NEW.user_id AND key = NEW.key) OR supersedes = NEW.supersedes) "
        "BEGIN SELECT RAISE(ABORT, 'votes is append-only and has this row'); END"
    )
    op.execute(
        "CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id) "
        "BEGIN SELECT RAISE(ABORT, 'audit is append-only and has this row'); END"
    )
    op.execute(
        "CREATE TRIGGER assignments_final BEFORE UPDATE OF task_id, user_id, display ON assignments "
        "WHEN NEW.display <> OLD.display OR NEW.task_id <> OLD.task_id OR NEW.user_id <> OLD.user_id "
        "BEGIN SELECT RAISE(ABORT, 'the display order of an assignment is final'); END"
    )


def _guards_postgresql() -> None:
    op.execute(
        "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation'; END $$"
    )
    for table in ("votes", "audit"):
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION refuse_change('{table} is append-only')"
        )
    op.execute(
        "CREATE TRIGGER assignments_final BEFORE UPDATE OF task_id, user_id, display ON assignments FOR EACH ROW "
        "WHEN (NEW.display <> OLD.display OR NEW.task_id <> OLD.task_id OR NEW.user_id <> OLD.user_id) "
        "EXECUTE FUNCTION refuse_change('the display order of an assignment is final')"
    )
