"""The creation of the tables and their triggers in a new database, and the check of an existing one.

The triggers make `votes` and `audit` append-only and display orders final, whichever program writes.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, inspect, text

from psigrad.errors import UserError
from psigrad_studio.labels.schema import Base

VERSION = 1
"""The version of `schema`. A new version needs code that migrates databases of the previous one."""
_LOCK = 7_024_661_309  # an arbitrary number, the same in all versions


def exist(connection: Connection) -> bool:
    """Return True if the database has the tables of this version, False if it has none.

    Raises `UserError` for tables of another version, or of another program.
    """
    tables, where = set(inspect(connection).get_table_names()), connection.engine.url.render_as_string()
    if "label_version" not in tables:
        if others := sorted(tables & set(Base.metadata.tables)):
            raise UserError(
                f"The database {where} has tables of another program ({', '.join(others)}); name another database for the labels."
            )
        return False
    if (found := connection.execute(text("SELECT number FROM label_version")).scalar_one()) != VERSION:
        raise UserError(
            f"The database {where} was made by another version of psigrad (its tables have version {found}; expected "
            f"{VERSION}); install that version, or name another database."
        )
    return True


def create(connection: Connection) -> None:
    """Create the tables, inside the transaction of `connection`.

    Servers that start at the same moment wait for one another. SQLite uses the write lock of the transaction, PostgreSQL an
    advisory lock.
    """
    on_sqlite = connection.dialect.name == "sqlite"
    if not on_sqlite:
        connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _LOCK})
    if exist(connection):
        return
    Base.metadata.create_all(connection)
    version = ("CREATE TABLE label_version (number INTEGER NOT NULL)", f"INSERT INTO label_version VALUES ({VERSION})")
    for statement in (*(_guards_sqlite() if on_sqlite else _guards_postgresql()), *version):
        connection.execute(text(statement))


def _guards_sqlite() -> Iterator[str]:
    for table in ("votes", "audit"):
        for verb in ("UPDATE", "DELETE"):
            yield (
                f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
    # INSERT OR REPLACE deletes rows without firing the triggers above
    yield (
        "CREATE TRIGGER votes_no_replace BEFORE INSERT ON votes WHEN EXISTS (SELECT 1 FROM votes WHERE id = NEW.id "
        "OR (user_id = NEW.user_id AND key = NEW.key) OR supersedes = NEW.supersedes) "
        "BEGIN SELECT RAISE(ABORT, 'votes is append-only and has this row'); END"
    )
    yield (
        "CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id) "
        "BEGIN SELECT RAISE(ABORT, 'audit is append-only and has this row'); END"
    )
    yield (
        "CREATE TRIGGER assignments_final BEFORE UPDATE OF task_id, user_id, display ON assignments "
        "WHEN NEW.display <> OLD.display OR NEW.task_id <> OLD.task_id OR NEW.user_id <> OLD.user_id "
        "BEGIN SELECT RAISE(ABORT, 'the display order of an assignment is final'); END"
    )


def _guards_postgresql() -> Iterator[str]:
    yield (
        "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation'; END $$"
    )
    for table in ("votes", "audit"):
        yield (
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION refuse_change('{table} is append-only')"
        )
    yield (
        "CREATE TRIGGER assignments_final BEFORE UPDATE OF task_id, user_id, display ON assignments FOR EACH ROW "
        "WHEN (NEW.display <> OLD.display OR NEW.task_id <> OLD.task_id OR NEW.user_id <> OLD.user_id) "
        "EXECUTE FUNCTION refuse_change('the display order of an assignment is final')"
    )
