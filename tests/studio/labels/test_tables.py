"""The start of a database on SQLite and on PostgreSQL, and the triggers that guard its tables."""

from __future__ import annotations

import pytest
from at_once import at_once
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError

from psigrad.errors import UserError
from psigrad_studio.labels import database


def test_an_empty_database_gets_its_tables_and_opening_again_changes_nothing(empty):
    for _ in range(2):
        opened = database.connect(empty)
        with opened.session(write=False) as session:
            assert session.execute(text("SELECT number FROM label_version")).all() == [(1,)]
        opened.close()


def test_servers_that_start_together_create_the_tables_once(empty):
    at_once(8, lambda n: database.connect(empty).close())


@pytest.mark.parametrize(
    ("change", "said"),
    [("UPDATE label_version SET number = 2", "another version"), ("DROP TABLE label_version", "tables of another program")],
)
def test_a_database_of_another_version_or_another_program_is_refused(empty, change, said):
    opened = database.connect(empty)
    with opened.session(write=True) as session:
        session.execute(text(change))
    opened.close()
    with pytest.raises(UserError, match=said):
        database.connect(empty)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE votes SET choice = 'b'",
        "UPDATE votes SET reason = NULL",
        "DELETE FROM votes",
        "DELETE FROM audit",
        "UPDATE audit SET action = 'nothing'",
        "UPDATE assignments SET display = '[1, 0, 2]'",
        "UPDATE assignments SET user_id = user_id + 1",
        "INSERT INTO votes (project_id, assignment_id, user_id, key, digest, action, shown_at, decided_at)"
        " SELECT project_id, assignment_id, user_id, 'key-nothing', 'd', 'vote', 1, 5 FROM votes",
    ],
)
def test_votes_and_display_orders_are_final_whoever_writes(desks, db, statement):
    desk = desks()
    desk.pairs(1)
    desk.vote(desk.owner, desk.next(desk.owner), "left")
    with pytest.raises(IntegrityError, match=r"append-only|final|ck_votes_answer"), db.session(write=True) as session:
        session.execute(text(statement))


def test_replacing_or_truncating_votes_is_refused_too(desks, db):
    desk = desks()
    desk.pairs(1)
    desk.vote(desk.owner, desk.next(desk.owner), "left")
    sqlite = db.engine.dialect.name == "sqlite"
    columns = "project_id, assignment_id, user_id, key, digest, action, choice, shown_at, decided_at"
    statements = [
        f"INSERT OR REPLACE INTO votes (id, {columns}) SELECT id, {columns.replace('choice', repr('b'))} FROM votes",
        f"INSERT OR REPLACE INTO votes ({columns}) SELECT {columns.replace('choice', repr('b'))} FROM votes",
    ]
    for statement in statements if sqlite else ["TRUNCATE votes CASCADE", "TRUNCATE audit"]:
        with pytest.raises(DBAPIError, match="append-only"), db.session(write=True) as session:
            session.execute(text(statement))
    with db.session(write=False) as session:
        assert session.execute(text("SELECT choice FROM votes")).scalar_one() in ("a", "b")


def test_negative_control_other_rows_may_change(desks, db):
    desk = desks()
    desk.pairs(1)
    desk.next(desk.owner)
    with db.session(write=True) as session:
        session.execute(text("UPDATE assignments SET shown_at = 5"))
        session.execute(text("DELETE FROM login_failures"))


@pytest.mark.parametrize(
    "where_to, said",
    [
        ("mysql://host/labels", "expected a path, sqlite:/// or postgresql://"),
        ("sqlite://", "need a file"),
        (":memory:", "need a file"),
        ("postgresql://nobody@/?host=/nowhere&dbname=x", "cannot be opened"),
        ("http://", "labels' URL"),
        ("/proc/labels.db", "cannot be stored"),
    ],
)
def test_a_place_that_is_none_is_one_sentence(where_to, said):
    with pytest.raises(UserError, match=said):
        database.connect(where_to)


def test_a_file_that_is_no_database_is_one_sentence(tmp_path):
    (tmp_path / "labels.db").write_text("what a lovely day" * 100)
    with pytest.raises(UserError, match=r"is damaged \(file is not a database\)"):
        database.connect(tmp_path / "labels.db")


def test_the_file_is_for_its_owner_alone_and_safe_against_a_power_cut(tmp_path):
    opened = database.connect(tmp_path / "new" / "labels.db")
    assert (tmp_path / "new" / "labels.db").stat().st_mode & 0o777 == 0o600
    with opened.session(write=False) as session:
        pragma = {
            name: session.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous", "foreign_keys")
        }
        assert pragma | {"busy_timeout": session.execute(text("PRAGMA busy_timeout")).scalar()} == {
            "journal_mode": "wal",
            "synchronous": 2,
            "foreign_keys": 1,
            "busy_timeout": 5000,
        }
    opened.close()
