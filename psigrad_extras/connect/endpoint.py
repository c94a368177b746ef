"""HTTP requests with JSON to a server, such as an OpenAI-compatible one, with readable errors."""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeVar

T = TypeVar("T")
LARGEST = 64 << 20
# The maximum characters of a server's message in an error.
_WORDS = 300


class NoAnswerError(Exception):
    """An error for a server that gave no usable answer. The message is the reason.

    `again` is True if the same request may succeed later. `status` is the HTTP status (0: none), and `wait` is the number of
    seconds after which the server asks to repeat the request. `attempts` counts the requests of `repeat`.
    """

    def __init__(self, why: str, *, again: bool, status: int = 0, wait: float = 0.0) -> None:
        super().__init__(why)
        self.again, self.status, self.wait, self.attempts = again, status, wait, 1


def ask(url: str, body: Any = None, *, key: str = "", seconds: float, largest: int = LARGEST) -> Any:
    """Return the JSON answer of `url` to a POST of `body`, or to a GET if that is None. `key` is sent as a bearer token.

    Raises `NoAnswerError`.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=seconds) as reply:
            return json.loads(reply.read(largest))
    except urllib.error.HTTPError as error:
        # A wrong request stays wrong. The status "too many requests" and errors of the server may be temporary.
        passes = error.code in (408, 409, 425, 429) or error.code >= 500
        raise NoAnswerError(
            f"HTTP {error.code} {error.reason}{_said(error)}", again=passes, status=error.code, wait=_wait(error)
        ) from error
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)  # urllib wraps the error of the socket
        slow = f" in {seconds:g} s" if isinstance(reason, TimeoutError) else ""
        raise NoAnswerError(f"the request failed{slow}: {type(reason).__name__}: {reason}"[:_WORDS], again=True) from error


def repeat(request: Callable[[], T], most: int, given_up: Callable[[], bool] = lambda: False) -> T:
    """Call `request`, and again after a temporary `NoAnswerError`, at most `most` times in all. Return its result.

    The wait before the next call is 0.5, 1, 2, … up to 8 seconds, or as long as the server asked for, up to a minute.
    """
    for attempt in itertools.count(1):
        try:
            return request()
        except NoAnswerError as error:
            error.attempts = attempt
            if not error.again or attempt >= most or given_up():
                raise
            time.sleep(max(min(2.0 ** (attempt - 2), 8.0), min(error.wait, 60.0)))
    raise AssertionError


def _said(error: urllib.error.HTTPError) -> str:
    """Return the server's error message, if its body has the format of OpenAI's API."""
    try:
        text = error.read(1 << 16).decode(errors="replace")
    except (OSError, ValueError, HTTPException):
        return ""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        text = found if isinstance(found, str) else str(found.get("message") or found.get("detail") or text)
    except (ValueError, AttributeError):
        pass
    text = " ".join(text.split())
    return f": {text[:_WORDS]}" if text else ""


def _wait(error: urllib.error.HTTPError) -> float:
    try:
        return max(0.0, float(str(error.headers.get("Retry-After", 0))))
    except (TypeError, ValueError):  # it may be a date
        return 0.0
