"""The exception for mistakes that a user can correct, and functions for its messages."""

from __future__ import annotations

import difflib
import errno
import pickle
from collections.abc import Iterable

# The errors of `flock` on a file system without locks, such as Lustre mounted without them.
NO_LOCKS = frozenset((errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK))


class UserError(ValueError):
    """A mistake that the user can correct. The message is a sentence that says what was given, what was expected and what to do.

    The command line prints its message and exits with status 2, without a traceback.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the known name x closest to `name`, or "" if none is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


def several(count: int, noun: str, one: str = "", more: str = "") -> str:
    """Return `count` with its noun and a verb: `one` for a count of 1, otherwise `more`. Examples: "1 row is", "2 rows are"."""
    return " ".join(filter(None, [str(count), noun if count == 1 else f"{noun}s", one if count == 1 else more]))


def kind_of(value: object) -> str:
    """Return the type of a value with an article, for messages: "an int", "a list". For None it is "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def name_reason(error: BaseException) -> str:
    """Return the error's class and its first line: "KeyError: 'x'"."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def reason_of(error: BaseException) -> str:
    """Return the first line of another library's error, or psigrad's advice on remote code or a damaged pickle."""
    while isinstance(error, BaseExceptionGroup):  # its own text only counts the errors
        error = error.exceptions[0]
    text = str(error).strip() or type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        return (
            "the weights are damaged, or a pickle with more than tensors, which psigrad does not execute; convert them to "
            "safetensors"
        )
    if isinstance(error, KeyError):
        return f"{type(error).__name__} {text}"
    if "trust_remote_code" in text:
        return "the model comes with its own Python code; set model.trust_remote_code=true if you have read and trust it"
    first, *rest = text.splitlines()
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
