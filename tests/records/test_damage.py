"""Damaged run folders: no whole row is lost, what is damaged is kept aside and named, and a finished run has its model."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from psigrad.language.recipes.finish import write_card
from psigrad.records import checkpoint, read, report, row_lines
from psigrad.records.run_folder import RunFolder, RunFolderError
from psigrad.runs import session
from psigrad.runs.journal import Journal
from psigrad.runs.result import Result

CONFIG = {"recipe": "sft", "run": {"max_steps": 10}}


def events(path, kind):
    rows = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("time", "kind")} for row in rows if row["kind"] == kind]


def written(path, steps=10):
    with RunFolder.open(path, CONFIG) as folder:
        folder.event("started", step=0)
        for step in range(1, steps + 1):
            folder.metrics({"step": step, "loss": 1 / step})
    return (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def taken_back(path, step, rows=None):
    with RunFolder.open(path, CONFIG) as folder:
        folder.rewind(step, {} if rows is None else {"metrics": rows})
        folder.metrics({"step": step + 1})
    aside = path / "metrics.jsonl.damaged"
    return (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:-1], aside.read_bytes() if aside.exists() else b""


@pytest.mark.parametrize(
    ("place", "now"),
    [
        (0, b'"step": 9'),  # larger than those behind it
        (4, b'"step": 99'),  # larger than the last
        (6, b'"step": 2'),  # smaller than those before it
        (3, b'"step": -4'),
        (3, b'"step": 4.5'),
        (3, b'"stop": 4'),
        (9, b'"step": 1'),
    ],
)
def test_a_step_that_cannot_stand_there_costs_its_own_row_alone(place, now, tmp_path):
    lines = written(tmp_path / "run")
    bad = lines[place].replace(b'"step": %d' % (place + 1), now)
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"".join([*lines[:place], bad, *lines[place + 1 :]]))
    kept, aside = taken_back(tmp_path / "run", 10, 10)
    assert kept == [*lines[:place], *lines[place + 1 :]]
    assert aside == bad
    assert events(tmp_path / "run", "rows_damaged") == [{"file": "metrics.jsonl", "lines": 1}]
    assert events(tmp_path / "run", "rows_missing") == [{"file": "metrics.jsonl", "rows": 1}]


def test_rows_behind_the_checkpoint_go_and_are_no_damage(tmp_path):
    lines = written(tmp_path / "run")
    assert taken_back(tmp_path / "run", 6, 6) == (lines[:6], b"")
    assert not events(tmp_path / "run", "rows_damaged") and not events(tmp_path / "run", "rows_missing")


def test_a_last_row_whose_step_grew_is_kept_aside_where_it_is_known_to_be_missing(tmp_path):
    lines = written(tmp_path / "run", 6)
    bad = lines[5].replace(b'"step": 6', b'"step": 7')
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"".join([*lines[:5], bad]))
    assert taken_back(tmp_path / "run", 6, 6) == (lines[:5], bad)


@pytest.mark.parametrize("cut", ["gone", "empty", "half"])
def test_rows_that_are_missing_are_told(cut, tmp_path, capsys):
    lines = written(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    left = {"gone": 0, "empty": 0, "half": 5}[cut]
    file.write_bytes(b"".join(lines[:left]))
    if cut == "gone":
        file.unlink()
    assert taken_back(tmp_path / "run", 10, 10) == (lines[:left], b"")
    assert events(tmp_path / "run", "rows_missing") == [{"file": "metrics.jsonl", "rows": 10 - left}]
    assert f"metrics.jsonl lacks {10 - left} of its 10 rows" in capsys.readouterr().err


VANISH = {
    "deleted": lambda file: file.unlink(),
    "replaced": lambda file: os.replace(shutil.copy(file, file.with_suffix(".copy")), file),
    "replaced by another": lambda file: (file.unlink(), file.write_text('{"step": 7}\n')),
}


@pytest.mark.parametrize("name", ["metrics", "rollouts", "events"])
@pytest.mark.parametrize("way", VANISH)
def test_a_file_of_rows_that_vanishes_during_a_run_is_written_again(way, name, tmp_path):
    path = tmp_path / "run"
    with RunFolder.open(path, CONFIG) as folder:
        for step in range(1, 7):
            folder.event("started", step=step)
            folder.metrics({"step": step})
            folder.rollouts([{"step": step}])
            if step == 3:
                VANISH[way](path / f"{name}.jsonl")
            if step == 4:
                folder.flush()
    for rows in ("metrics", "rollouts"):
        found = [json.loads(line)["step"] for line in (path / f"{rows}.jsonl").read_bytes().splitlines()]
        assert found == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in events(path, "started")] == [1, 2, 3, 4, 5, 6]
    assert events(path, "rows_restored") == [{"file": f"{name}.jsonl"}]
    assert (path / f"{name}.jsonl.replaced").exists() == (way != "deleted")


def test_rows_that_are_cut_off_during_a_run_are_told(tmp_path, capsys):
    path = tmp_path / "run"
    with RunFolder.open(path, CONFIG) as folder:
        for step in range(1, 7):
            folder.metrics({"step": step})
            if step == 4:
                os.truncate(path / "metrics.jsonl", 25)  # a byte of the third of rows of 12 bytes
                folder.flush()
        assert folder.rows["metrics"] == 4
    found = [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_bytes().splitlines()]
    assert found == [1, 2, 5, 6] and events(path, "rows_missing") == [{"file": "metrics.jsonl", "rows": 2}]
    assert "metrics.jsonl was shortened and lacks 2 rows" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["moved", "deleted", "another"])
def test_a_folder_that_is_moved_during_a_run_stops_it_at_the_next_save(way, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(RunFolderError, match="was moved or deleted during the run"), RunFolder.open(path, CONFIG) as folder:
        folder.event("started", step=0)
        os.rename(path, tmp_path / "elsewhere")
        if way == "deleted":
            shutil.rmtree(tmp_path / "elsewhere")
        if way == "another":
            path.mkdir()
        folder.flush()
    assert path.exists() == (way == "another") and not (way == "another" and any(path.iterdir()))


def test_negative_control_a_folder_that_stays_is_left_alone(tmp_path):
    written(tmp_path / "run")
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.rewind(8)
        folder.flush()
        folder.save_model(lambda beside: beside.mkdir())
    assert not events(tmp_path / "run", "rows_restored") and not events(tmp_path / "run", "rows_missing")


def test_a_whole_last_row_without_its_line_end_stays(tmp_path):
    lines = written(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"".join(lines)[:-1])
    assert taken_back(tmp_path / "run", 10, 10) == (lines, b"")


def test_a_run_with_a_torn_line_has_its_evaluations_and_its_history(tmp_path):
    lines = written(tmp_path / "run", 3)
    row = b'{"step": 3, "eval/loss": 0.5}\n'
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + b'{"step": 2, "lo\n' + b"\xff\n" + row)
    assert session.evaluations(tmp_path / "run")[1] == {"step": 3, "eval/loss": 0.5}
    assert [r["step"] for r in Result(tmp_path / "run", tmp_path, None).history] == [1, 2, 3]
    assert [r["step"] for r in read.load(tmp_path / "run").metrics] == [1, 2, 3]


@pytest.mark.parametrize("name", ["metrics.jsonl.damaged", ".metrics.jsonl.tmp", ".config.json.tmp", "report.html"])
def test_a_link_in_place_of_what_is_written_leads_nowhere(name, tmp_path):
    lines = written(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"".join([*lines[:5], b"torn\n", *lines[5:]]))
    (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(RunFolderError, match=f"{name} is a link"), RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.rewind(10, {"metrics": 10})
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl.damaged",
        ".metrics.jsonl.tmp",
        "rollouts-00000005-3.jsonl",
        "report.html",
        "rollouts.jsonl",
        "metrics.jsonl",
        "events.jsonl",
        "config.json",
        ".lock",
        "checkpoints",
        "model",
    ],
)
def test_a_pipe_in_a_run_folder_is_refused_and_hangs_nobody(name, tmp_path):
    written(tmp_path / "run")
    place = tmp_path / "run" / name
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    with pytest.raises(RunFolderError, match=f"{name} is not a (regular file|folder)"), RunFolder.open(tmp_path / "run", CONFIG):
        pass


def with_model(path):
    with RunFolder.open(path, CONFIG) as folder:
        journal = Journal(folder)
        folder.event("started", step=0)
        folder.metrics({"step": 1})
        meta = session.folder_facts(journal)
        checkpoint.save(folder.checkpoints, 1, lambda place: save_file({"w": torch.ones(9)}, place / "w.safetensors"), meta=meta)
        folder.save_model(lambda place: place.mkdir() or save_file({"w": torch.ones(9)}, place / "model.safetensors"))
        session.note_end(journal)
    return path / "model" / "model.safetensors"


@pytest.mark.parametrize("damage", [None, "gone", "folder gone", "cut", "flipped"])
def test_a_finished_run_is_finished_only_while_its_model_is_what_was_written(damage, tmp_path, capsys):
    weights = with_model(tmp_path / "run")
    content = weights.read_bytes()
    if damage == "gone":
        weights.unlink()
    elif damage == "folder gone":
        weights.unlink()
        weights.parent.rmdir()
    elif damage == "cut":
        weights.write_bytes(content[:-4])
    elif damage == "flipped":
        weights.write_bytes(content[:-1] + b"\x01")
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        assert folder.finished is (damage is None)
    assert len(events(tmp_path / "run", "model_damaged")) == (damage is not None)
    assert ("model/model.safetensors" in capsys.readouterr().err) is (damage is not None)
    if damage in ("cut", "flipped"):
        aside = tmp_path / "run" / "model.damaged" / "model.safetensors"
        assert aside.exists(), "what is there is kept aside"
        with RunFolder.open(tmp_path / "run", CONFIG) as folder:  # as after a kill before the model was written again
            assert not folder.finished and aside.exists()


def test_a_card_is_its_readers_to_change_and_a_checkpoint_with_one_is_whole(tmp_path):
    weights = with_model(tmp_path / "run")
    (weights.parent / "README.md").write_text("mine")
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        assert folder.finished
    place = checkpoint.save(tmp_path / "c", 1, lambda place: (place / "README.md").write_text("peft's") and None, meta={})
    assert "README.md" in checkpoint.verify(place)["files"]


def test_a_finished_run_without_weights_and_checkpoints_is_refused(tmp_path):
    with_model(tmp_path / "run").unlink()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with (
        pytest.raises(RunFolderError, match=r"its model is damaged.*no checkpoint"),
        RunFolder.open(tmp_path / "run", CONFIG),
    ):
        pass


@pytest.mark.parametrize("damage", ["{", "", "[1]", None])
def test_a_damaged_config_leaves_good_checkpoints_in_use(damage, tmp_path):
    with_model(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    before = file.read_bytes()
    file.unlink()
    if damage is not None:
        file.write_text(damage)
    with (
        pytest.raises(RunFolderError.__base__, match="max_steps was 10 and is 7"),
        RunFolder.open(tmp_path / "run", {**CONFIG, "run": {"max_steps": 7}}),
    ):
        pass
    allowed = {"run": {"max_steps": 7, "allow": ["max_steps", "allow"]}}
    with RunFolder.open(tmp_path / "run", {**CONFIG, **allowed}):  # whose start is refused later
        assert json.loads(file.read_text()) == json.loads(before)
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        assert folder.finished
    assert file.read_bytes() == before
    if damage is not None:
        assert (tmp_path / "run" / "config.json.damaged").read_text() == damage
    assert len(events(tmp_path / "run", "config_damaged")) == 1


def test_a_page_and_a_card_are_written_where_a_file_is_named_by_no_text(tmp_path):
    odd = os.fsdecode(b"rows\xff.jsonl")
    with RunFolder.open(tmp_path / "run", {**CONFIG, "data": {"dataset": odd}, "model": {"path": "base"}}) as folder:
        folder.event("started", step=0, command=f"psigrad sft --dataset {odd}")
        folder.metrics({"step": 1, "loss": 0.5})
        folder.save_model(lambda place: place.mkdir())
    write_card(tmp_path / "run")
    assert "rows\\udcff.jsonl" in (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert report.write([tmp_path / "run"]).read_text(encoding="utf-8")


def test_a_large_file_is_cut_where_a_checkpoint_saw_its_end_and_not_read(tmp_path, monkeypatch):
    lines = written(tmp_path / "run", 10)
    end = sum(map(len, lines[:7]))
    monkeypatch.setattr(row_lines, "_LARGE", 1)
    monkeypatch.setattr(row_lines, "read_lines", None)
    assert row_lines.truncate_large(tmp_path / "run" / "metrics.jsonl", 7, 7, end) == (7, 0)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b"".join(lines[:7])


@pytest.mark.parametrize(
    ("step", "rows", "end"),
    [(6, 7, 0), (7, 7, 1), (7, 7, -1), (7, 7, 10**6), (7, None, 0)],
    ids=["a row of a later step ends there", "no row ends there", "in a row", "the file is shorter", "nothing is known"],
)
def test_a_large_file_whose_end_is_not_what_a_checkpoint_saw_is_read(step, rows, end, tmp_path, monkeypatch):
    lines = written(tmp_path / "run", 10)
    monkeypatch.setattr(row_lines, "_LARGE", 1)
    assert row_lines.truncate_large(tmp_path / "run" / "metrics.jsonl", step, rows, sum(map(len, lines[:7])) + end) is None


def test_a_run_that_goes_on_cuts_its_large_files(tmp_path, monkeypatch):
    monkeypatch.setattr(row_lines, "_LARGE", 1)
    path = tmp_path / "run"
    with RunFolder.open(path, CONFIG) as folder:
        journal = Journal(folder)
        folder.rollouts([{"step": 1}, {"step": 2}])
        meta = session.folder_facts(journal)
        checkpoint.save(folder.checkpoints, 2, lambda place: save_file({"w": torch.ones(9)}, place / "w.safetensors"), meta=meta)
        folder.rollouts([{"step": 3}])
    assert meta["ends"] == {"rollouts": 24}  # two lines of 12 bytes
    with RunFolder.open(path, CONFIG) as folder:
        monkeypatch.setattr(row_lines, "truncate_to_step", lambda f, *_: pytest.fail("read") if "roll" in f.name else (0, 0))
        session.newest_checkpoint(Journal(folder))
        assert folder.rows["rollouts"] == 2
    assert (path / "rollouts.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
