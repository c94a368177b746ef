"""Talking with a process that may never stop talking: bounded, with a deadline, and without waiting for any one pipe."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Literal

from psigrad.processes.sandbox.executor import Limits

_PIECE = 1 << 16
# Answers are tagged JSON of what programs print in other cases, and a little longer.
_ANSWERS = 4


@dataclass(frozen=True)
class Heard:
    """What a process said until it ended or was killed."""

    status: Literal["exited", "timeout", "output"]
    stdout: bytes
    stderr: bytes
    answers: bytes


def exchanged(process: subprocess.Popen[bytes], answers: int, stdin: bytes, limits: Limits) -> Heard:
    """Give the process its stdin and hear it out within the limits; it is gone when this returns. Closes `answers`."""
    assert process.stdin and process.stdout and process.stderr
    heard = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray(), answers: bytearray()}
    most = dict.fromkeys(heard, limits.output_kb << 10) | {answers: _ANSWERS * limits.output_kb << 10}
    deadline = time.monotonic() + limits.seconds
    rest = memoryview(stdin)
    status: Literal["exited", "timeout", "output"] = "exited"
    with selectors.DefaultSelector() as selector:
        for fd in heard:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        give = process.stdin.fileno()
        os.set_blocking(give, False)
        selector.register(give, selectors.EVENT_WRITE)
        while selector.get_map() and status == "exited":
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                status = "timeout"
                break
            for key, _ in ready:
                if key.fd == give:
                    rest = _written(process, selector, rest)
                    continue
                data = _read(key.fd)
                if data:
                    heard[key.fd] += data
                    if len(heard[key.fd]) > most[key.fd]:
                        status = "output"
                else:
                    selector.unregister(key.fd)
    status = _ended(process, deadline, status)
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            stream.close()
    os.close(answers)
    out, err, said = (bytes(text[: most[fd]]) for fd, text in heard.items())
    return Heard(status, out, err, said)


def _written(process: subprocess.Popen[bytes], selector: selectors.BaseSelector, rest: memoryview) -> memoryview:
    """What is left of the program's stdin after as much as it takes now; closed at its end or when nobody reads."""
    assert process.stdin
    fd = process.stdin.fileno()
    try:
        rest = rest[os.write(fd, rest[:_PIECE]) :] if rest else rest
    except BlockingIOError:
        return rest
    except OSError:
        rest = rest[:0]
    if not rest:
        selector.unregister(fd)
        with contextlib.suppress(OSError):
            process.stdin.close()
    return rest


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _PIECE)
    except BlockingIOError:
        return b""
    except OSError:
        return b""


def _ended(
    process: subprocess.Popen[bytes], deadline: float, status: Literal["exited", "timeout", "output"]
) -> Literal["exited", "timeout", "output"]:
    """Wait for a process that has closed its pipes; kill it where it is late or must go. Its namespace dies with it."""
    if status == "exited":
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
            return status
        except subprocess.TimeoutExpired:
            status = "timeout"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return status
