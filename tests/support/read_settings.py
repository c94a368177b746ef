"""Which settings a command reads: attributes of its settings' classes, seen while it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from psigrad.config.fields import settings_of

# Who reads settings without obeying them: loading and comparing them, and questions that are asked before a run.
NOT_OBEYED = (
    "/dataclasses.py", "<string>", "/pydantic/", "/copy.py", "/psigrad/compat/", "/psigrad_extras/preflight/",
    "/psigrad/records/pins.py",
    *(f"/psigrad/config/{name}.py" for name in ("load", "fields", "nested")), "/psigrad/cli/flags.py",
)  # fmt: skip
CHECKS = ("recipes/online_settings.py", "loading/samplers.py")
"""Files whose functions called check… only refuse."""


@contextlib.contextmanager
def watching(cls: Any, besides: tuple[str, ...] = NOT_OBEYED) -> Iterator[set[str]]:
    """The dotted names of the settings of `cls` that are read within the block, but in the files `besides`."""
    names: dict[tuple[type, str], str] = {}
    for name, setting in settings_of(cls).items():
        names[setting.owner, name.rpartition(".")[2]] = name
    read: set[str] = set()
    owners = {owner for owner, _ in names}
    originals = {owner: owner.__getattribute__ for owner in owners}

    def watched(owner: type) -> Any:
        original = originals[owner]

        def get(self: Any, leaf: str) -> Any:
            code = sys._getframe(1).f_code
            checks = code.co_name.lstrip("_").startswith("check") and code.co_filename.endswith(CHECKS)
            if (owner, leaf) in names and not checks and not any(part in code.co_filename for part in besides):
                read.add(names[owner, leaf])
            return original(self, leaf)

        return get

    for owner in owners:
        owner.__getattribute__ = watched(owner)  # type: ignore[method-assign]
    try:
        yield read
    finally:
        for owner, original in originals.items():
            if "__getattribute__" in vars(owner):
                del owner.__getattribute__
            assert owner.__getattribute__ is original
