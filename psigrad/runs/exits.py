"""A run that is not finished must not end with status 0, whatever a callback or an environment in its process does."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from psigrad.errors import UserError

_WAYS = ("_exit", "execv", "execve")


@contextlib.contextmanager
def no_way_out(tell: Callable[[str], None] = lambda reason: None) -> Iterator[None]:
    """For the length of the block nothing written in Python ends this process with status 0.

    SystemExit becomes a `UserError`. `os._exit`, and `os.exec…`, which would put another program in the run's place, end the
    process with status 1 or the one asked for; `tell` is given the reason first. Forked children end as they like.
    """
    own, before = os.getpid(), {name: getattr(os, name) for name in _WAYS}

    def guarded(name: str) -> Callable[..., NoReturn]:
        def leave(*given: Any, **named: Any) -> NoReturn:
            if os.getpid() != own:
                before[name](*given, **named)
            reason = f"os.{name} was called before the run was finished: an environment or a callback of yours ends the process."
            with contextlib.suppress(Exception):  # a full disk must not keep the process
                print(f"psigrad: {reason}", file=sys.stderr, flush=True)
                tell(reason)
            status = [*given, *named.values()][0] if name == "_exit" else 1
            before["_exit"](status or 1)
            raise AssertionError

        return leave

    for name in _WAYS:
        setattr(os, name, guarded(name))
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else error.code
        raise UserError(
            f"sys.exit({code}) was called before the run was finished: an environment or a callback of yours ends the program. "
            "Let it return, or raise an exception that says why."
        ) from error
    finally:
        for name in _WAYS:
            setattr(os, name, before[name])
