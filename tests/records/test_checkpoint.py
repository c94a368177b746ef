"""A checkpoint is whole or not there: every crash point, every kind of damage, every kind of hostility."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_jobs import forked

from psigrad.records import checkpoint
from psigrad.records.checkpoint import CheckpointError, latest, prune, save, verify

FILES = ("model.safetensors", "nested/config.json", "state.json", "manifest.json")


def write_of(value: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        checkpoint.save_tensors(folder / "model.safetensors", {"w": torch.full((50,), float(value))})
        (folder / "nested").mkdir()
        (folder / "nested" / "config.json").write_text(json.dumps({"value": value}))
        (folder / "state.json").write_text(json.dumps({"value": value}))

    return write


def make(root: Path, step: int, value: int | None = None) -> Path:
    return save(root, step, write_of(step if value is None else value), meta={"torch": "test"})


def value_of(path: Path) -> int:
    """What a checkpoint holds, which must be the same in all its files."""
    values = {
        int(checkpoint.load_tensors(path / "model.safetensors")["w"][-1]),
        json.loads((path / "nested" / "config.json").read_text())["value"],
        json.loads((path / "state.json").read_text())["value"],
    }
    assert len(values) == 1, f"{path} is torn: {values}"
    return values.pop()


def at_call(
    count: int, act: Callable[[str], None], calls: tuple[str, ...] = ("fsync", "rename", "mkdir", "unlink", "rmdir")
) -> list[str]:
    """`act` runs before call number `count` (from 1) of anything that changes the disk; the calls' names are collected."""
    seen: list[str] = []

    def watch(owner, name: str, relevant: Callable[..., bool] = lambda *args, **kwargs: True) -> None:
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            if relevant(*args, **kwargs):
                seen.append(name)
                if len(seen) == count:
                    act(name)
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    def writes(file, mode="r", *args, **kwargs) -> bool:
        return any(letter in mode for letter in "wax+")

    for name in calls:
        watch(os, name)
    watch(checkpoint, "save_file")
    watch(builtins, "open", writes)
    watch(io, "open", writes)
    watch(Path, "write_text")
    return seen


