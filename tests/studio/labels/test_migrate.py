"""Migrations: from nothing to the tables of schema.py, on both databases, and the triggers that guard them."""

from __future__ import annotations

import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Column, MetaData, Text, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from psigrad.errors import UserError
from psigrad_studio.labels import assignments, checks, database, export, migrate, people, projects, results
from psigrad_studio.labels.assignments import LabelAnswer
from psigrad_studio.labels.schema import Base


def described(connection):
    """Columns, keys, indexes and checks of every table, as the database itself tells them."""
    found = inspect(connection)
    return {
        table: {
            "columns": {c["name"]: (str(c["type"]), c["nullable"]) for c in found.get_columns(table)},
            "primary": found.get_pk_constraint(table),
            "foreign": sorted(
                (f["name"] or "", f["constrained_columns"], f["referred_table"]) for f in found.get_foreign_keys(table)
            ),
            "unique": sorted((u["name"] or "", u["column_names"]) for u in found.get_unique_constraints(table)),
            "indexes": sorted((i["name"] or "", i["column_names"], i["unique"]) for i in found.get_indexes(table)),
            "checks": sorted((c["name"] or "", c["sqltext"]) for c in found.get_check_constraints(table)),
        }
        for table in found.get_table_names()
        if table != "alembic_version"
    }


@pytest.fixture
def by_orm(tmp_path, request, where):
    """The tables as the ORM would make them, in a database of the same kind."""
    if "postgresql" not in where:
        engine = database._sqlite(database._url(tmp_path / "orm.db"))
        with engine.execution_options(psigrad_write=True).begin() as connection:
            Base.metadata.create_all(connection)
            yield described(connection)
        engine.dispose()
        return
    opened = database.connect(where)
    with opened.engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA orm"))
        connection.execute(text("SET search_path TO orm"))
        Base.metadata.create_all(connection)
        found = described(connection)
    opened.close()
    yield found


def test_migrated_tables_are_those_of_the_orm(db, by_orm):
    with db.session(write=False) as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert described(session.connection()) == by_orm


def test_negative_control_a_forgotten_column_or_check_is_noticed(db):
    changed = MetaData()
    for table in Base.metadata.tables.values():
        table.to_metadata(changed)
    changed.tables["votes"].append_column(Column("mood", Text()))
    with db.session(write=False) as session:
        context = MigrationContext.configure(session.connection())
        assert [step[0] for step in compare_metadata(context, changed)] == ["add_column"]


def test_an_empty_database_is_migrated_and_opening_again_changes_nothing(empty):
    for _ in range(2):
        opened = database.connect(empty)
        with opened.session(write=False) as session:
            assert session.execute(text("SELECT version_num FROM alembic_version")).all() == [("0002",)]
        opened.close()


FIRST = [
    "INSERT INTO users (id, name, folded, admin, created_at) VALUES (1, 'Ann', 'ann', true, 1)",
    "INSERT INTO projects (id, name, kind, instructions, overlap, lease_ms, ties, both_bad, strengths, seed, created_at)"
    " VALUES (1, 'old', 'pair', '\"Which?\"', 1, 600000, true, true, 2, 7, 1)",
    "INSERT INTO memberships VALUES (1, 1, 'admin', 1)",
    "INSERT INTO prompts VALUES (1, 1, 'h', '\"q\"', '{}')",
    "INSERT INTO completions VALUES (1, 1, 'a', '\"x\"'), (2, 1, 'b', '\"y\"')",
    "INSERT INTO tasks VALUES (1, 1, 1, 'h', 0, 1)",
    "INSERT INTO items VALUES (1, 0, 1), (1, 1, 2)",
    "INSERT INTO seats VALUES (1, 1, 1, 0, 1, NULL, true)",
    "INSERT INTO assignments VALUES (1, 1, 1, 1, '[1, 0]', 1, NULL)",
    "INSERT INTO votes (id, project_id, assignment_id, user_id, key, digest, action, choice, strength, reason, shown_at,"
    " decided_at, supersedes) VALUES (3, 1, 1, 1, 'key-one-1', 'd', 'vote', 'a', 2, '\"why\"', 1, 2, NULL),"
    " (4, 1, 1, 1, 'key-two-2', 'd', 'undo', NULL, NULL, NULL, 1, 3, 3),"
    " (7, 1, 1, 1, 'key-tri-3', 'd', 'vote', 'b', NULL, NULL, 1, 4, NULL)",
    "UPDATE assignments SET vote_id = 7",
]


