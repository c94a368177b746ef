"""The process that runs reward functions, so that it can be killed.

Frames are 8 bytes of length and a pickle, on pipes of their own; what a reward function prints goes to stderr. The worker dies with
its parent and leaves Ctrl-C to it.
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

from psigrad.rewards.call import Malformed, call

_HEADER = struct.Struct("<Q")


def write_frame(stream: BinaryIO, message: Any) -> None:
    """One message, flushed."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_HEADER.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """The next message. Raises EOFError where the other side is gone."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    (length,) = _HEADER.unpack(header)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def load_function(packed: tuple[str, Any]) -> Any:
    """The function that `pool.pack_function` packed: by name, from the module's file where the name is not importable, or by value."""
    kind, what = packed
    if kind == "value":
        import dill

        return dill.loads(what)
    module_name, qualname, file = what
    try:
        module = __import__(module_name, fromlist=["_"])
    except ImportError:
        from psigrad.rewards.resolve import load_file

        module = load_file(module_name, file)
    found = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def serve(requests: BinaryIO, responses: BinaryIO) -> None:
    """Answer until the parent goes away."""
    setup = read_frame(requests)
    sys.path[:] = setup["path"]
    try:
        functions = [(name, load_function(packed)) for name, packed in setup["functions"]]
    except Exception as error:
        write_frame(responses, ("broken", f"{type(error).__name__}: {error}"))
        return
    write_frame(responses, ("ready", None))
    while True:
        samples = read_frame(requests)
        said, current = [], ""
        try:
            for name, function in functions:
                current = name
                said.append(call(name, function, samples))
            write_frame(responses, ("said", said))
        except Malformed as error:
            write_frame(responses, ("raised", str(error)))
        except BaseException as error:
            # whatever a user's function raises, SystemExit included, is a result and not the end of the worker
            write_frame(responses, ("raised", f"{current} raised {type(error).__name__}: {error}"))


def main() -> None:
    """Serve on the two file descriptors named on the command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    requests, responses = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(requests, responses)
    os._exit(0)  # threads that a user's function left behind must not keep the process
