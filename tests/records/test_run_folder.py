"""The run folder: one holder, whole lines, strict JSON, and no other run's settings."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from tiny_jobs import forked

from psigrad.config import OnlineConfig
from psigrad.config.fields import RECORDED
from psigrad.errors import UserError
from psigrad.records import checkpoint, read
from psigrad.records.rows import FORMAT
from psigrad.records.run_folder import RunFolder, RunFolderError, to_line

CONFIG = {
    "recipe": "grpo",
    "optim": {"learning_rate": 1e-3, "betas": [0.9, 0.99]},
    "run": {"max_steps": 5, "seed": 0, "output_dir": "a"},
    "reward_timeout": 10.0,
}


def rows(folder: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def with_checkpoint(path: Path, step: int = 2) -> Path:
    return checkpoint.save(path / "checkpoints", step, lambda folder: (folder / "a").write_text("x") and None, meta={})


def changed(name: str, value: object) -> dict:
    config = json.loads(json.dumps(CONFIG))
    *outer, last = name.split(".")
    at = config
    for key in outer:
        at = at[key]
    at[last] = value
    return config


def held(path: Path) -> int:
    """A process that holds the folder's lock until it is killed; its number."""
    pid = os.fork()
    if pid == 0:
        try:
            with RunFolder.open(path, CONFIG):
                (path.parent / "held").write_text("")
                time.sleep(600)
        finally:
            os._exit(1)
    end = time.monotonic() + 60
    while not (path.parent / "held").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return pid


def test_a_second_process_is_told_who_holds_the_folder_and_a_dead_holder_lets_go(tmp_path):
    path = tmp_path / "run"
    pid = held(path)
    try:
        with (
            pytest.raises(RunFolderError, match=f"is in use by process {pid} on {socket.gethostname()}"),
            RunFolder.open(path, CONFIG),
        ):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with RunFolder.open(path, CONFIG) as folder:
        folder.metrics({"step": 1})
    assert rows(path) == [{"step": 1}]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_said_and_used(number, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fcntl.flock", refuses(number))
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.metrics({"step": 1})
    assert rows(tmp_path / "run") == [{"step": 1}]
    assert f"{tmp_path / 'run'} is on a file system without locks; make sure" in capsys.readouterr().err


def test_negative_control_a_lock_that_breaks_otherwise_is_no_such_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", refuses(errno.EIO))
    with pytest.raises((RunFolderError, OSError)), RunFolder.open(tmp_path / "run", CONFIG):
        pass


def refuses(number):
    def flock(*given):
        raise OSError(number, os.strerror(number))

    return flock


def test_the_lock_is_let_go_at_the_end_and_after_an_error(tmp_path):
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError), RunFolder.open(tmp_path / "run", CONFIG) as folder:
            folder.event("started", step=0)
            raise ZeroDivisionError
    with pytest.raises(UserError), RunFolder.open(tmp_path / "run", changed("run.seed", 1)):
        pass
    with RunFolder.open(tmp_path / "run", CONFIG):
        pass


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("optim.learning_rate", 2e-3, "optim.learning_rate was 0.001 and is 0.002"),
        ("optim.betas", (0.9, 0.95), r"optim.betas was \[0.9, 0.99\] and is \[0.9, 0.95\]"),
        ("recipe", "sft", "recipe was 'grpo' and is 'sft'"),
        ("run.seed", 1, "run.seed was 0 and is 1"),
        ("run.fresh", 1, "run.fresh was None and is 1"),
    ],
)
def test_another_setting_is_refused_by_name_with_both_values(name, value, said, tmp_path):
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.event("started", step=0)
    with pytest.raises(UserError, match=said), RunFolder.open(tmp_path / "run", changed(name, value)):
        pass
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"format": FORMAT, **CONFIG}, (
        "a refused run changes nothing"
    )


def test_the_advice_names_every_setting_that_differs(tmp_path):
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.event("started", step=0)
    other = {**changed("optim.learning_rate", 2e-3), "recipe": "sft"}
    with (
        pytest.raises(UserError, match=r"--allow optim\.learning_rate recipe accepts the changes"),
        RunFolder.open(tmp_path / "run", other),
    ):
        pass