def test_a_database_of_the_first_version_keeps_its_votes_and_goes_on(empty):
    """Known answers of an old project stay ordinary tasks, and its votes what they were: append-only, with the next number."""
    url = database._url(empty)
    engine = database._sqlite(url) if "postgresql" not in empty else create_engine(url)
    with engine.execution_options(psigrad_write=True).begin() as connection:
        migrate.upgrade(connection, to="0001")
        for statement in FIRST:
            connection.exec_driver_sql(statement)
        if "postgresql" in empty:
            connection.exec_driver_sql(
                "SELECT setval('votes_id_seq', 7), setval('assignments_id_seq', 1), setval('projects_id_seq', 1)"
            )
            connection.exec_driver_sql("SELECT setval('users_id_seq', 1), setval('tasks_id_seq', 1), setval('seats_id_seq', 1)")
        before = connection.exec_driver_sql(
            "SELECT id, key, action, choice, strength, reason, supersedes FROM votes ORDER BY id"
        ).all()
    engine.dispose()
    opened = database.connect(empty)
    with opened.session(write=False) as session:
        connection = session.connection()
        rows = connection.exec_driver_sql(
            "SELECT id, key, action, choice, strength, reason, supersedes FROM votes ORDER BY id"
        ).all()
        assert rows == before and connection.exec_driver_sql("SELECT answers FROM votes").scalars().all() == [None] * 3
        assert session.connection().dialect.name != "sqlite" or connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    for statement in ("UPDATE votes SET choice = 'a'", "DELETE FROM votes"):
        with pytest.raises(IntegrityError, match="append-only"), opened.session(write=True) as session:
            session.execute(text(statement))
    with pytest.raises(IntegrityError, match="ck_votes_answer"), opened.session(write=True) as session:
        session.execute(text("INSERT INTO votes (project_id, assignment_id, user_id, key, digest, action, shown_at, decided_at)"
                             " VALUES (1, 1, 1, 'key-nothing', 'd', 'vote', 1, 5)"))  # fmt: skip
    ann = people.Person(1, "Ann", True)
    settings = projects.info(opened, ann, 1).settings
    assert (settings.questions, settings.overall, settings.checks, settings.instructions) == ((), True, 0, "Which?")
    assert checks.faults(opened) == []
    assert [row["chosen"] for row in export.preference(opened, ann, 1).rows] == ["y"]
    assert results.agreement(opened, ann, 1).gold["Ann"].n == 1
    assert assignments.undo(opened, ann, 1, "key-undo-4").vote > 7
    shown = assignments.next_task(opened, ann, 1)
    assert shown.completions == ["y", "x"]
    projects.change(opened, ann, 1, {"questions": [{"name": "tone"}]})
    assignments.vote(
        opened, ann, shown.assignment, LabelAnswer(choice="left", answers={"tone": {"value": "right"}}), "key-vote-5"
    )
    assert export.dump(opened, ann, 1)[-1]["answers"] == {"tone": {"kind": "better", "value": "a"}}
    assert checks.faults(opened) == []
    opened.close()


def test_servers_that_start_together_migrate_once(empty):
    failures = []

    def start():
        try:
            database.connect(empty).close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_every_migration_has_one_parent_and_there_is_one_head():
    directory = migrate.scripts()
    assert len(directory.get_heads()) == 1 and len(directory.get_bases()) == 1


def test_a_database_of_a_newer_version_is_refused(where):
    opened = database.connect(where)
    with opened.session(write=True) as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    opened.close()
    with pytest.raises(UserError, match="newer psigrad"):
        database.connect(where)


def test_a_database_of_another_program_is_refused_and_left_alone(empty):
    opened = database.connect(empty)
    with opened.session(write=True) as session:
        session.execute(text("DROP TABLE alembic_version"))
    opened.close()
    with pytest.raises(UserError, match="tables of its own"):
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
    ],
)
def test_votes_and_display_orders_are_final_whoever_writes(desks, db, statement):
    desk = desks()
    desk.pairs(1)
    desk.vote(desk.owner, desk.next(desk.owner), "left")
    with pytest.raises(IntegrityError, match=r"append-only|final"), db.session(write=True) as session:
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
        ("/proc/labels.db", "cannot be kept"),
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
