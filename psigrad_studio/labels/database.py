"""The database of labels: SQLite in a file, or PostgreSQL by URL. Every call is one transaction, durable when it returns.

SQLite uses a write-ahead log, full synchronisation, foreign keys and a lock timeout of five seconds. Each writing transaction
uses BEGIN IMMEDIATE: one that reads first and writes later would fail at once, whatever the timeout.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from psigrad import extras
from psigrad.errors import UserError
from psigrad_studio.labels import label_backup, tables
from psigrad_studio.labels.refusals import Busy, Damaged, Missing

P = ParamSpec("P")
T = TypeVar("T")
ATTEMPTS = 5
PATIENCE = 5_000
"""The milliseconds for which a transaction of SQLite waits for another's lock."""
_TOO_LARGE = "22003"


def wall_clock() -> int:
    """Return the milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True)
class Database:
    """An open database. Threads may share it; processes open their own."""

    engine: Engine
    clock: Callable[[], int] = wall_clock
    _turn: AbstractContextManager[Any] = field(default_factory=nullcontext, repr=False)
    """The queue in which threads wait to write to SQLite. With SQLite's file lock alone, which is not fair, some would starve."""

    @contextmanager
    def session(self, *, write: bool) -> Iterator[Session]:
        """Open one transaction. It is committed at the end of the block, and rolled back if the block raises."""
        engine = self.engine.execution_options(psigrad_write=write)
        turn = self._turn if write else nullcontext()
        with turn, Session(engine, expire_on_commit=False) as session, session.begin():
            session.connection()  # take the lock before reading the clock, so that waiting does not shorten a lease
            session.info["now"] = self.clock()
            yield session

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def now(session: Session) -> int:
    """Return the time of this transaction in milliseconds. It is the same for the whole transaction."""
    return int(session.info["now"])


def reads(function: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Database, P], T]:
    """Decorate a function whose first argument is a session. The result takes a database, and runs a read-only transaction."""
    return _in_transactions(function, write=False)


def writes(function: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Database, P], T]:
    """Decorate a function whose first argument is a session. The result takes a database, and commits before it returns.

    Two transactions can conflict by the same new key, a deadlock or a lock timeout. The one that fails then runs again from the
    start, so it sees the other's changes. Raises `Busy` when the attempts are used up.
    """
    return _in_transactions(function, write=True)


def _in_transactions(function: Callable[Concatenate[Session, P], T], *, write: bool) -> Callable[Concatenate[Database, P], T]:
    @functools.wraps(function)
    def call(database: Database, /, *args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(ATTEMPTS):
            try:
                with database.session(write=write) as session:
                    return function(session, *args, **kwargs)
            except IntegrityError:
                if attempt == ATTEMPTS - 1:
                    raise
            except OverflowError as error:
                raise Missing("No entry has so large a number; check it.") from error
            except PoolTimeout as error:
                raise Busy("All connections to the labels are in use; try again in a moment.") from error
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise Busy("The connection to the labels' database was lost; try again with the same key.") from error
                if getattr(error.orig, "sqlstate", None) == _TOO_LARGE:
                    raise Missing("No entry has so large a number; check it.") from error
                if _is_damaged(error):
                    raise Damaged(str(label_backup.damaged(str(database.engine.url.database), str(error.orig)))) from error
                if not _met_another(error):
                    raise
        raise Busy("Others kept the labels locked, so nothing was changed; try again with the same key.")

    return call


def _met_another(error: DBAPIError) -> bool:
    """Return True for a lock timeout (SQLite), a deadlock or a failed serialisation (PostgreSQL)."""
    if getattr(error.orig, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return True
    return getattr(error.orig, "sqlstate", None) in ("40001", "40P01", "55P03")


def _is_damaged(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def _check(connection: Connection, url: URL) -> None:
    """Raise `UserError` if SQLite finds its file damaged."""
    if url.get_backend_name() == "sqlite":
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        label_backup.check(driver, Path(str(url.database)))


def connect(where: str | Path, clock: Callable[[], int] = wall_clock) -> Database:
    """Open the database at a path or a URL (`sqlite:///labels.db`, `postgresql://user@host/name`). Create the tables if needed.

    Raises `UserError` if it cannot be opened, is damaged, or was made by another version.
    """
    url = _url(where)
    try:
        engine = _sqlite(url) if url.get_backend_name() == "sqlite" else create_engine(url, pool_size=10, pool_pre_ping=True)
    except ModuleNotFoundError as error:
        raise extras.not_installed("PostgreSQL", error, "postgres") from error
    try:
        # Check first in a read transaction: usually the tables exist, so there is no need to wait for writers.
        with engine.begin() as connection:
            _check(connection, url)
            ready = tables.exist(connection)
        if not ready:
            # If eight servers start at the same moment, the last one waits for seven.
            with engine.execution_options(psigrad_write=True, psigrad_patience=60_000).begin() as connection:
                tables.create(connection)
            engine.dispose()  # so that the next connections have the default timeout
    except DBAPIError as error:
        engine.dispose()
        if _is_damaged(error):
            raise label_backup.damaged(str(url.database), str(error.orig)) from error
        raise UserError(f"The database {url.render_as_string()} cannot be opened: {str(error.orig).strip()}.") from error
    except BaseException:
        engine.dispose()
        raise
    return Database(engine, clock, threading.Lock() if url.get_backend_name() == "sqlite" else nullcontext())


def _url(where: str | Path) -> URL:
    text = str(where)
    if "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise UserError(f"The labels' URL is not valid ({error}); expected a path or postgresql://user@host/name.") from error
    if backend == "postgres":
        backend = "postgresql"
    if backend not in ("sqlite", "postgresql"):
        raise UserError(f"The labels' URL begins with {url.drivername}://; expected a path, sqlite:/// or postgresql://.")
    return url.set(drivername="sqlite" if backend == "sqlite" else "postgresql+psycopg")


def local_file(where: str | Path) -> Path:
    """Return the file of an SQLite database. Raises `UserError` for PostgreSQL, which has separate backup programs."""
    url = _url(where)
    if url.get_backend_name() != "sqlite":
        raise UserError("psigrad does not back up PostgreSQL; use pg_dump --format custom, and pg_restore --clean.")
    return Path(url.database or "")


def _sqlite(url: URL) -> Engine:
    path = url.database or ""
    if path in ("", ":memory:"):
        raise UserError("The labels need a file; give its path, such as labels.db.")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # the file contains password hashes
    except OSError as error:
        raise UserError(f"The labels cannot be stored in {path}: {error.strerror}.") from error
    engine = create_engine(url, pool_size=16, connect_args={"check_same_thread": False})
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, record: object) -> None:
    connection.isolation_level = None  # _begin starts transactions, not the driver
    for pragma in (f"busy_timeout = {PATIENCE}", "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if "psigrad_patience" in options:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {options['psigrad_patience']}")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("psigrad_write") else "BEGIN")
