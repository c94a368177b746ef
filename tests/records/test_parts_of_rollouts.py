"""rollouts.jsonl begins anew when it is large, and a run that goes back finds its rows wherever they are."""

from __future__ import annotations

import json
import time

import pytest

from psigrad.records import row_lines, run_folder
from psigrad.records.read import load
from psigrad.records.run_folder import RunFolder


def row(step: int, k: int) -> dict:
    return {"step": step, "kind": "train", "row": k, "k": k, "reward": 1.0, "status": "scored", "prompt": "a", "completion": "b"}


class Checkpoint:
    """What a checkpoint's manifest says of the rows."""

    def __init__(self, folder, step):
        self.step, self.rows, self.ends = step, dict(folder.rows), folder.ends()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(run_folder, "PART", 1000)


def go_on(folder, steps, keep=0) -> list[Checkpoint]:
    """A checkpoint behind each step, whose rows are written before, as a run does."""
    found = []
    for step in steps:
        folder.metrics({"step": step})
        folder.rollouts([row(step, k) for k in range(3)])
        folder.flush(step, keep)
        found.append(Checkpoint(folder, step))
    return found


def steps_in(path) -> list[int]:
    return [r["step"] for file in row_lines.rollout_files(path) for r in row_lines.read_steps(file)]


def test_a_large_file_is_put_aside_and_everybody_reads_on(small, tmp_path):
    with RunFolder.open(tmp_path / "run", {"recipe": "online"}) as folder:
        go_on(folder, range(1, 11))
    parts = row_lines.parts_of(tmp_path / "run")
    assert [(part.last, part.rows) for part in parts] == [(3, 9), (6, 9), (9, 9)]
    assert steps_in(tmp_path / "run") == [step for step in range(1, 11) for _ in range(3)]
    assert sorted(load(tmp_path / "run").rewards) == list(range(1, 11))


def test_so_many_rows_are_kept(small, tmp_path):
    with RunFolder.open(tmp_path / "run", {"recipe": "online"}) as folder:
        go_on(folder, range(1, 11), keep=10)
    assert steps_in(tmp_path / "run") == [step for step in range(4, 11) for _ in range(3)]


@pytest.mark.parametrize("back", range(10))
def test_a_run_goes_back_to_any_checkpoint(small, tmp_path, back):
    """Before, at and behind each place where the file began anew; then the run is what it would have been."""
    with RunFolder.open(tmp_path / "run", {"recipe": "online"}) as folder:
        saved = go_on(folder, range(1, 11))
    with RunFolder.open(tmp_path / "run", {"recipe": "online"}) as folder:
        one = saved[back]
        folder.rewind(one.step, one.rows, one.ends)
        assert folder.rows["rollouts"] == one.rows["rollouts"]
        assert steps_in(tmp_path / "run") == [step for step in range(1, one.step + 1) for _ in range(3)]
        go_on(folder, range(one.step + 1, 11))
    assert [(part.last, part.rows) for part in row_lines.parts_of(tmp_path / "run")] == [(3, 9), (6, 9), (9, 9)]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert not kinds


def test_a_kill_between_the_new_file_and_its_checkpoint_loses_nothing(small, tmp_path):
    with RunFolder.open(tmp_path / "run", {"recipe": "online"}) as folder:
        saved = go_on(folder, range(1, 3))
        folder.rollouts([row(3, k) for k in range(3)])
        before = Checkpoint(folder, 3)  # made without a new file, as by an older psigrad
        folder.flush(3)
    for one in (before, saved[-1]):
        with RunFolder.open(tmp_path / "run", {"recipe": "online"}) as folder:
            folder.rewind(one.step, one.rows, one.ends)
            assert steps_in(tmp_path / "run") == [step for step in range(1, one.step + 1) for _ in range(3)]
        assert not row_lines.parts_of(tmp_path / "run") or one is before


def test_going_back_to_the_beginning_leaves_no_row(small, tmp_path):
    with RunFolder.open(tmp_path / "run", {"recipe": "online"}) as folder:
        go_on(folder, range(1, 8))
    with RunFolder.open(tmp_path / "run", {"recipe": "online"}) as folder:
        folder.rewind(-1)
    assert steps_in(tmp_path / "run") == [] and not row_lines.parts_of(tmp_path / "run")


def test_going_back_in_a_large_file_reads_its_end_alone(tmp_path, monkeypatch):
    """100 MB, of which a gigabyte took a quarter of a minute to read."""
    path, line = tmp_path / "run", run_folder.to_line({**row(1, 0), "completion": "x" * 1_000_000})
    with RunFolder.open(path, {"recipe": "online"}) as folder:
        for _ in range(100):
            folder._append("rollouts", line)
        one = Checkpoint(folder, 1)
        folder.rollouts([row(2, 0)])
    monkeypatch.setattr(row_lines, "truncate_to_step", lambda file, *_: pytest.fail("read") if "roll" in str(file) else (0, 0))
    with RunFolder.open(path, {"recipe": "online"}) as folder:
        begin = time.process_time()
        folder.rewind(one.step, one.rows, one.ends)
        assert time.process_time() - begin < 0.5 and (path / "rollouts.jsonl").stat().st_size == one.ends["rollouts"]
