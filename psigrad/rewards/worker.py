"""The process that runs reward functions, so that it can be killed.

Frames are 8 bytes of length and a pickle, on pipes of their own; what a reward function prints goes to stderr. The worker
dies with its parent, and a Ctrl-C at the terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import struct
import sys
from typing import Any, BinaryIO

from psigrad.rewards.call import answer_of
from psigrad.rewards.shipping import load_homes, unpack

HEADER = struct.Struct("<Q")


def frame(message: Any) -> bytes:
    """A message as it goes through a pipe."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


def _write(stream: BinaryIO, message: Any) -> None:
    stream.write(frame(message))
    stream.flush()


def _read(stream: BinaryIO) -> Any:
    """The next message. Raises EOFError where the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (length,) = HEADER.unpack(header)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """Answer until the parent goes away: first ("ready", None) or ("broken", why), then an
    ("answer", …) from each function that a request names.
    """
    setup = _read(requests)
    sys.path[:] = setup["path"]
    try:
        load_homes(setup["homes"])
        functions = [(name, unpack(packed)) for name, packed in setup["functions"]]
    except (Exception, SystemExit) as error:
        _write(responses, ("broken", f"{type(error).__name__}: {error}"))
        return
    _write(responses, ("ready", None))
    while True:
        asked, samples = _read(requests)
        for which in asked:
            name, function = functions[which]
            _write(responses, ("answer", answer_of(name, function, samples)))


def main() -> None:
    """Serve on the two file descriptors named on the command line, for the parent named there."""
    request, response, parent = map(int, sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)  # it died before prctl could tell
    for descriptor in (request, response):
        os.set_inheritable(descriptor, False)  # or a program that a reward starts would keep the pipe open
    requests, responses = os.fdopen(request, "rb"), os.fdopen(response, "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(requests, responses)
    os._exit(0)  # threads that a user's function left behind must not keep the process
