"""The choice of a sandbox: the tier of this machine, the executor of a run, and the enclosure of a worker process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache

from psigrad import extras
from psigrad.processes.sandbox import cgroup, seccomp
from psigrad.processes.sandbox.bubblewrap import DRIVER, Bubblewrap, rlimits, task_of
from psigrad.processes.sandbox.enclosure import Enclosure, command, memory_file, user_of, users_here
from psigrad.processes.sandbox.executor import Executor, Limits, Program, ProgramOutcome, SandboxError, Tier, TierName
from psigrad.processes.sandbox.pipes import exchange, start


class Unsafe:
    """An `Executor` with limits of time and memory but no protection, for users who explicitly allow it.

    A program can read, write and delete whatever its user can.
    """

    def run(self, programs: Sequence[Program], limits: Limits) -> list[ProgramOutcome]:
        """Run each program without a sandbox, and return their outcomes in order. See `Executor`."""
        return [self._one(program, limits) for program in programs]

    def _one(self, program: Program, limits: Limits) -> ProgramOutcome:
        task = memory_file(task_of(program, limits))
        answers, say = os.pipe()
        # without a separate user id, a limit on processes would count all of the user's processes
        bounds = [part for part in rlimits(program, limits) if not part.startswith("--nproc")]
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="psigrad-code-") as folder:
            variables = {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
            python = [sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", DRIVER, str(task), str(say)]
            process = start([*bounds, *python], [task, say], answers, cwd=folder, env=variables)
            output = exchange(process, answers, program, limits)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return output.outcome(program, process.returncode, time.monotonic() - started)


INSTALL = "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap util-linux; Fedora: dnf install bubblewrap)"


@cache
def tier_of_this_machine() -> Tier:
    """Return the best tier of sandbox in which a test program runs on this machine.

    If root has no spare user ids, as in a rootless container, the tier is at most `user`.
    """
    root = os.geteuid() == 0 and users_here()[1] > 0
    missing = [name for name in ("bwrap", "prlimit", *(("setpriv",) if root else ())) if shutil.which(name) is None]
    if missing:
        return Tier("none", why_not=f"{', '.join(missing)} not found; {INSTALL}.")
    reason = ""
    names: tuple[TierName, ...] = ("root", "user") if root else ("user",)
    for name in names:
        line = command(name, user_of(os.getpid(), 0))
        tried = subprocess.run([*line, "/bin/true"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
        if tried.returncode == 0:
            return Tier(name, tuple(cgroup.homes()), seccomp.program() is not None)
        reason = reason or (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
    return Tier(
        "none",
        why_not=f"bwrap cannot start here ({reason}); allow unprivileged user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0), or in a container run it with "
        "--security-opt seccomp=unconfined --cap-add SYS_ADMIN.",
    )


def executor_for(url: str = "", *, token: str = "", allow_unsafe_code: bool = False) -> Executor:
    """Return the executor of programs: the service at `url` if given, otherwise this machine's sandbox.

    If the machine has no sandbox, return `Unsafe` if `allow_unsafe_code` is True, otherwise raise `SandboxError`.
    """
    if url:
        remote: Executor = extras.load("sandbox").RemoteExecutor(url, token)
        return remote
    tier = tier_of_this_machine()
    if tier.name != "none":
        return Bubblewrap(tier)
    if allow_unsafe_code:
        return Unsafe()
    raise SandboxError(
        f"There is no sandbox for code on this machine: {tier.why_not} Or set allow_unsafe_code, and the programs that the model "
        "writes run with your rights."
    )


def enclosure_of_workers(files: Sequence[str] = (), *, sockets: bool = False) -> Enclosure:
    """Return the enclosure in which worker processes run a user's code.

    A worker can read Python, its import folders, its working folder and `files`, and can write to its own temporary folder.
    With `sockets`, it can connect to its own sockets, and to the servers of Unix sockets among `files`. Raise `SandboxError` if
    this machine has no working bubblewrap.
    """
    tier = tier_of_this_machine()
    if tier.name == "none":
        raise SandboxError(f"environment_sandbox is set and this machine has no sandbox: {tier.why_not}")
    return Enclosure.of_worker(tier.name, files, sockets=sockets)
