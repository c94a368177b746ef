"""Programs without a sandbox, for those who allow it in so many words: they can read, write and send whatever you can."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence

from psigrad.processes.sandbox.bubblewrap import DRIVER, rlimits, task_of
from psigrad.processes.sandbox.enclosure import memory_file
from psigrad.processes.sandbox.executor import Limits, Program, ProgramOutcome
from psigrad.processes.sandbox.pipes import exchange, start


class Unsafe:
    """An `Executor` with limits of time and memory, and no protection at all."""

    def run(self, programs: Sequence[Program], limits: Limits) -> list[ProgramOutcome]:
        """See `Executor`."""
        return [self._one(program, limits) for program in programs]

    def _one(self, program: Program, limits: Limits) -> ProgramOutcome:
        task = memory_file(task_of(program, limits))
        answers, say = os.pipe()
        # without a user of its own a limit on processes would count all of yours
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
