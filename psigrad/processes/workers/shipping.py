"""The data that a worker gets at its start: the user's function and environment variables.

A function is sent by name if the worker can import it, otherwise by value.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from psigrad import redaction
from psigrad.errors import UserError
from psigrad.importing import FILE_MODULE, load_file

# ("name", (module, qualified name)) or ("value", dill's bytes)
Packed = tuple[str, Any]


# Variables that programs need to find their files, without secrets.
_USUAL = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TZ|LANG|LANGUAGE|PWD|TMPDIR|TMP|TEMP|(LD|DYLD)_LIBRARY_PATH|VIRTUAL_ENV|CC|CXX"
    # torchrun's variables would make the worker look like one of its ranks
    r"|(LC|PYTHON|CONDA|XDG|OMP|MKL|OPENBLAS|CUDA|NVIDIA|HF|TRANSFORMERS|TORCH(?!ELASTIC)|TOKENIZERS|PSIGRAD)_?\w*"
    r"|(SSL_CERT|REQUESTS)_?\w*"
    r"|(https?|no|all)_proxy",
    re.IGNORECASE,
)


class ShippingError(UserError):
    """An error for a function that cannot be sent to another process."""


def pack(function: Callable[..., Any], kind: str) -> Packed:
    """Pack a function for another process, which calls `unpack`.

    A function of an importable module is packed by name. Lambdas, closures, bound arguments, objects and a script's own
    definitions are packed by value. Raise `ShippingError` for a function that cannot be pickled; `kind` names its role in that
    message.
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
    """Return {module name: file} of the modules that a new process may not find by name.

    These are the modules of the functions, and modules loaded as file.py:function that a function sent by value uses.
    """
    sent = [what for kind, what in packed if kind == "value"]
    loaded = {n for n in list(sys.modules) if n.startswith(FILE_MODULE) and any(n.encode() in what for what in sent)}
    names = {getattr(function, "__module__", None) for function in functions} | loaded
    files = {str(name): getattr(sys.modules.get(str(name)), "__file__", None) for name in names if name != "__main__"}
    return {name: file for name, file in files.items() if file}


def load_homes(files: Mapping[str, str]) -> None:
    """Load from these files the modules that cannot be imported by name. `files` is the result of `homes`."""
    for name, file in files.items():
        try:
            known = importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            known = False
        if not known:
            load_file(name, file)


def pick_variables(extra: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment variables of this process that a worker gets: a fixed list, and those named in `extra`."""
    names = set(extra)
    kept = {k: v for k, v in os.environ.items() if k in names or (_USUAL.fullmatch(k) and not redaction.SECRET_NAME.search(k))}
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}


def list_withheld(extra: Iterable[str] = ()) -> list[str]:
    """Return the names of this process's environment variables that a worker does not get."""
    return sorted(os.environ.keys() - pick_variables(extra).keys())
