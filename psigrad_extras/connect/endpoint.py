"""Requests to a server, such as an OpenAI-compatible one: JSON out, JSON back, and why there was no answer."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

LARGEST = 64 << 20
# Characters of a server's own words that an error keeps.
_WORDS = 300


class NoAnswerError(Exception):
    """A server gave no usable answer; the message says why.

    `again` tells whether the same request may yet succeed, `status` is the HTTP status (0: there was none) and `wait` the seconds
    that the server asks to be left alone.
    """

    def __init__(self, why: str, *, again: bool, status: int = 0, wait: float = 0.0) -> None:
        super().__init__(why)
        self.again, self.status, self.wait = again, status, wait


def ask(url: str, body: Any = None, *, key: str = "", seconds: float, largest: int = LARGEST) -> Any:
    """What `url` answers to a POST of `body`, or to a GET where there is none. `key` is sent as a bearer token.

    Raises `NoAnswerError`.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=seconds) as reply:
            return json.loads(reply.read(largest))
    except urllib.error.HTTPError as error:
        # a request that is wrong stays so; too many, or trouble of the server's, passes
        passes = error.code in (408, 409, 425, 429) or error.code >= 500
        raise NoAnswerError(
            f"HTTP {error.code} {error.reason}{_said(error)}", again=passes, status=error.code, wait=_wait(error)
        ) from error
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)  # urllib wraps what the socket said
        slow = f" in {seconds:g} s" if isinstance(reason, TimeoutError) else ""
        raise NoAnswerError(f"{type(reason).__name__}: {reason}"[:_WORDS] + slow, again=True) from error


def pause(attempt: int, error: NoAnswerError) -> float:
    """Seconds before the next attempt: 0.5, 1, 2, … up to 8, or what the server asked for, up to a minute."""
    return max(min(2.0 ** (attempt - 1), 8.0), min(error.wait, 60.0))


def _said(error: urllib.error.HTTPError) -> str:
    """The server's own message, as OpenAI's API and its kin give it."""
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
