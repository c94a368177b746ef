"""psigrad's commands in forks of the tests' process, where starting Python and loading torch is not what a test is about."""

from __future__ import annotations

import atexit
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
    """Forks for `[sys.executable, "-m", MODULE, …]` and `[sys.executable, "FILE.py", …]`; any other runs as it is."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        if not isinstance(args, list) or args[0] != sys.executable or not (args[1] == "-m" or args[1].endswith(".py")):
            return super()._execute_child(args, *given)
        preexec, (cwd, env), pipes, session = given[1], given[4:6], given[9:15], given[20]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(args[1:], (pipes[0], pipes[3], pipes[5]), preexec, cwd, env, session)
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return None


def _become(words: list[str], pipes: tuple[int, ...], preexec: Any, cwd: Any, env: Any, session: bool) -> NoReturn:
    """Run `python words` with these pipes as standard input, output and error."""
    code = 1
    try:
        atexit._clear()  # what the tests' process does at its end
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
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(words[0]))
            runpy.run_path(words[0], run_name="__main__")
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
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Start commands as forks, including those of called functions."""
    with patch.object(subprocess, "Popen", WarmPopen):
        yield
