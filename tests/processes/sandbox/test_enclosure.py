"""Parts of the enclosure: control groups that are limits or an error, user ids, what is hidden, and what may be called."""

from __future__ import annotations

import os
import socket

import pytest

from psigrad.processes.proc import began
from psigrad.processes.sandbox import Enclosure, SandboxError, cgroup, enclosure, seccomp


def test_a_limit_that_cannot_be_set_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "homes", lambda: {"pids": tmp_path / "gone"})
    with pytest.raises(SandboxError, match="limits of a sandbox could not be set"), cgroup.limit_group(4, 1 << 20):
        pass
    home = tmp_path / "there"
    home.mkdir()
    monkeypatch.setattr(cgroup, "homes", lambda: {"pids": home})
    with cgroup.limit_group(4, 1 << 20) as group:
        assert [file.parent.parent for file in group.files] == [home] and group.files[0].parent.is_dir()
    assert not list(home.iterdir())


def test_the_group_of_a_dead_owner_is_swept_also_where_its_number_is_anothers(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    own = f"{os.getpid()}-{began(os.getpid())}-0"
    for name in (own, f"{os.getpid()}-1-0", "999999999-5-0"):
        (tmp_path / "pids" / "psigrad" / name).mkdir(parents=True)
    cgroup.sweep()
    assert [folder.name for folder in (tmp_path / "pids" / "psigrad").iterdir()] == [own]


def test_user_ids_are_those_that_the_namespace_has_to_give(monkeypatch, tmp_path):
    users_here = enclosure.users_here
    for end, expected in ((1 << 32, (1_500_000_000, 1 << 28)), (65536, (61440, 4000)), (1, (0, 0)), (0, (0, 0))):
        for name in ("uid_map", "gid_map"):
            (tmp_path / name).write_text(f"0 1000 1\n1 100000 {end - 1}\n" if end else "")
        assert users_here(tmp_path) == expected
        monkeypatch.setattr(enclosure, "users_here", lambda expected=expected: expected)
        if expected[1]:
            users = {enclosure.user_of(7, slot) for slot in range(enclosure.USERS)}
            assert len(users) == enclosure.USERS and min(users) > 0 and max(users) < sum(expected)


def test_sockets_and_fifos_of_shown_folders_are_hidden(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_text("x")
    (tmp_path / "link").symlink_to("deep")
    os.mkfifo(tmp_path / "deep" / "fifo")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
    assert sorted(enclosure.special_files([str(tmp_path)])) == [str(tmp_path / "deep" / "fifo"), str(tmp_path / "socket")]
    line = enclosure.command("user", shown=[str(tmp_path)])
    assert line[line.index(str(tmp_path / "socket")) - 1] == "/dev/null"


def test_a_folder_is_not_walked_anew_for_each_worker(monkeypatch, tmp_path):
    """Within a minute; and what has gone since is not bound, which bwrap could not."""
    walked, now = [], [0.0]
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setattr(enclosure, "special_files", lambda folders: walked.append(folders) or [str(fifo)])
    monkeypatch.setattr(enclosure.time, "monotonic", lambda: now[0])
    for at, times, hidden in ((0, 1, True), (59, 1, True), (61, 2, True), (62, 2, False)):
        now[0] = at
        if not hidden:
            fifo.unlink()
        assert (str(fifo) in enclosure.command("user", shown=[str(tmp_path)])) is hidden
        assert len(walked) == times


def test_a_worker_sees_what_it_imports_from_and_never_everything(monkeypatch, tmp_path):
    monkeypatch.chdir("/")
    shown = Enclosure.of_worker("user", [str(tmp_path)]).shown
    assert "/" not in shown and str(tmp_path) in shown and os.path.dirname(os.path.dirname(enclosure.__file__)) != "/"
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) in Enclosure.of_worker("user").shown


def test_system_calls_are_refused_unless_they_are_listed():
    names = {call.split(":")[0] for call in seccomp._ALLOWED.split()}
    denied = {"socket", "connect", "bind", "ptrace", "mount", "bpf", "unshare", "setns", "keyctl", "clone3", "chroot"}
    assert {"read", "write", "execve", "futex"} <= names and not names & denied
    for column in (1, 2):
        numbers = [call.split(":")[column] for call in seccomp._ALLOWED.split()]
        known = [int(number) for number in numbers if number != "-"]
        assert len(known) == len(set(known)) > 180
        runs = list(seccomp._runs(known))
        assert {n for first, last in runs for n in range(first, last + 1)} == set(known)
