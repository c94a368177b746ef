"""The executor of programs in bubblewrap: no network, no capabilities, no files but Python's, a separate user if root starts it.

Each program gets its own sandbox. All processes that it started are in its process namespace, and are killed with it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from psigrad.processes.proc import began
from psigrad.processes.sandbox import cgroup, seccomp
from psigrad.processes.sandbox.enclosure import BARE, USERS, command, memory_file, user_of
from psigrad.processes.sandbox.executor import Limits, Program, ProgramOutcome, SandboxError, Tier
from psigrad.processes.sandbox.pipes import exchange, start

DRIVER = Path(__file__).with_name("driver.py").read_text()
_JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'
# A fixed hash seed makes sets print in the same order every time. A thread for each core would exceed the limits.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_ENVIRONMENT |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def interpreter() -> str:
    """Return the executable of the base Python.

    It is used because a virtual environment may be in a folder that only its owner can read.
    """
    return os.path.realpath(sys.executable)


def packages() -> list[str]:
    """Return the folders with the packages of this Python's environment."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)]


def task_of(program: Program, limits: Limits) -> bytes:
    """Return the input of the driver (`driver.py`): the program, its expressions and their time limit, as JSON."""
    told = {"source": program.source, "expressions": program.expressions, "seconds": math.ceil(limits.seconds)}
    return json.dumps(told).encode()


def rlimits(program: Program, limits: Limits) -> list[str]:
    """Return the part of the command line that sets limits by prlimit.

    It comes after the change of user, because the kernel counts processes by user.
    """
    seconds = math.ceil(limits.seconds)
    return [
        "prlimit",
        f"--as={limits.memory_mb << 20}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.files_mb << 20}",
        # the driver raises the soft limit for each expression
        f"--cpu={seconds}:{seconds * (1 + len(program.expressions)) + 1}",
        *("--nofile=128", "--core=0", "--memlock=0", "--msgqueue=0", "--rtprio=0", "--nice=0"),
        "--",
    ]


class Bubblewrap:
    """An `Executor` that runs programs in bubblewrap on this machine, `workers` of them at once."""

    def __init__(self, tier: Tier, workers: int | None = None) -> None:
        if tier.name == "none":
            raise SandboxError(f"There is no sandbox for code on this machine: {tier.why_not}")
        self.tier = tier
        self._filter = seccomp.program()
        self._slots = list(range(USERS))
        self._free = threading.Lock()
        self._pool = ThreadPoolExecutor(min(USERS, workers or len(os.sched_getaffinity(0))))

    def run(self, programs: Sequence[Program], limits: Limits) -> list[ProgramOutcome]:
        """Run each program in its own sandbox, and return their outcomes in order. See `Executor`."""
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
        # the processes of bwrap, its init, and the program that setpriv starts count towards the limit too
        with cgroup.limit_group(limits.processes + 4, (limits.memory_mb + limits.files_mb) << 20) as group:
            task = memory_file(task_of(program, limits))
            driver, rules = memory_file(DRIVER.encode()), None if self._filter is None else memory_file(self._filter)
            (answers, say), (told, info) = os.pipe(), os.pipe()
            given = [task, driver, say, info, *([] if rules is None else [rules])]
            shown = packages() if limits.packages else []
            line = command(
                self.tier.name,
                user,
                shown=shown,
                variables={**_ENVIRONMENT, **({"PYTHONPATH": os.pathsep.join(shown)} if shown else {})},
                files=[(driver, "/driver.py")],
                rules=rules,
                info=info,
                files_mb=limits.files_mb,
            )
            python = [interpreter(), "-s", "-P", "-B", "-X", "utf8", "/driver.py", str(task), str(say)]
            joined = ["/bin/sh", "-c", _JOIN, "sh", *map(str, group.files), "--"]
            started = time.monotonic()
            with os.fdopen(told, "rb") as born:
                process = start([*joined, *line, *rlimits(program, limits), *python], given, answers, env=BARE)
                output = exchange(process, answers, program, limits)
                _wait_until_gone(born)
            seconds = time.monotonic() - started
            out_of_memory = group.out_of_memory()
        if not output.answers.startswith(b"started\n") and output.status == "exited" and not out_of_memory:
            raise SandboxError(f"The sandbox did not start the program: {output.stderr.decode(errors='replace').strip()[-300:]}")
        found = output.outcome(program, process.returncode, seconds)
        return replace(found, status="memory") if out_of_memory else found


def _wait_until_gone(born: BinaryIO) -> None:
    """Wait until the sandbox's first process, whose id bwrap wrote to `born`, has ended. All others end with it."""
    text = born.read()
    if not text:
        return  # no process was started
    process, end = int(json.loads(text)["child-pid"]), time.monotonic() + 10
    while time.monotonic() < end:
        if not began(process):
            return
        time.sleep(0.001)
    raise SandboxError("A sandbox did not end within 10 s of being killed.")