def test_a_run_that_was_refused_before_it_began_leaves_a_folder_that_takes_other_settings(tmp_path):
    path, other = tmp_path / "run", changed("optim.learning_rate", 2e-3)
    with RunFolder.open(path, CONFIG) as folder:
        folder.event("failed", reason='UserError: no file; "kind": "started"')
    with RunFolder.open(path, other) as folder:
        folder.metrics({"step": 0, "eval/loss": 1.0})
    with pytest.raises(UserError, match=r"learning_rate was 0\.002 and is 0\.001"), RunFolder.open(path, CONFIG):
        pass


@pytest.mark.parametrize(("name", "value"), [("run.output_dir", "b"), ("reward_timeout", 1.0)])
def test_settings_that_change_no_figure_may_change_and_are_recorded(name, value, tmp_path):
    for config in (CONFIG, changed(name, value)):
        with RunFolder.open(tmp_path / "run", config, settings=OnlineConfig) as folder:
            folder.event("started", step=0)
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"format": FORMAT, **changed(name, value)}
    found = [row["changes"] for row in rows(tmp_path / "run", "events") if row["kind"] == "settings_changed"]
    assert found == ([] if name == "run.output_dir" else [{name: [10.0, value]}])


@dataclass(frozen=True)
class NewOptim:
    fused: bool = False


@dataclass(frozen=True)
class NewSettings:
    optim: NewOptim = NewOptim()
    reward_timeout: Annotated[float, RECORDED] = 10.0


def test_a_setting_that_an_older_psigrad_did_not_have_is_as_it_is_by_default(tmp_path):
    old = {name: value for name, value in CONFIG.items() if name != "reward_timeout"}
    for given, refused in ((False, False), (True, True)):
        path = tmp_path / str(given)
        with RunFolder.open(path, old, settings=NewSettings) as folder:
            folder.event("started", step=0)
        now = {**old, "optim": {**old["optim"], "fused": given}}
        expected = pytest.raises(UserError, match=r"optim\.fused was False and is True") if refused else contextlib.nullcontext()
        with expected, RunFolder.open(path, now, settings=NewSettings):
            pass


def test_a_folder_without_a_format_goes_on_and_one_of_a_newer_psigrad_is_refused(tmp_path):
    path = tmp_path / "run"
    with RunFolder.open(path, CONFIG):
        with_checkpoint(path)
    (path / "config.json").write_text(json.dumps(CONFIG))  # as before there were formats
    with RunFolder.open(path, CONFIG):
        pass
    assert json.loads((path / "config.json").read_text())["format"] == FORMAT
    for number in (FORMAT + 1, "2"):
        (path / "config.json").write_text(json.dumps({**CONFIG, "format": number}))
        with pytest.raises(UserError, match="update psigrad"), RunFolder.open(path, CONFIG):
            pass
        with pytest.raises(UserError, match="update psigrad"):
            read.load(path)


def test_a_checkpoint_of_a_newer_psigrad_is_not_passed_over_but_refused(tmp_path, monkeypatch):
    with_checkpoint(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "FORMAT", FORMAT + 1)
    with_checkpoint(tmp_path, 2)
    with pytest.raises(UserError, match="step-00000002 has format"):
        checkpoint.latest(tmp_path / "checkpoints")
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    with_checkpoint(tmp_path, 2)
    assert checkpoint.latest(tmp_path / "checkpoints").step == 2


def test_a_folder_of_something_else_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds files that this command did not write"), RunFolder.open(tmp_path, CONFIG):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def die_at(at: int, *calls) -> None:
    """Kill this process at the at-th of these calls, each an owner and a name."""
    count = [0]

    def wrap(owner, name):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            count[0] += 1
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    for owner, name in calls:
        wrap(owner, name)


def test_a_kill_at_any_moment_of_the_opening_leaves_a_folder_that_opens(tmp_path):
    def open_and_die(path: Path, at: int) -> None:
        die_at(at, *((os, name) for name in ("fsync", "replace", "mkdir", "open", "rename")))
        with RunFolder.open(path, CONFIG):
            pass

    landed = 0
    for at in range(1, 60):
        path = tmp_path / str(at)
        status = forked(lambda path=path, at=at: open_and_die(path, at))
        with RunFolder.open(path, CONFIG) as folder:
            folder.metrics({"step": 1})
        assert rows(path) == [{"step": 1}]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        landed += 1
    assert 4 <= landed < 59


def test_a_damaged_config_is_one_sentence(tmp_path):
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.event("started", step=0)
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"config\.json is damaged"), RunFolder.open(tmp_path / "run", CONFIG):
        pass


