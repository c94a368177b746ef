"""Communication with a sandboxed process over pipes, with limits on output and time. No single pipe can block it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.processes.sandbox.executor import Limits, Program, ProgramOutcome, SandboxError, Status, decode_value, decode_values

_PIECE = 1 << 16
# The limit of answers: tagged JSON of a value is a little longer than its printed text.
_ANSWERS = 4


@dataclass(frozen=True)
class Output:
    """The output of a process until it ended or was killed."""

    status: Status
    stdout: bytes
    stderr: bytes
    answers: bytes
    """The lines that the driver wrote: one when the program starts, and one for each expression."""

    def outcome(self, program: Program, code: int, seconds: float) -> ProgramOutcome:
        """Return the outcome of `program`, which ended with the exit status `code` after `seconds`."""
        values = decode_values(self.answers.split(b"\n")[1:], len(program.expressions))
        out, err = self.stdout.decode(errors="replace"), self.stderr.decode(errors="replace")
        late = self.status == "exited" and code in (-signal.SIGXCPU, 128 + signal.SIGXCPU)
        return ProgramOutcome("timeout" if late else self.status, code, out, err, values, seconds)


def start(line: Sequence[str], given: Sequence[int], answers: int, **where: Any) -> subprocess.Popen[bytes]:
    """Start a process in its own session, with pipes. It inherits the file descriptors `given`, which are closed in this process.

    If it does not start, close `answers` and raise `SandboxError`.
    """
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=given, start_new_session=True, **where)
    except OSError as error:
        os.close(answers)
        raise SandboxError(f"The program could not be started ({error}).") from error
    finally:
        for descriptor in given:
            os.close(descriptor)


def exchange(process: subprocess.Popen[bytes], answers: int, program: Program, limits: Limits) -> Output:
    """Write `program.stdin` to the process and read its output until it ends. Kill it if it exceeds a limit.

    On return, the process has ended and `answers` is closed.
    """
    assert process.stdin and process.stdout and process.stderr
    output = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray(), answers: bytearray()}
    most = dict.fromkeys(output, limits.output_kb << 10) | {answers: _ANSWERS * limits.output_kb << 10}
    deadline, heard = time.monotonic() + limits.wall, 0
    rest = memoryview(program.stdin.encode(errors="surrogatepass"))
    status: Status = "exited"
    with selectors.DefaultSelector() as selector:
        for fd in output:
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
                    rest = _write(process, selector, rest)
                    continue
                data = _read(key.fd)
                if data:
                    output[key.fd] += data
                    if len(output[key.fd]) > most[key.fd]:
                        status = "output"
                else:
                    selector.unregister(key.fd)
            lines = output[answers].count(b"\n")
            if status == "exited" and heard < lines <= 1 + len(program.expressions):
                deadline = time.monotonic() + limits.wall  # of the next expression
                if _unwanted(program, output[answers], range(max(0, heard - 1), lines - 1)):
                    status = "stopped"
                heard = lines
    status = _end(process, deadline, status)
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            stream.close()
    os.close(answers)
    out, err, answered = (bytes(text[: most[fd]]) for fd, text in output.items())
    return Output(status, out, err, answered)


def _unwanted(program: Program, answered: bytearray, numbers: range) -> bool:
    """Return True if `program.until` returns True for one of the answers with these numbers.

    The first line of `answered` is not an answer: it marks the program's start.
    """
    if program.until is None:
        return False
    lines = bytes(answered).split(b"\n")[1:]
    return any(program.until(number, decode_value(lines[number])) for number in numbers)


def _write(process: subprocess.Popen[bytes], selector: selectors.BaseSelector, rest: memoryview) -> memoryview:
    """Write as much of `rest` to the program's stdin as the pipe takes now, and return what remains.

    Close stdin when nothing remains, or if no process reads it.
    """
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


def _end(process: subprocess.Popen[bytes], deadline: float, status: Status) -> Status:
    """Wait for a process that has closed its pipes, and return its final status. Kill it if it is late or over a limit."""
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
