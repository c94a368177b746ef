"""Helpers of all routes: the base class of request bodies, JSON responses, and the limit on concurrent work."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict

from psigrad_studio.security import Refused

WAIT_SECONDS = 10.0


class RequestForm(BaseModel):
    """The base class of request bodies. Unknown fields and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


def plain(value: Any) -> Any:
    """Return a value converted for JSON: dataclasses to objects, sets to sorted lists, non-finite numbers to null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_response(content: Any) -> Response:
    """Return a response in ASCII JSON, so that any text of a model can be sent."""
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):  # conversion is slow, so it runs only if JSON rejects the value
        text = json.dumps(plain(content), allow_nan=False, separators=(",", ":"))
    return Response(text, media_type="application/json")


@contextmanager
def taking_turns(turns: threading.BoundedSemaphore) -> Iterator[None]:
    """Wait for one of the `turns`, which limit the work that is done at once, and hold it during the block.

    Raises `Refused` with status 429 after a time-out.
    """
    if not turns.acquire(timeout=WAIT_SECONDS):
        raise Refused(429, "busy", "The studio is busy; try again in a moment.")
    try:
        yield
    finally:
        turns.release()