def test_resume_never_and_must(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(RunFolderError, match="resume is 'must'"), RunFolder.open(path, CONFIG, "must"):
        pass
    with RunFolder.open(path, CONFIG, "never"):
        pass
    saved = with_checkpoint(path)
    with RunFolder.open(path, CONFIG, "must"), pytest.raises(RunFolderError, match="in use"), RunFolder.open(path, CONFIG):
        pass
    with pytest.raises(RunFolderError, match="resume is 'never'"), RunFolder.open(path, CONFIG, "never"):
        pass
    (saved / "a").unlink()
    with pytest.raises(RunFolderError, match="no usable checkpoint"), RunFolder.open(path, CONFIG, "must"):
        pass


def test_rewinding_gives_back_the_bytes_of_then(tmp_path):
    path = tmp_path / "run"
    kept = {}
    with RunFolder.open(path, CONFIG) as folder:
        for step in range(5):
            folder.metrics({"step": step, "loss": 1 / (step + 1)})
            folder.timings({"step": step, "step_time": 0.1})
            folder.rollouts([{"step": step, "text": f"é\ud800 {i}"} for i in range(3)])
            folder.event("saved", step=step)
            kept[step] = {n: (path / f"{n}.jsonl").read_bytes() for n in ("metrics", "timings", "rollouts")}
    with (path / "rollouts.jsonl").open("ab") as stream:
        stream.write(b'{"step": 2, "text": "torn')
    with (path / "metrics.jsonl").open("ab") as stream:
        stream.write(b"\0" * 100)
    for step in (4, 2, 0):
        with RunFolder.open(path, CONFIG) as folder:
            folder.rewind(step)
            assert {n: (path / f"{n}.jsonl").read_bytes() for n in kept[step]} == kept[step]
            folder.metrics({"step": step + 1})
        assert rows(path)[-1] == {"step": step + 1}
    with RunFolder.open(path, CONFIG) as folder:
        folder.rewind(-1)
    assert [(path / f"{n}.jsonl").stat().st_size for n in ("metrics", "timings", "rollouts")] == [0, 0, 0]
    assert len(rows(path, "events")) == 5


def test_a_damaged_line_costs_no_row_behind_it(tmp_path):
    path = tmp_path / "run"
    with RunFolder.open(path, CONFIG) as folder:
        for step in range(1, 33):
            folder.metrics({"step": step})
    file = path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[4] = b"\xff" + lines[4][1:]
    file.write_bytes(b"".join(lines) + b'{"step": 33, "los')
    with RunFolder.open(path, CONFIG) as folder:
        folder.rewind(30)
    kept = file.read_bytes().splitlines(keepends=True)
    assert kept == [*lines[:4], *lines[5:30]], "the rows behind it stay"
    assert (path / "metrics.jsonl.damaged").read_bytes() == lines[4]
    assert [(e["file"], e["lines"]) for e in rows(path, "events") if e["kind"] == "rows_damaged"] == [("metrics.jsonl", 1)]


@pytest.mark.parametrize("name", [".lock", "config.json", "metrics.jsonl", "checkpoints"])
def test_a_link_in_a_run_folder_is_refused_and_what_it_leads_to_untouched(name, tmp_path):
    path, target = tmp_path / "run", tmp_path / "precious"
    with RunFolder.open(path, CONFIG):
        pass
    target.write_text("precious")
    if (path / name).is_dir():
        (path / name).rmdir()
    else:
        (path / name).unlink()
    (path / name).symlink_to(target)
    with pytest.raises(RunFolderError, match="is a link"), RunFolder.open(path, CONFIG):
        pass
    assert target.read_text() == "precious"


def test_a_torn_last_event_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "run"
    with RunFolder.open(path, CONFIG) as folder:
        folder.event("started")
    with (path / "events.jsonl").open("ab") as stream:
        stream.write(b'{"time": 1, "ki')
    with RunFolder.open(path, CONFIG) as folder:
        folder.event("resumed")
    assert [row["kind"] for row in rows(path, "events")] == ["started", "resumed"]


def test_a_path_below_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    said = r"file is a file; choose a new or an empty folder"
    with pytest.raises(UserError, match=said), RunFolder.open(tmp_path / "file" / "run", CONFIG):
        pass
    with pytest.raises(UserError, match="file is a file; choose a new"), RunFolder.open(tmp_path / "file", CONFIG):
        pass


def test_a_read_only_folder_is_one_sentence(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(RunFolderError, match="cannot be written: Read-only file system"),
        RunFolder.open(tmp_path / "run", CONFIG),
    ):
        pass


def test_a_full_disk_while_appending_is_one_sentence_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "run"

    def work() -> None:
        with (
            pytest.raises(RunFolderError, match=r"cannot be written: File too large \(\d+ bytes are free\)"),
            RunFolder.open(path, CONFIG) as folder,
        ):
            folder.metrics({"step": 1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            folder.metrics({"step": 2, "text": "x" * 2000})
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert rows(path) == [{"step": 1}]
        with RunFolder.open(path, CONFIG) as folder:
            folder.metrics({"step": 2, "text": "x" * 2000})

    assert forked(work) == 0
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_a_full_disk_while_writing_the_model_keeps_the_old_one(tmp_path):
    def full(folder: Path) -> None:
        folder.mkdir()
        raise Exception("No space left on device (os error 28)")

    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.save_model(model_of("old"))
        with pytest.raises(RunFolderError, match="No space left on device"):
            folder.save_model(full)
    assert (tmp_path / "run" / "model" / "weights").read_text() == "old"


def model_of(text: str):
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(text)
        (folder / "config").write_text(text)

    return write


def test_a_kill_at_any_moment_of_saving_the_model_leaves_a_whole_one(tmp_path):
    def save_and_die(path: Path, at: int) -> None:
        with RunFolder.open(path, CONFIG) as folder:
            die_at(at, (os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "write_text"))
            folder.save_model(model_of("new"))

    outcomes = []
    for at in range(1, 60):
        path = tmp_path / str(at)
        with RunFolder.open(path, CONFIG) as folder:
            folder.save_model(model_of("old"))
        status = forked(lambda path=path, at=at: save_and_die(path, at))
        with RunFolder.open(path, CONFIG):
            pass
        outcomes.append({p.name: p.read_text() for p in (path / "model").iterdir()})
        assert [p.name for p in path.glob(".model*")] == []
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    old, new = ({"weights": t, "config": t} for t in ("old", "new"))
    assert outcomes[0] == old and outcomes[-1] == new and all(outcome in (old, new) for outcome in outcomes)
    assert 8 <= len(outcomes) < 59


@pytest.mark.parametrize(
    "text", ["\udfff\ud800", "a\0b", "\u202eevil\u2066", "x" * 1_000_000, "line\nline\r\u2028", "</script>", "é😀"]
)
def test_any_text_survives_as_one_line(text, tmp_path):
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        folder.rollouts([{"step": 1, text: text, "nested": [{"t": text}]}])
        folder.rollouts([])
    raw = (tmp_path / "run" / "rollouts.jsonl").read_bytes()
    assert raw.count(b"\n") == 1 and raw.isascii() and raw.endswith(b"\n")
    assert json.loads(raw) == {"step": 1, text: text, "nested": [{"t": text}]}


def test_numbers_that_json_lacks_are_strings():
    line = to_line({"a": float("nan"), "b": [float("inf"), -float("inf")], "c": (1.5, True, None), 3: {"d": 0.1}})

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(line, parse_constant=refuse) == {
        "a": "NaN",
        "b": ["Infinity", "-Infinity"],
        "c": [1.5, True, None],
        "3": {"d": 0.1},
    }


def test_floats_come_back_bit_for_bit():
    values = [0.1, 1 / 3, 1e-300, 5e-324, -0.0, 2.0**60 + 1]
    assert [v.hex() for v in json.loads(to_line({"v": values}))["v"]] == [v.hex() for v in values]


def test_flush_reaches_the_disk(tmp_path, monkeypatch):
    synced = []
    original = os.fsync
    with RunFolder.open(tmp_path / "run", CONFIG) as folder:
        monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), original(fd)))
        folder.metrics({"step": 1})
        folder.flush()
    assert {Path(name).name for name in synced} == {"metrics.jsonl", "timings.jsonl", "rollouts.jsonl", "events.jsonl"}


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_trained(tmp_path):
    odd = tmp_path / os.fsdecode(b"r\xff")
    with pytest.raises(RunFolderError, match="is not UTF-8"), RunFolder.open(odd, CONFIG):
        pass
    assert not odd.exists()
