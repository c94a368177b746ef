"""Importing the user's objects by "module:object" or "file.py:object": rewards, environments, tools, and parts of algorithms."""

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

# Module -> the files that it opened for reading while it was imported here, and the modules that it imported.
opened_by: dict[str, set[str]] = {}
loaded_by: dict[str, set[str]] = {}
# Id of an object imported by name -> (the object, its module). The class of an instance or a partial may be in another module.
_found_in: dict[int, tuple[Any, str]] = {}
_watching: list[int] = []
# The prefix of modules loaded from a file: `math.py` must not replace the standard `math`.
FILE_MODULE = "_psigrad_file_"


def imported(path: str, kind: str) -> Any:
    """Import the object that "module:object" or "file.py:object" names. `kind` says what it is for error messages: "reward".

    Modules in the current folder can be imported. Raises `UserError` if there is no such object, or if its module raises.
    """
    module_name, _, attribute = path.rpartition(":")
    if not module_name:
        raise UserError(
            f"The {kind} {path!r} names a module or file, but no object in it; write "
            f"{path if path.endswith('.py') else 'module'}:name."
        )
    module = _module(module_name, path, kind)
    if not hasattr(module, attribute):
        raise UserError(f"The {kind} {path!r}: {module_name} has no {attribute!r}{nearest(attribute, vars(module)) or '.'}")
    found = getattr(module, attribute)
    _found_in[id(found)] = found, module.__name__
    return found


def home_of(thing: Any) -> str:
    """Return the name of the module from which `imported` imported an object; "" for any other object."""
    return _found_in.get(id(thing), (None, ""))[1]


def imported_callable(path: str, kind: str) -> Any:
    """Import an object with `imported`. Raises `UserError` also if it is not callable."""
    found = imported(path, kind)
    if not callable(found):
        raise UserError(f"The {kind} {path!r} is {kind_of(found)}; expected a function.")
    return found


def with_colon(name: str) -> str:
    """Return `module:function` for TRL's form, `module.function`. Return any other text unchanged."""
    module, _, function = name.rpartition(".")
    dotted = bool(module) and function != "py" and all(part.isidentifier() for part in name.split("."))
    return f"{module}:{function}" if dotted else name


def imported_module(name: str, kind: str) -> ModuleType:
    """Import a module by its name or as "file.py". Raises `UserError` if there is none, or if it raises."""
    return _module(name, name, kind)


def _module(name: str, path: str, kind: str) -> ModuleType:
    with kept_folder():
        return _imported(name, path, kind)


def _imported(name: str, path: str, kind: str) -> ModuleType:
    try:
        if name.endswith(".py"):
            file = Path(name).resolve()
            if not file.exists():
                raise UserError(f"The {kind} {path!r}: there is no file {str(file)!r}; give the path of a file, or module:name.")
            if str(file.parent) not in sys.path:
                sys.path.append(str(file.parent))  # the file may import its neighbours; last, to hide no other module
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
    """Record which files are opened for reading, and which modules are imported, while the block imports the module `name`.

    The files are stored in `opened_by`, and the modules in `loaded_by`.
    """
    before = set(sys.modules)
    if not _watching:
        sys.addaudithook(_note_opened)  # an audit hook cannot be removed
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
            return  # the file of a module itself
        frame = frame.f_back
    if frame is not None and (event != "open" or not about[2] & (os.O_WRONLY | os.O_RDWR)):
        opened_by.setdefault(frame.f_globals.get("__name__", ""), set()).add(os.path.abspath(os.fsdecode(about[0])))


def load_file(name: str, file: str) -> ModuleType:
    """Import the Python file `file` as the module `name`."""
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
