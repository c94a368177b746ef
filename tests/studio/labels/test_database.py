"""Transactions: when the lock is taken, what is undone, who is run again, and what a caller is told when nothing helps."""

from __future__ import annotations

import sqlite3
import threading
import time

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError
from timing import quickest

from psigrad_studio.labels import database, people, projects
from psigrad_studio.labels.projects import ProjectSettings
from psigrad_studio.labels.refusals import Busy
from psigrad_studio.labels.schema import LoginFailure, Project


@pytest.fixture
def file(fresh_file, tmp_path):
    path = tmp_path / "labels.db"
    path.write_bytes(fresh_file.read_bytes())
    return path


def test_a_writing_transaction_has_the_lock_from_its_beginning_and_a_reading_one_has_none(file):
    db, other = database.connect(file), sqlite3.connect(file, timeout=0, isolation_level=None)
    with db.session(write=True), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    with db.session(write=False) as session:
        session.execute(select(Project)).all()
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")


def test_a_lock_that_stays_is_said_and_nothing_is_changed(file, monkeypatch):
    monkeypatch.setattr(database, "PATIENCE", 20)
    db, other = database.connect(file), sqlite3.connect(file, isolation_level=None)
    me = people.local(db)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy, match="same key"):
        projects.create(db, me, ProjectSettings("one"))
    assert projects.mine(db, me) == []  # who reads is not kept waiting
    other.execute("ROLLBACK")
    projects.create(db, me, ProjectSettings("one"))


def test_opening_does_not_wait_for_who_is_writing(file):
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert quickest(lambda: database.connect(file).close(), 4) < 4
    other.execute("ROLLBACK")


def test_the_time_of_a_transaction_is_read_after_the_wait(file, clock):
    db = database.connect(file, clock)
    seen, inside = [], threading.Event()

    def late():
        inside.wait()
        with db.session(write=True) as session:
            seen.append(database.now(session))

    thread = threading.Thread(target=late)
    thread.start()
    with db.session(write=True) as session:
        inside.set()
        time.sleep(0.1)
        clock.advance(60)
        seen.append(database.now(session))
    thread.join()
    assert seen[1] - seen[0] == 60_000


def test_what_raises_is_undone(db):
    @database.writes
    def half(session):
        session.add(LoginFailure(folded="x", at=1))
        session.flush()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        half(db)
    with db.session(write=False) as session:
        assert session.scalars(select(LoginFailure)).all() == []


def test_the_loser_of_two_transactions_is_run_again_from_its_beginning(db):
    calls = []

    @database.writes
    def twice(session):
        calls.append(1)
        session.add(LoginFailure(folded="x", at=len(calls)))
        session.flush()
        if len(calls) < 3:
            raise IntegrityError("INSERT", {}, Exception("taken"))

    twice(db)
    with db.session(write=False) as session:
        assert [row.at for row in session.scalars(select(LoginFailure))] == [3]


def test_a_clash_that_never_ends_is_a_bug_and_keeps_its_traceback(db):
    @database.writes
    def never(session):
        session.execute(text("INSERT INTO projects (name) VALUES ('half a row')"))

    with pytest.raises(IntegrityError):
        never(db)


@pytest.mark.needs("postgresql")
@pytest.mark.parametrize("where", ["postgresql"], indirect=True)
def test_a_server_that_goes_away_is_said_and_the_next_call_works(db):
    @database.writes
    def struck(session):
        session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(Busy, match="was lost"):
        struck(db)
    assert people.local(db).admin
