"""Sending a user's function to another process: by name if it can be found there, otherwise by value."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psigrad.errors import UserError
from psigrad.importing import FILE_MODULE, load_file

# ("name", (module, qualified name)) or ("value", dill's bytes)
Packed = tuple[str, Any]


class ShippingError(UserError):
    """An error for a function that cannot be sent to another process."""


def pack(function: Callable[..., Any], kind: str) -> Packed:
    """Pack a function for `unpack`: lambdas, closures, bound arguments, objects and a script's definitions go by value.

    Raise `ShippingError` for a function that cannot be pickled. Its message calls the function by `kind`.
    """
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module and qualname and module != "__main__" and module in sys.modules:
        found: Any = sys.modules[module]
        for part in qualname.split("."):
            found = getattr(found, part, None)
        if found is function:
            return "name", (module, qualname)
    import dill

    try:
        return "value", dill.dumps(function, recurse=True)
    except Exception as error:
        raise ShippingError(
            f"The {kind} {qualname or type(function).__name__} cannot be sent to a worker process "
            f"({type(error).__name__}: {error}); define it at the top level of a module and name it as module:function."
        ) from error


def unpack(packed: Packed) -> Any:
    """Return the function that was packed."""
    kind, what = packed
    if kind == "value":
        import dill

        return dill.loads(what)
    module, qualname = what
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def homes(functions: Sequence[Callable[..., Any]], packed: Sequence[Packed]) -> dict[str, str]:
    """Return the files of modules that a fresh process may not find by name.

    These are the modules of the functions, and modules loaded as file.py:function to which a function sent by value refers.
    """
    sent = [what for kind, what in packed if kind == "value"]
    loaded = {n for n in list(sys.modules) if n.startswith(FILE_MODULE) and any(n.encode() in what for what in sent)}
    names = {getattr(function, "__module__", None) for function in functions} | loaded
    files = {str(name): getattr(sys.modules.get(str(name)), "__file__", None) for name in names if name != "__main__"}
    return {name: file for name, file in files.items() if file}


def load_homes(files: Mapping[str, str]) -> None:
    """Load those modules that are not importable by name."""
    for name, file in files.items():
        try:
            known = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            known = False
        if not known:
            load_file(name, file)
