"""psigrad's commands in forks of the tests' process, where starting Python and loading torch is not what a test is about."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from psigrad.kernels import kernels


class WarmPopen(subprocess.Popen):
    """Forks for `[sys.executable, "-m", "psigrad…", …]`; any other command is started as it is."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        if not isinstance(args, list) or args[:2] != [sys.executable, "-m"] or not args[2].startswith("psigrad"):
            return super()._execute_child(args, *given)
        preexec, (cwd, env), pipes, session = given[1], given[4:6], given[9:15], given[20]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(args[2:], (pipes[0], pipes[3], pipes[5]), preexec, cwd, env, session)
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return None


def _become(words: list[str], pipes: tuple[int, ...], preexec: Any, cwd: Any, env: Any, session: bool) -> NoReturn:
    """Be `python -m words` with these pipes as standard input, output and error."""
    code = 1
    try:
        for stream, pipe in enumerate(pipes):
            if pipe != -1:
                os.dup2(pipe, stream)
        os.closerange(3, 4096)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(stream, mode) for stream, mode in enumerate("rww"))
        sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if session:
            os.setsid()
        if preexec is not None:
            preexec()
        os.chdir(cwd or ".")
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        gc.freeze()
        torch.set_num_threads(1)
        for kept in (kernels.kernels, kernels.library):
            kept.cache_clear()  # which an environment may switch off
        sys.argv = [words[0], *words[1:]]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Commands that are started here, also by what is called here, are forks."""
    with patch.object(subprocess, "Popen", WarmPopen):
        yield
