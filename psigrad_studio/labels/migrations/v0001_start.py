"""The tables of `schema`, and the triggers that make `votes` and `audit` append-only and display orders final."""

from __future__ import annotations

from alembic import op

from psigrad_studio.labels.schema import Base

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make everything."""
    Base.metadata.create_all(op.get_bind())
    if op.get_bind().dialect.name == "sqlite":
        _guards_sqlite()
    else:
        _guards_postgresql()


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