def die(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def boundaries(root: Path, work: Callable[[], object], **calls) -> int:
    """How many boundaries `work` has, counted in a fork."""
    told = root.parent / "boundaries"

    def counted() -> None:
        seen = at_call(0, die, **calls)
        work()
        shown = list(seen)
        told.write_text(str(len(shown)))

    assert forked(counted) == 0
    return int(told.read_text())


def killed_at(count: int, work: Callable[[], object]) -> None:
    def doomed() -> None:
        at_call(count, die)
        work()

    status = forked(doomed)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"the kill at boundary {count} did not land"


# What is on the disk before the save that is killed, the step and value of that save, and what may be found after.
SCENES = {
    "the first": ((), 5, {None, 55}),
    "after another": ((3,), 5, {3, 55}),
    "in place of the same step": ((3, 5), 5, {5, 55}),
    "in place of the only one": ((5,), 5, {5, 55}),
}


MOST = "in place of the same step"
"""The scene with most on the disk; those with less with `make test-slow`."""


@pytest.mark.parametrize("scene", [pytest.param(s, marks=() if s == MOST else pytest.mark.slow) for s in SCENES])
def test_a_kill_at_any_boundary_of_a_save_leaves_a_whole_checkpoint(scene, tmp_path, record_property):
    before, step, allowed = SCENES[scene]

    def fresh(name: str) -> Path:
        root = tmp_path / name / "checkpoints"
        root.mkdir(parents=True)
        for earlier in before:
            make(root, earlier)
        return root

    def save_and_prune(root: Path) -> Callable[[], object]:
        return lambda: (make(root, step, 55), prune(root, 1))

    count_in = fresh("count")
    total = boundaries(count_in, save_and_prune(count_in))
    assert total > 15
    record_property("count", total)
    outcomes = set()
    for k in range(1, total + 1):
        root = fresh(f"kill{k}")
        killed_at(k, save_and_prune(root))
        found = latest(root)
        outcome = value_of(found.path) if found.path else None
        assert outcome in allowed, f"killed at boundary {k} of {total}"
        outcomes.add(outcome)
        assert all("never finished" in line or "missing" in line for line in found.ignored)
        prune(root, 1)
        left = [path.name for path in root.iterdir()]
        assert len(left) == (0 if found.path is None else 1), f"{left} left after a kill at boundary {k} and a prune"
        make(root, step, 56)
        prune(root, 1)
        assert value_of(latest(root).path) == 56 and [p.name for p in root.iterdir()] == ["step-00000005"]
    assert outcomes == allowed, "both sides of the commit were seen"


def test_a_save_without_the_rename_would_be_noticed(tmp_path, monkeypatch):
    """Negative control: written in place, some crash points do leave a torn folder."""
    root = tmp_path / "checkpoints"
    make(root, 5)

    def in_place() -> None:
        write_of(55)(
            Path(shutil.copytree(root / "step-00000005", root / "step-00000006", ignore=shutil.ignore_patterns("nested")))
        )

    last = boundaries(root, in_place)
    shutil.rmtree(root / "step-00000006")
    killed_at(last, in_place)
    assert (root / "step-00000006").exists()
    found = latest(root)
    assert found.step == 5 and found.ignored


@pytest.mark.parametrize("file", FILES)
def test_every_truncation_is_found_and_named(file, tmp_path, record_property):
    record_property("count", 16)
    make(tmp_path, 3)
    path = make(tmp_path, 5)
    whole = (path / file).read_bytes()
    for sixteenth in range(16):
        (path / file).write_bytes(whole[: len(whole) * sixteenth // 16])
        with pytest.raises(CheckpointError, match=re.escape(file)):
            verify(path)
        found = latest(tmp_path)
        assert found.step == 3 and len(found.ignored) == 1 and file in found.ignored[0]
    (path / file).write_bytes(whole)
    assert latest(tmp_path).step == 5


def test_every_bit_flip_is_found_and_named(tmp_path, record_property):
    record_property("count", 200)
    path = make(tmp_path, 5)
    rng = random.Random(0)
    for _ in range(200):
        file = rng.choice(FILES)
        whole = (path / file).read_bytes()
        bad = bytearray(whole)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        (path / file).write_bytes(bad)
        with pytest.raises(CheckpointError, match=re.escape(file)):
            verify(path)
        (path / file).write_bytes(whole)
    verify(path)


@pytest.mark.parametrize("file", FILES)
def test_every_deletion_is_found_and_named(file, tmp_path):
    path = make(tmp_path, 5)
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=re.escape(file)):
        verify(path)


def test_the_manifest_keeps_what_it_was_told(tmp_path):
    path = save(tmp_path, 5, write_of(5), meta={"torch": "2.x", "step": 99})
    assert verify(path)["torch"] == "2.x" and verify(path)["step"] == 5


def forged(path: Path, change: Callable[[dict], None]) -> None:
    """A manifest that is consistent in itself: the work of a person, not of a disk."""
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    checkpoint._write_manifest(path / "manifest.json", {k: v for k, v in content.items() if k != "sha256"})


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "nested/../../outside", "link", "linked/outside", ""])
def test_a_manifest_that_leads_out_is_refused(name, tmp_path):
    path = make(tmp_path / "root", 5)
    (tmp_path / "root" / "outside").write_text("x")
    (path / "link").symlink_to(tmp_path / "root" / "outside")
    (path / "linked").symlink_to(tmp_path / "root")
    entry = {"bytes": 1, "sha256": checkpoint.sha256(tmp_path / "root" / "outside")}
    forged(path, lambda content: content["files"].update({name: entry}))
    with pytest.raises(CheckpointError, match=r"outside the checkpoint|is missing"):
        verify(path)


