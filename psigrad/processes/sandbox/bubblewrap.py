"""Programs in bubblewrap: no network, no capabilities, no files but Python's, a user of their own where root allows it.

Each program gets a sandbox of its own, which is killed whole: everything that it started lives in its process namespace.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from psigrad.processes.sandbox import cgroup, seccomp
from psigrad.processes.sandbox.executor import Limits, Program, ProgramOutcome, SandboxError, Tier, TierName
from psigrad.processes.sandbox.pipes import exchange

DRIVER = Path(__file__).with_name("driver.py").read_text()
# Where a Python that is not the system's stands in the sandbox; its own place may lie where only its owner may look.
PYTHON = "/python"
_JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
# What bwrap itself is started with.
_ENVIRONMENT = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
# User ids that no account has: above what login managers and containers hand out, 64 for each process of ours.
_FIRST_USER, _USERS = 1_500_000_000, 64


def command(
    tier: TierName,
    user: int = _FIRST_USER,
    *,
    driver: int | None = None,
    rules: int | None = None,
    info: int | None = None,
    files_mb: int = 16,
) -> list[str]:
    """bwrap's part of the command line, with what drops to `user` behind it in the tier root.

    `driver` and `rules` are file descriptors that bwrap reads: of /driver.py and of the seccomp filter. To `info` it writes the
    number of the first process in the sandbox.
    """
    prefix = os.path.realpath(sys.base_prefix)
    size = ["--size", str(files_mb << 20)]
    spaces = ["--unshare-user", "--disable-userns"] if tier == "user" else []
    spaces += [f"--unshare-{space}" for space in ("ipc", "pid", "net", "uts", "cgroup-try")]
    line = [
        *("bwrap", *spaces, "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
        *("--ro-bind", "/usr", "/usr"),
        *(part for name in ("lib", "lib64", "bin", "sbin") for part in _like_the_root(name)),
        *([] if _of_the_system(prefix) else ["--ro-bind", prefix, PYTHON, "--setenv", "LD_LIBRARY_PATH", f"{PYTHON}/lib"]),
        *("--proc", "/proc", "--dev", "/dev", *size, "--perms", "1777", "--tmpfs", "/tmp"),
        *(*size, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
        # the same program prints the same set in the same order every time
        *("--setenv", "PYTHONHASHSEED", "0", "--chdir", "/tmp", "--hostname", "sandbox"),
    ]
    if driver is not None:
        line += ["--perms", "0444", "--ro-bind-data", str(driver), "/driver.py"]
    if rules is not None:
        line += ["--seccomp", str(rules)]
    if info is not None:
        line += ["--info-fd", str(info)]
    if tier == "root":
        line += [part for name in ("SETUID", "SETGID", "SETPCAP") for part in ("--cap-add", f"CAP_{name}")]
    line += ["--remount-ro", "/", "--"]
    if tier == "root":
        line += ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--no-new-privs"]
        line += ["--bounding-set=-all", "--inh-caps=-all"]
    return line


def interpreter() -> str:
    """Path of the running Python's executable inside the sandbox."""
    prefix, executable = os.path.realpath(sys.base_prefix), os.path.realpath(sys.executable)
    if _of_the_system(prefix):
        return executable
    return os.path.join(PYTHON, os.path.relpath(executable, prefix))


def _of_the_system(prefix: str) -> bool:
    return prefix == "/usr" or prefix.startswith("/usr/")


def _like_the_root(name: str) -> list[str]:
    """/lib and its kin: links into /usr where the system has merged them, else the folders themselves."""
    path = Path("/", name)
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []


def user_of(process: int, slot: int) -> int:
    """The user id of a process's sandbox, one for each program that runs at the same time: processes are counted by user."""
    return _FIRST_USER + process % (1 << 22) * _USERS + slot


