"""Every test that takes `where`, `db` or what is built on them runs on SQLite and on PostgreSQL.

PostgreSQL's are left out without an installed server, and with PSIGRAD_TEST_DATABASES=sqlite; PSIGRAD_TEST_POSTGRES may name a
server that runs already ("postgresql://user@host/?dbname=").
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import private_postgres
import pytest
from scratch import MEMORY
from sqlalchemy import create_engine, text

from psigrad_studio.labels import assignments, database, intake, passwords, people, projects
from psigrad_studio.labels.assignments import LabelAnswer
from psigrad_studio.labels.invites import accept, invite
from psigrad_studio.labels.people import Person
from psigrad_studio.labels.projects import ProjectSettings

DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgresql"))]
_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SQLite sees all cases. PostgreSQL sees the first of each test of what is stored and read, and the first of each other file.
    The rest it sees with `make test-slow`, and so those of hundreds of votes whose figures are computed from the rows that either
    gives (`one_database`).
    """
    seen: set[str] = set()
    for item in items:
        if item.path.parent == Path(__file__).parent and "[postgresql" in item.name:
            stored = item.path.stem in ("test_assignments", "test_database", "test_tables", "test_export")
            name = item.nodeid.partition("[" if stored else "::")[0]
            if name in seen or item.get_closest_marker("one_database"):
                item.add_marker(pytest.mark.slow)
            seen.add(name)


class Clock:
    """Milliseconds that pass only when told to."""

    def __init__(self) -> None:
        self.at = 1_800_000_000_000

    def __call__(self) -> int:
        return self.at

    def advance(self, seconds: float) -> None:
        self.at += int(seconds * 1000)


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch):
    monkeypatch.setattr(passwords, "COST", passwords.ScryptCost(log_n=4, r=1, p=1))


@pytest.fixture(scope="session")
def postgres_server():
    given = os.environ.get("PSIGRAD_TEST_POSTGRES")
    if given:
        yield given
        return
    with private_postgres.server() as url:
        yield url


@pytest.fixture(scope="session")
def fresh_file(tmp_path_factory):
    """An SQLite file with empty tables, to copy."""
    path = tmp_path_factory.mktemp("labels") / "empty.db"
    database.connect(path).close()
    return path


@pytest.fixture(scope="session")
def administrate(postgres_server):
    """Has the server do what is no part of a transaction."""
    engine = create_engine(database._url(postgres_server + "postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield lambda statement: connection.execute(text(statement))
    engine.dispose()


@pytest.fixture(scope="session")
def postgres_template(postgres_server, administrate):
    administrate("CREATE DATABASE psigrad_template")
    database.connect(postgres_server + "psigrad_template").close()
    yield "psigrad_template"
    administrate("DROP DATABASE psigrad_template")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for a database."""
    with tempfile.TemporaryDirectory(prefix="psigrad-labels-", dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(params=DATABASES)
def empty(request, scratch):
    """A path or URL of a database with nothing in it."""
    if request.param == "sqlite":
        yield str(scratch / "new.db")
        return
    server, administrate = request.getfixturevalue("postgres_server"), request.getfixturevalue("administrate")
    name = f"psigrad_test_{os.getpid()}_{next(_numbers)}"
    administrate(f"CREATE DATABASE {name}")
    yield server + name
    administrate(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=DATABASES)
def where(request, scratch):
    """A path or URL of a database with empty tables."""
    if request.param == "sqlite":
        path = Path(shutil.copy(request.getfixturevalue("fresh_file"), scratch / "labels.db"))
        yield str(path)
        return
    server, administrate = request.getfixturevalue("postgres_server"), request.getfixturevalue("administrate")
    name = f"psigrad_test_{os.getpid()}_{next(_numbers)}"
    administrate(f"CREATE DATABASE {name} TEMPLATE {request.getfixturevalue('postgres_template')}")
    yield server + name
    administrate(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def db(where, clock):
    opened = database.connect(where, clock)
    yield opened
    opened.close()


@pytest.fixture
def owner(db):
    return people.local(db)


class Desk:
    """A project with people in it, and short ways to label."""

    def __init__(self, db, owner: Person, settings: ProjectSettings) -> None:
        self.db, self.owner, self.settings = db, owner, settings
        self.project = projects.create(db, owner, settings)
        self.keys = (f"{self.project}-key-{n:08}" for n in itertools.count())

    def person(self, name: str, role: str = "labeller") -> Person:
        token = invite(self.db, self.owner, self.project, role)
        return accept(self.db, token, name, f"{name} has a long password").person

    def add(self, rows, **making):
        return intake.add_rows(self.db, self.owner, self.project, rows, intake.TaskOptions(**{"shuffle": False} | making))

    def next(self, person):
        return assignments.next_task(self.db, person, self.project)

    def vote(self, person, shown, choice=None, key=None, **answer):
        return assignments.vote(self.db, person, shown.assignment, LabelAnswer(choice=choice, **answer), key or next(self.keys))

    def prefer(self, person, shown, text):
        """Choose the side that shows `text`."""
        return self.vote(person, shown, ("left", "right")[shown.completions.index(text)])

    def skip(self, person, shown, key=None):
        return assignments.skip(self.db, person, shown.assignment, key or next(self.keys))

    def undo(self, person, key=None):
        return assignments.undo(self.db, person, self.project, key or next(self.keys))

    def pairs(self, n, **making):
        return self.add([{"prompt": f"question {i}", "completions": [f"good {i}", f"bad {i}"]} for i in range(n)], **making)


@pytest.fixture
def desks(db, owner):
    """Makes projects: `desks(kind="ranking", overlap=2)`."""
    numbers = itertools.count(1)

    def make(**settings) -> Desk:
        return Desk(db, owner, ProjectSettings(**{"name": f"project {next(numbers)}", "seed": 7} | settings))

    return make
