"""Backups of labels: made while others write, put back; a damaged database is named."""

from __future__ import annotations

import os
import shutil
import stat
import threading

import pytest
from sqlalchemy import func, select
from timing import until

from psigrad import cli
from psigrad.errors import UserError
from psigrad_studio.labels import database, intake, people, projects
from psigrad_studio.labels.label_backup import backup, restore
from psigrad_studio.labels.projects import ProjectSettings
from psigrad_studio.labels.refusals import Damaged
from psigrad_studio.labels.schema import StoredPrompt


@pytest.fixture
def place(tmp_path):
    return tmp_path / "labels.db"


def filled(place, rows: int = 20):
    """An open database with a project of so many prompts, and its number."""
    db = database.connect(place)
    owner = people.local(db)
    project = projects.create(db, owner, ProjectSettings("one", seed=1))
    add(db, project, range(rows))
    return db, project


def add(db, project, numbers) -> None:
    rows = [{"prompt": f"question {n}", "completions": ["x", "y"]} for n in numbers]
    intake.add_rows(db, people.local(db), project, rows)


def count(place) -> int:
    db = database.connect(place)
    try:
        with db.session(write=False) as session:
            return session.scalar(select(func.count()).select_from(StoredPrompt))
    finally:
        db.close()


def spoil(place) -> None:
    """Overwrite pages in the middle of the file."""
    size = place.stat().st_size
    with place.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))


def test_a_backup_while_others_write_is_one_moment_of_the_database(place, tmp_path):
    db, project = filled(place, 1)
    stop = threading.Event()
    written = []

    def write() -> None:
        while not stop.is_set():
            numbers = range(1 + 3 * len(written), 4 + 3 * len(written))
            add(db, project, numbers)  # three at once, or none
            written.append(numbers)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for n in range(5):
            until(lambda n=n: len(written) > n)
            before = 1 + 3 * len(written)
            backup(place, tmp_path / f"copy-{n}.db")
            after = 4 + 3 * len(written)
            assert before <= count(tmp_path / f"copy-{n}.db") <= after and count(tmp_path / f"copy-{n}.db") % 3 == 1
    finally:
        stop.set()
        writer.join()
        db.close()
    assert len(written) >= 5
    assert stat.S_IMODE((tmp_path / "copy-0.db").stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.partial*"))


def test_a_backup_never_replaces_a_file(place, tmp_path):
    filled(place)[0].close()
    (tmp_path / "copy.db").write_text("mine")
    with pytest.raises(UserError, match="exists; name a new file"):
        backup(place, tmp_path / "copy.db")
    assert (tmp_path / "copy.db").read_text() == "mine"
    with pytest.raises(UserError, match="There are no labels"):
        backup(tmp_path / "nothing.db", tmp_path / "other.db")
    with pytest.raises(UserError, match="cannot be written"):
        backup(place, tmp_path / "no" / "such" / "folder.db")


def test_a_restore_brings_everything_back_and_keeps_what_was_there(place, tmp_path):
    db, project = filled(place)
    backup(place, tmp_path / "copy.db")
    add(db, project, range(20, 30))
    kept = restore(tmp_path / "copy.db", place)  # while the studio has it open
    with db.session(write=False) as session:
        assert session.scalar(select(func.count()).select_from(StoredPrompt)) == 20
    add(db, project, range(50, 55))
    db.close()
    assert count(place) == 25 and count(kept) == 30 and count(tmp_path / "copy.db") == 20


def test_a_restore_where_nothing_was(place, tmp_path):
    filled(place)[0].close()
    backup(place, tmp_path / "copy.db")
    assert restore(tmp_path / "copy.db", tmp_path / "elsewhere" / "labels.db") is None
    assert count(tmp_path / "elsewhere" / "labels.db") == 20
    assert stat.S_IMODE((tmp_path / "elsewhere" / "labels.db").stat().st_mode) == 0o600


def test_a_damaged_database_is_named_and_gives_way_to_a_backup(place, tmp_path):
    filled(place, 200)[0].close()
    backup(place, tmp_path / "copy.db")
    spoil(place)
    with pytest.raises(
        UserError,
        match=r"labels\.db is damaged \(.+\)\. Stop the studio and put a backup in its place: `psigrad studio --restore",
    ):
        database.connect(place)
    with pytest.raises(UserError, match="is damaged"):
        backup(place, tmp_path / "of damage.db")
    assert not (tmp_path / "of damage.db").exists()
    bad = place.read_bytes()
    kept = restore(tmp_path / "copy.db", place)
    assert "damaged" in kept.name and kept.read_bytes() == bad and count(place) == 200


def test_damage_that_appears_while_the_studio_runs_is_named(place):
    db, _ = filled(place, 200)
    with db.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    db.engine.dispose()
    spoil(place)
    with pytest.raises(Damaged, match=r"labels\.db is damaged"):
        people.local(db)


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_what_is_no_backup_is_refused_and_nothing_is_touched(place, tmp_path, content):
    filled(place)[0].close()
    (tmp_path / "copy.db").write_bytes(content)
    before = sorted(file.name for file in tmp_path.iterdir())
    with pytest.raises(UserError, match=r"copy\.db is (damaged|not a database of labels)"):
        restore(tmp_path / "copy.db", place)
    with pytest.raises(UserError, match="There is no backup"):
        restore(tmp_path / "nothing.db", place)
    assert count(place) == 20 and sorted(file.name for file in tmp_path.iterdir() if "copy" not in file.name) == [
        name for name in before if "copy" not in name
    ]


def test_the_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    filled(tmp_path / "labels.db")[0].close()
    assert cli.main(["studio", "--backup", "copy.db"]) == 0
    assert "labels.db was copied to copy.db" in capsys.readouterr().out
    assert cli.main(["studio", "runs", "--restore", "copy.db"]) == 0
    assert "labels.db was restored from copy.db. The previous labels are in labels.db.before-restore-" in capsys.readouterr().out
    assert cli.main(["studio", "--backup", "copy.db"]) == 2
    assert cli.main(["studio", "--backup", "a.db", "--restore", "copy.db"]) == 2
    assert cli.main(["studio", "--backup", "a.db", "--database", "postgresql://x@y/z"]) == 2
    assert "pg_dump" in capsys.readouterr().err
    assert cli.main(["studio", "--database", str(tmp_path / "copy.db"), "--backup", "b.db"]) == 0
    assert count(tmp_path / "b.db") == 20


def test_negative_control_a_plain_copy_of_the_file_misses_what_is_in_the_log(place, tmp_path):
    db, _ = filled(place)
    shutil.copy(place, tmp_path / "plain.db")
    backup(place, tmp_path / "copy.db")
    db.close()
    assert count(tmp_path / "plain.db") == 0 and count(tmp_path / "copy.db") == 20
