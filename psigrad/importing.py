"""The one importer of "module:object" and "file.py:object": rewards, environments, tools, algorithms and their parts."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from psigrad.errors import UserError, kind_of, nearest
from psigrad.paths import kept_folder

# The files that a module opened for reading while it was imported here, and the modules that came with it, by its name.
opened_by: dict[str, set[str]] = {}
loaded_by: dict[str, set[str]] = {}
# Of what was asked for by name, itself and the module that it stands in: an instance or a partial is another's by its class.
_found_in: dict[int, tuple[Any, str]] = {}
_watching: list[int] = []
# Modules loaded from a file are named so: `math.py` must not become the `math` of everyone else.
FILE_MODULE = "_psigrad_file_"


def imported(path: str, kind: str) -> Any:
    """The object that "module:object" or "file.py:object" names; `kind` is what errors call it.

    The current folder is importable. Raises `UserError` where nothing of that name is found, or its module raises.
    """
    module_name, _, attribute = path.rpartition(":")
    if not module_name:
        raise UserError(f"The {kind} {path!r} says where, and not what; write {path if path.endswith('.py') else 'module'}:name.")
    module = _module(module_name, path, kind)
    if not hasattr(module, attribute):
        raise UserError(f"The {kind} {path!r}: {module_name} has no {attribute!r}{nearest(attribute, vars(module)) or '.'}")
    found = getattr(module, attribute)
    _found_in[id(found)] = found, module.__name__
    return found


def home_of(thing: Any) -> str:
    """The name of the module in which a thing was asked for; empty where it was not."""
    return _found_in.get(id(thing), (None, ""))[1]


def imported_callable(path: str, kind: str) -> Any:
    """As `imported`, for what is called: a function or a class."""
    found = imported(path, kind)
    if not callable(found):
        raise UserError(f"The {kind} {path!r} is {kind_of(found)}; expected a function.")
    return found


def with_colon(name: str) -> str:
    """`module:function` of a function's dotted name, as TRL's command line has it; any other text as it is."""
    module, _, function = name.rpartition(".")
    dotted = bool(module) and function != "py" and all(part.isidentifier() for part in name.split("."))
    return f"{module}:{function}" if dotted else name


def imported_module(name: str, kind: str) -> ModuleType:
    """The module of that name, or in that "file.py". Raises `UserError` where there is none, or it raises."""
    return _module(name, name, kind)


def _module(name: str, path: str, kind: str) -> ModuleType:
    with kept_folder():
        return _imported(name, path, kind)


def _imported(name: str, path: str, kind: str) -> ModuleType:
    try:
        if name.endswith(".py"):
            file = Path(name).resolve()
            if not file.exists():
                raise UserError(f"The {kind} {path!r}: there is no file {str(file)!r}; give the path of one, or module:name.")
            if str(file.parent) not in sys.path:
                sys.path.append(str(file.parent))  # its neighbours, as for a script; last, so that it hides nothing
            inner = FILE_MODULE + hashlib.sha256(str(file).encode()).hexdigest()[:12]
            with _watched(inner):
                return load_file(inner, str(file))
        if "" not in sys.path and "." not in sys.path:
            sys.path.insert(0, "")
        with _watched(name):
            return importlib.import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"The {kind} {path!r} cannot be imported: {type(error).__name__}: {error}.") from error


@contextlib.contextmanager
def _watched(name: str) -> Iterator[None]:
    """Note in `opened_by` what is opened for reading in the block, and in `loaded_by` which modules come with the one of this
    name.
    """
    before = set(sys.modules)
    if not _watching:
        sys.addaudithook(_note_opened)  # it stays for good
        _watching.append(0)
    _watching[0] += 1
    try:
        yield
    finally:
        _watching[0] -= 1
        loaded_by.setdefault(name, set()).update(sys.modules.keys() - before)


def _note_opened(event: str, about: tuple[Any, ...]) -> None:
    if event not in ("open", "sqlite3.connect") or not _watching[0] or not isinstance(about[0], str | bytes):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return  # a module's own file
        frame = frame.f_back
    if frame is not None and (event != "open" or not about[2] & (os.O_WRONLY | os.O_RDWR)):
        opened_by.setdefault(frame.f_globals.get("__name__", ""), set()).add(os.path.abspath(os.fsdecode(about[0])))


def load_file(name: str, file: str) -> ModuleType:
    """The module in a file, under the given name."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