def rlimits(limits: Limits) -> list[str]:
    """prlimit's part, behind the one that drops the user: processes are counted by user."""
    return [
        "prlimit",
        f"--as={limits.memory_mb << 20}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.files_mb << 20}",
        f"--cpu={int(limits.seconds) + 2}",
        *("--nofile=128", "--core=0", "--memlock=0", "--msgqueue=0", "--rtprio=0", "--nice=0"),
        "--",
    ]


class Bubblewrap:
    """An `Executor` on this machine. `workers` programs run at once."""

    def __init__(self, tier: Tier, workers: int | None = None) -> None:
        if tier.name == "none":
            raise SandboxError(f"There is no sandbox for code on this machine: {tier.why_not}")
        self.tier = tier
        self._filter = seccomp.program()
        self._slots = list(range(_USERS))
        self._free = threading.Lock()
        self._pool = ThreadPoolExecutor(min(_USERS, workers or len(os.sched_getaffinity(0))))

    def run(self, programs: Sequence[Program], limits: Limits) -> list[ProgramOutcome]:
        """See `Executor`."""
        return list(self._pool.map(self._one, programs, itertools.repeat(limits)))

    def _one(self, program: Program, limits: Limits) -> ProgramOutcome:
        with self._free:
            slot = self._slots.pop()
        try:
            return self._in_a_sandbox(program, limits, user_of(os.getpid(), slot))
        finally:
            with self._free:
                self._slots.append(slot)

    def _in_a_sandbox(self, program: Program, limits: Limits, user: int) -> ProgramOutcome:
        # bwrap, its init and setpriv's successor are processes of the tree too
        with cgroup.limit_group(limits.processes + 4, (limits.memory_mb + limits.files_mb) << 20) as group:
            task = memory_file(json.dumps({"source": program.source, "expressions": program.expressions}).encode())
            driver, rules = memory_file(DRIVER.encode()), None if self._filter is None else memory_file(self._filter)
            (answers, say), (told, info) = os.pipe(), os.pipe()
            given = [task, driver, say, info, *([] if rules is None else [rules])]
            line = command(self.tier.name, user, driver=driver, rules=rules, info=info, files_mb=limits.files_mb)
            python = [interpreter(), "-s", "-P", "-B", "-X", "utf8", "/driver.py", str(task), str(say)]
            joined = ["/bin/sh", "-c", _JOIN, "sh", *map(str, group.files), "--"]
            started = time.monotonic()
            try:
                process = subprocess.Popen(
                    [*joined, *line, *rlimits(limits), *python],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=given,
                    # not ours: in a user namespace the program may read that of bwrap, which is the first process it sees
                    env=_ENVIRONMENT,
                    start_new_session=True,
                )
            except OSError as error:
                os.close(answers)
                os.close(told)
                raise SandboxError(f"The sandbox could not be started ({error}).") from error
            finally:
                for descriptor in given:
                    os.close(descriptor)
            output = exchange(process, answers, program.stdin.encode(errors="surrogatepass"), limits)
            _wait_until_gone(told)
            seconds = time.monotonic() - started
            out_of_memory = group.out_of_memory()
        if not output.answers.startswith(b"started\n") and output.status == "exited" and not out_of_memory:
            raise SandboxError(f"The sandbox did not start the program: {output.stderr.decode(errors='replace').strip()[-300:]}")
        found = output.outcome(program, process.returncode, seconds)
        return replace(found, status="memory") if out_of_memory else found


def _wait_until_gone(told: int) -> None:
    """Until the first process in the sandbox has ended, and with it all others: killing bwrap only sets that going."""
    with os.fdopen(told, "rb") as stream:
        text = stream.read()
    if not text:
        return  # it never came so far
    stat = Path("/proc", str(json.loads(text)["child-pid"]), "stat")
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.001)
    raise SandboxError("A sandbox did not end within 10 s of being killed.")


def memory_file(content: bytes) -> int:
    """A file in memory with that content, to be read from its start."""
    descriptor = os.memfd_create("psigrad")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