@pytest.mark.parametrize("extra", ["pytorch_model.bin", "nested/evil.py"])
def test_files_that_nobody_wrote_are_refused(extra, tmp_path):
    path = make(tmp_path, 5)
    (path / extra).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=re.escape(extra)):
        verify(path)


def test_symlinks_are_refused(tmp_path):
    path = make(tmp_path / "root", 5)
    shutil.move(path / "state.json", tmp_path / "elsewhere")
    (path / "state.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        verify(path)
    (tmp_path / "root" / "step-00000009").symlink_to(path)
    assert latest(tmp_path / "root").path is None


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "{}", '{"files": 3}', "\x00", '{"step": 5, "files": {}}'])
def test_a_manifest_that_is_none_is_refused(text, tmp_path):
    path = make(tmp_path, 5)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        verify(path)


def test_a_renamed_checkpoint_is_refused(tmp_path):
    os.rename(make(tmp_path, 5), tmp_path / "step-00000007")
    assert latest(tmp_path).path is None
    with pytest.raises(CheckpointError, match="belongs to step 5"):
        verify(tmp_path / "step-00000007")


class Canary:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def test_a_pickle_is_refused_and_not_executed(tmp_path):
    marker, file = tmp_path / "executed", tmp_path / "model.safetensors"
    file.write_bytes(pickle.dumps(Canary(marker)))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        checkpoint.load_tensors(file)
    assert not marker.exists()
    pickle.loads(file.read_bytes()).close()
    assert marker.exists(), "the canary does sing where it is unpickled"


