"""Migrate a database to the tables of this version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, inspect, text

from psigrad.errors import UserError
from psigrad_studio.labels.schema import Base

FOLDER = Path(__file__).parent / "migrations"
_LOCK = 7_024_661_309  # an arbitrary number, the same in all versions


def scripts() -> ScriptDirectory:
    """Return the migrations of this version, as Alembic scripts."""
    return ScriptDirectory(str(FOLDER), version_locations=[str(FOLDER)])


def is_current(connection: Connection) -> bool:
    """Return True if the database has exactly the migrations of this version."""
    return MigrationContext.configure(connection).get_current_heads() == tuple(scripts().get_heads())


def version(connection: Connection) -> str | None:
    """Return the version of the database's tables; None if it has no psigrad tables."""
    return MigrationContext.configure(connection).get_current_revision()


def is_known(revision: str) -> bool:
    """Return True if this version of psigrad knows the migration."""
    return revision in {script.revision for script in scripts().walk_revisions()}


def upgrade(connection: Connection) -> None:
    """Run every migration that the database lacks, inside the transaction of `connection`.

    Servers that start at the same moment wait for one another. SQLite uses the write lock of the transaction, PostgreSQL an
    advisory lock. Raises `UserError` if the database is of a newer version, or another program's.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _LOCK})
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" not in tables and tables & set(Base.metadata.tables):
        raise UserError(
            f"The database {connection.engine.url.render_as_string()} has tables of its own "
            f"({', '.join(sorted(tables & set(Base.metadata.tables)))}); name another database for the labels."
        )
    directory = scripts()

    def steps(revision: Any, context: Any) -> Any:
        return directory._upgrade_revs("head", revision)

    with EnvironmentContext(Config(), directory, fn=steps, destination_rev="head") as environment:
        environment.configure(connection=connection, target_metadata=Base.metadata, transactional_ddl=False)
        try:
            environment.run_migrations()
        except CommandError as error:
            raise UserError(
                f"The database {connection.engine.url.render_as_string()} was made by a newer psigrad ({error}); "
                "install that version, or name another database."
            ) from error
