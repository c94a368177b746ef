"""Questions of a project's own, with their answers in the votes; attention checks. What is there already stays as it was."""

from __future__ import annotations

import re

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MAIN = " + ".join(f"(CASE WHEN {name} IS NULL THEN 0 ELSE 1 END)" for name in ("choice", "ranks", "rating"))
BEFORE = f"{MAIN} = (CASE WHEN action = 'vote' THEN 1 ELSE 0 END)"
AFTER = f"({MAIN}) <= 1 AND (({MAIN}) = 1 OR answers IS NOT NULL) = (action = 'vote')"


def upgrade() -> None:
    """Add the columns, and let a vote have answers to a project's own questions alone."""
    for name, kind in (("questions", sa.Text()), ("overall", sa.Boolean()), ("checks", BIG)):
        op.add_column("projects", sa.Column(name, kind, nullable=True))
    op.add_column("votes", sa.Column("answers", sa.Text(), nullable=True))
    if op.get_bind().dialect.name == "sqlite":
        _rebuilt("votes", BEFORE, AFTER)
    else:
        op.drop_constraint(op.f("ck_votes_answer"), "votes", type_="check")
        op.create_check_constraint(op.f("ck_votes_answer"), "votes", AFTER)


def _rebuilt(table: str, before: str, after: str) -> None:
    """Replace a check. SQLite has no statement for that: the table is made anew, with its rows, indexes and triggers.

    Foreign keys must be off, or dropping the old table would be refused (see `database.connect`).
    """
    run = op.get_bind().exec_driver_sql
    parts = run("SELECT type, sql FROM sqlite_master WHERE tbl_name = ? AND sql IS NOT NULL", (table,)).all()
    made = next(sql for kind, sql in parts if kind == "table")
    if before not in made:
        raise RuntimeError(f"The table {table} isn't as it was made; its check is not there.")
    run(re.sub(rf'CREATE TABLE "?{table}"?', f"CREATE TABLE {table}_new", made.replace(before, after), count=1))
    columns = ", ".join(f'"{row[1]}"' for row in run(f"PRAGMA table_info({table})"))
    run(f"INSERT INTO {table}_new ({columns}) SELECT {columns} FROM {table} ORDER BY id")
    run(f"DROP TABLE {table}")
    run(f"ALTER TABLE {table}_new RENAME TO {table}")
    for kind, sql in parts:
        if kind != "table":
            run(sql)
    if broken := run("PRAGMA foreign_key_check").all():
        raise RuntimeError(f"{len(broken)} rows refer to what is not there, the first {tuple(broken[0])}.")