def test_a_huge_header_is_refused_without_taking_the_memory(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checkpoint.load_tensors(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


DISK_FULL = (
    r"could not be written to \S+checkpoints: .*No space left.*; "
    r"\d+ bytes were written and \d+ bytes are free; the largest earlier one takes \d+"
)


def test_a_full_disk_at_any_write_leaves_the_older_checkpoint_and_a_clear_error(tmp_path, record_property):
    root = tmp_path / "checkpoints"
    make(root, 3)

    def full(name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def refused(k: int) -> Callable[[], None]:
        def work() -> None:
            seen = at_call(k, full, **takes_room)
            with pytest.raises(CheckpointError, match=DISK_FULL):
                make(root, 5)
            assert len(seen) >= k
            assert value_of(latest(root).path) == (3 if k < commit else 5), "at the last boundary it has its name already"
            make(root, 5)
            assert value_of(latest(root).path) == 5

        return work

    takes_room = {"calls": ("fsync", "rename")}  # and every opening of a file to write
    commit = boundaries(root, lambda: make(root, 5), **takes_room)
    record_property("count", commit)
    shutil.rmtree(root / "step-00000005")
    for k in range(1, commit + 1):
        assert forked(refused(k)) == 0, f"at boundary {k} of {commit}"
        shutil.rmtree(root / "step-00000005")
        assert [p.name for p in root.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("limit", [100, 300])
def test_a_real_limit_on_file_size_is_one_sentence(limit, tmp_path):
    """RLIMIT_FSIZE makes write(2) itself fail, also in the Rust code of safetensors."""
    root = tmp_path / "checkpoints"
    make(root, 3)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"File too large.*bytes were written and \d+ bytes are free"):
            make(root, 5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert value_of(latest(root).path) == 3
        make(root, 5)

    assert forked(work) == 0
    assert value_of(latest(root).path) == 5 and len(list(root.iterdir())) == 2


def test_an_error_of_the_tokenizers_library_about_the_disk_is_one_sentence(tmp_path):
    def write(folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # what its Rust code raises

    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, 5, write, meta={})


def test_another_error_is_not_dressed_up_and_leaves_nothing(tmp_path):
    def write(folder: Path) -> None:
        (folder / "a").write_text("x")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 5, write, meta={})
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be written to .*file/checkpoints: .*Not a directory"):
        make(tmp_path / "file" / "checkpoints", 5)


def test_pruning_keeps_the_newest_that_verify(tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("keep", [-1, 0, 1])
def test_pruning_never_leaves_less_than_one_good(keep, tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    for bad in (3, 4):
        (tmp_path / f"step-{bad:08d}" / "state.json").unlink()
    prune(tmp_path, keep)
    assert latest(tmp_path).step == 2
    assert not (tmp_path / "step-00000001").exists()


def test_pruning_a_folder_without_a_good_one_deletes_none(tmp_path):
    (make(tmp_path, 1) / "state.json").unlink()
    prune(tmp_path, 1)
    assert (tmp_path / "step-00000001").exists()
    prune(tmp_path / "nowhere", 1)


def test_pruning_leaves_what_is_not_ours(tmp_path):
    make(tmp_path, 1)
    for name in ("step-1", "step-00000002.mine", ".step-00000001.tmp", "notes"):
        (tmp_path / name).mkdir()
    prune(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == 5


def test_checkpoints_survive_another_process(tmp_path):
    """Written there, verified here."""
    assert forked(lambda: save(tmp_path, 7, lambda folder: (folder / "a").write_text("x") and None, meta={})) == 0
    assert latest(tmp_path).step == 7


def test_a_checkpoint_is_read_and_summed_once(tmp_path, monkeypatch):
    read: list[str] = []
    sha256 = checkpoint.sha256
    monkeypatch.setattr(checkpoint, "sha256", lambda path: (read.append(path.name), sha256(path))[1])
    made = make(tmp_path, 1)
    assert sorted(read) == ["config.json", "model.safetensors", "state.json"]
    assert latest(tmp_path).path == made and len(read) == 3
    prune(tmp_path, 1)
    assert verify(made)["step"] == 1 and len(read) == 3
    copied = shutil.copytree(tmp_path, tmp_path / "copy") / made.name  # which this process knows no better than another one
    assert latest(tmp_path / "copy").path == copied and verify(copied)["step"] == 1 and len(read) == 6


def test_a_file_is_summed_while_the_disk_writes_it(tmp_path, monkeypatch):
    """A sum and the wait for the disk meet: each goes on only when the other has begun, so one behind the other waits in vain."""
    meeting = threading.Barrier(2)
    for name in ("sha256", "sync"):
        original = getattr(checkpoint, name)

        def met(path: Path, original: Callable[[Path], object] = original) -> object:
            if path.suffix == ".safetensors" and not meeting.broken and path.name not in arrived:
                meeting.wait(30.0)
                arrived.append(path.name)
            return original(path)

        monkeypatch.setattr(checkpoint, name, met)
    arrived: list[str] = []
    assert verify(make(tmp_path, 1))["step"] == 1
    assert not meeting.broken and arrived


def test_a_save_computes_no_more_than_the_plain_write_and_one_sum(tmp_path):
    """By processor time, which other programs on the machine do not lengthen; in the quickest of some tries."""
    tensors = {str(i): torch.randn(1 << 20) for i in range(8)}
    plain = tmp_path / "plain.safetensors"

    def write() -> None:
        checkpoint.save_tensors(plain, tensors)
        checkpoint.sync(plain)

    def spent(work: Callable[[], object]) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    def saved(step: int) -> None:
        save(tmp_path / "runs", step, lambda folder: checkpoint.save_tensors(folder / "w.safetensors", tensors), meta={})

    for step in range(8):
        least = spent(write) + spent(lambda: checkpoint.sha256(plain))
        whole = spent(partial(saved, step))
        if whole < 1.3 * least + 0.01:
            return
    raise AssertionError(f"{whole:.3f} s of processor time for {least:.3f}")


def test_a_file_that_was_touched_since_is_read_again(tmp_path):
    made = make(tmp_path, 1)
    data = bytearray((made / "model.safetensors").read_bytes())
    data[-1] ^= 1
    times = (made / "model.safetensors").stat()
    (made / "model.safetensors").write_bytes(data)
    os.utime(made / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert latest(tmp_path).path is None
