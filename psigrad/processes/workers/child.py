"""The worker's side of the pipe: it loads the user's code, then answers requests until the parent exits.

Requests are pickles, made by the trainer alone. Answers are JSON, so the trainer unpickles no output of a worker. Each message
has a magic number, a request number, a length, and its content. The first two reveal bytes in the pipe that are no answer to the
request.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import resource
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from psigrad.processes.workers.keeper import keep
from psigrad.processes.workers.shipping import load_homes

# Seconds between two checks.
_OFTEN = 0.1
_STATUS = Path("/proc/self/status")


def limit_shared_memory(most: int) -> None:
    """Kill this process if its private and shared memory exceeds `most` bytes: RLIMIT_DATA counts private mappings alone."""
    if _STATUS.exists():
        threading.Thread(target=_watch, args=(most,), name="shared memory", daemon=True).start()


def _watch(most: int) -> None:
    while True:
        held = 1024 * sum(map(int, re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+)", _STATUS.read_text(), re.MULTILINE)))
        if held > most:
            os.write(2, f"psigrad: a worker uses {held / 1e9:.1f} GB, more than worker_memory_gb, so it is killed\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_OFTEN)


HEADER = struct.Struct("<8sQQ")
MARK = b"psigrad\x01"
# The most bytes of one answer; a larger one means that the worker is faulty.
MOST_BYTES = 64 << 20
# A function that answers a request: it yields any number of values that JSON can represent. The factory that makes it gets the
# payload that the parent sends at the start.
Service = Callable[[Any], Iterator[Any]]
# The most characters of an exception's message in a reason: reasons are logged once per sample.
_REASON = 500
_withheld: frozenset[str] = frozenset()


def main() -> None:
    """Run a worker. The command line gives its two file descriptors and its parent's process id.

    The worker ends with its parent, and a Ctrl-C at the terminal does not reach it.
    """
    request, response, parent = map(int, sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent:
        keep(parent)
    for descriptor in (request, response):
        os.set_inheritable(descriptor, False)  # otherwise a program that the user's code starts would keep the pipe open
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(os.fdopen(request, "rb"), os.fdopen(response, "wb"))
    os._exit(0)  # remaining threads of the user's code must not keep the process alive


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """Load the user's code, then answer requests until the parent exits.

    Write ["ready", null] or, if the code does not load, ["broken", why]. Then write ["answer", …] for each answer.
    """
    global _withheld
    own = os.getpid()

    def write(number: int, kind: str, content: Any) -> None:
        if os.getpid() != own:
            os._exit(0)  # a child that the user's code forked must not answer for the worker
        responses.write(pack_answer(number, [kind, content]))
        responses.flush()

    number, setup = read_request(requests)
    sys.path[:] = setup["path"]
    _withheld = frozenset(setup["withheld"])
    try:
        if setup["memory"]:
            resource.setrlimit(resource.RLIMIT_DATA, (setup["memory"], setup["memory"]))
            limit_shared_memory(setup["memory"])
        load_homes(setup["homes"])
        module, _, name = setup["service"].partition(":")
        service: Service = getattr(importlib.import_module(module), name)(setup["payload"])
    except (Exception, SystemExit) as error:
        write(number, "broken", text_of(error))
        return
    write(number, "ready", None)
    while True:
        number, message = read_request(requests)
        for answer in service(message):
            write(number, "answer", answer)


def pack_answer(number: int, message: Any) -> bytes:
    """Return an answer to request `number` in the pipe's format. Raise `TypeError` or `ValueError` if JSON cannot express it."""
    data = json.dumps(message, allow_nan=False).encode()
    return HEADER.pack(MARK, number, len(data)) + data


def read_request(stream: BinaryIO) -> tuple[int, Any]:
    """Return (number, content) of the next request. Raise `EOFError` if the parent has closed the pipe."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    _, number, length = HEADER.unpack(header)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return number, pickle.loads(data)


def reason_for(name: str, error: BaseException) -> str:
    """Return a text on why the user's function `name` failed: the exception, and the last traceback line in the user's code."""
    foreign = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_OURS, "<frozen"))]
    own = [f for f in foreign if not f.filename.startswith(_PYTHON) and "-packages" + os.sep not in f.filename] or foreign
    where = f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    hint = ""
    if isinstance(error, KeyError) and error.args and error.args[0] in _withheld:
        hint = "; workers get few environment variables: name this one in worker_env"
    return f"{name} raised {text_of(error)}{where}{hint}"


def text_of(error: BaseException) -> str:
    """Return an exception's type and message, truncated."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """Return an exception's message, truncated."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(its message raised {type(second).__name__})"
    return text if len(text) <= _REASON else text[:_REASON] + "…"


_PYTHON = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
