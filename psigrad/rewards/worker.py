"""The process that runs reward functions, so that it can be killed.

Frames are 8 bytes of length and a pickle, on pipes of their own; what a reward function prints goes to stderr. The worker
dies with its parent, and a Ctrl-C at the terminal does not reach it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import inspect
import math
import numbers
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, BinaryIO

from psigrad.rewards.outcomes import Failure
from psigrad.rewards.shipping import load_homes, unpack

HEADER = struct.Struct("<Q")
# Characters of an exception's message that a reason keeps: reasons are logged once per sample.
_REASON = 500


class Malformed(ValueError):
    """A reward function returned what is no reward."""


# What one function said of one sample: a number, None (not applicable), a Failure (the policy's fault) or a Malformed (ours).
Said = float | None | Failure | Malformed
# What one function said of each sample that it was shown; or why nothing came of the call.
Answer = list[Said] | str


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
    own, setup = os.getpid(), _read(requests)
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
            answer = answer_of(name, function, copy.deepcopy(samples))  # what one function does to its lists, no other sees
            if os.getpid() != own:
                os._exit(0)  # a child that a reward forked must not answer in its place
            _write(responses, ("answer", answer))


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


def answer_of(name: str, function: Callable[..., Any], samples: dict[str, Any]) -> Answer:
    """What `function` says of each sample, or the reason why it says nothing.

    Whatever it raises, SystemExit included, is such a reason; only Ctrl-C passes.
    """
    try:
        return call(name, function, samples)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return reason(name, error)


def call(name: str, function: Callable[..., Any], samples: dict[str, Any]) -> list[Said]:
    """What `function` says of each sample. `samples` has prompts, completions, completion_ids and the columns, as equally
    long lists.

    Raises what the function raises, and `Malformed` where the return as a whole is no list of rewards. A `Failure` raised for one
    sample alone is its result; raised for several it does not say which is at fault, and is raised here too.
    """
    count = len(samples["completions"])
    try:
        returned = function(**_accepted(function, samples))
        if inspect.isawaitable(returned):
            returned = _finished(returned)
    except Failure as failure:
        if count > 1:
            raise
        return [Failure(_text(failure))]
    tolist = getattr(returned, "tolist", None)  # arrays and tensors, without importing either
    values = tolist() if callable(tolist) else returned
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Sequence):
        raise Malformed(f"{name} returned a {type(returned).__name__}; expected a list with one number or None per completion")
    if len(values) != count:
        # asked again one by one, such a function could give each the reward of another
        return [Malformed(f"{name} returned {len(values)} rewards for {count} completions")] * count
    return [_said(name, value) for value in values]


def _finished(returned: Any) -> Any:
    import asyncio  # a third of a worker's start-up, and few rewards need it

    async def result() -> Any:
        return await returned

    work: Coroutine[Any, Any, Any] = result()
    return asyncio.run(work)


def _accepted(function: Callable[..., Any], samples: dict[str, Any]) -> dict[str, Any]:
    """Only the arguments that the function takes, where it does not take all."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return samples
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return samples
    return {p.name: samples[p.name] for p in parameters if p.name in samples}


def _said(name: str, value: Any) -> Said:
    """One value of a returned list as a plain Python object, which any process can read."""
    if isinstance(value, Failure):
        return Failure(_text(value))
    kind = type(value).__name__
    item = getattr(value, "item", None)  # a scalar of numpy or torch
    if callable(item):
        try:
            value = item()
        except (RuntimeError, TypeError, ValueError):
            return Malformed(f"{name} returned a {kind} for one completion; expected a number or None")
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        return Malformed(f"{name} returned a {kind} for one completion; expected a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return Malformed(f"{name} returned {number} for one completion; expected a finite number or None")
    return number


def reason(name: str, error: BaseException) -> str:
    """Why a function said nothing."""
    if isinstance(error, Malformed):
        return str(error)
    return f"{name} raised {type(error).__name__}: {_text(error)}"


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as second:
        text = f"(its message raised {type(second).__name__})"
    return text if len(text) <= _REASON else text[:_REASON] + "…"
