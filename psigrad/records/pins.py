"""The pins of a run: values, such as hashes, that identify its data, models, code and machine.

Resuming a run raises an error if a pin or a setting has changed, unless `run.allow` or the setting's definition permits this.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from huggingface_hub import try_to_load_from_cache

from psigrad.config.fields import FREE, LENGTH, RECORDED, defaults_of, find_marked
from psigrad.config.load import identify
from psigrad.config.nested import flatten
from psigrad.errors import UserError, nearest
from psigrad.importing import home_of, loaded_by, opened_by
from psigrad.records.rows import FORMAT

CODE = ("reward", "environment", "agent", "tools", "algorithm", "sampler")
"""The pins of the user's code. Runs count as seeds of the same method only if these pins are equal."""
# The names of the pins. `run.allow` accepts these names and those of settings.
PINS = (
    *("dataset", "eval_dataset", "tokenizer", "chat_template", "processor", "date"),
    *("model", "reference", "critic", "reward_model"),
    *CODE,
    *("engine", "kernels", "threads", "device"),
)


@dataclass(frozen=True)
class Change:
    """A setting, or a pin such as the hash of the data, that has changed since the run was started."""

    name: str
    before: Any
    now: Any
    is_length: bool = False
    """True if the setting determines the length of the run."""

    def __str__(self) -> str:
        return f"{self.name} was {self.before!r} and is {self.now!r}"


def check_format(folder: Path, content: Mapping[str, Any]) -> None:
    """Raise `UserError` if `content`, read from a file in `folder`, has a format that is too new for this version of psigrad."""
    form = content.get("format", FORMAT)
    if not isinstance(form, int) or form > FORMAT:
        raise UserError(
            f"{folder} has format {form!r}, but this version of psigrad reads formats only up to {FORMAT}; "
            "update psigrad to read it or to resume the run."
        )


def check_settings(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], settings: type[Any] | None = None
) -> list[Change]:
    """Return the changes of a resumed run's settings from `before` to `now`. Raise `UserError` for one that is not permitted.

    The class `settings` marks the settings that may change; `run.allow` and `run.extend` permit more. Omit those marked `FREE`.
    """
    old, new, default = (
        rename_preset({name: value for name, value in flatten(one).items() if value != {}})
        for one in (before, now, {} if settings is None else defaults_of(settings))
    )
    free, recorded, length = ([] if settings is None else find_marked(settings, mark) for mark in (FREE, RECORDED, LENGTH))
    old = {name: default[name] for name in new.keys() & default.keys()} | old
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name) and name not in (*free, "format")]
    changes = [Change(name, old.get(name), new.get(name), name in length) for name in names]
    allowed = _read_allowed(now, {**old, **new})
    refused = [c for c in changes if c.name not in recorded and not {c.name, c.name.rpartition(".")[2]} & allowed]
    longer = [c for c in refused if c.is_length]
    if now.get("run", {}).get("extend"):
        for change in longer:
            if change.before and (change.now or 0) < change.before:
                raise UserError(f"{change}; run.extend makes a run longer, so set {change.name} above {change.before}.")
        refused = [c for c in refused if not c.is_length]
    if refused:
        # list these first: a mistake in a model or data setting often explains the other differences
        refused.sort(key=lambda change: not change.name.startswith(("model.", "data.")))
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        advice = "to resume it, set these back to what it was started with, or choose another output_dir"
        if refused == longer:
            advice = "the learning-rate schedule depends on the length; set it back, or give --extend to train to the new end"
        else:
            every = " ".join(change.name for change in refused)
            advice += f"; --allow {every} accepts the change{'s' if len(refused) > 1 else ''}"
        raise UserError(f"{folder} is a run with other settings ({'; '.join(map(str, refused[:5]))}{more}); {advice}.")
    return changes


def _read_allowed(now: Mapping[str, Any], known: Mapping[str, Any]) -> set[str]:
    """Return the names in the setting `run.allow`. Raise `UserError` for a name that is neither a pin nor one of `known`."""
    names = set(now.get("run", {}).get("allow", ()))
    valid = {*PINS, *known, *(name.rpartition(".")[2] for name in known)}
    for name in sorted(names - valid):
        raise UserError(f"run.allow has {name!r}; expected one of {', '.join(PINS)}, or a setting{nearest(name, valid) or '.'}")
    return names


def rename_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the names `algorithm.preset` and `loss.preset` shortened to `algorithm` and `loss`."""
    # a preset without overridden parts has the short name
    return {n.removesuffix(".preset") if n in ("algorithm.preset", "loss.preset") else n: v for n, v in settings.items()}


def hash_parts(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: SHA-256 of the part as JSON}."""
    return {
        name: hashlib.sha256(json.dumps(part, sort_keys=True, default=identify).encode()).hexdigest()
        for name, part in parts.items()
    }


def check_pins(folder: Path, before: Mapping[str, Any], now: Mapping[str, str], allow: Iterable[str] = ()) -> list[Change]:
    """Return the pins that differ between `before`, from the run folder, and `now`. Raise `UserError` for one not in `allow`."""
    changes = [Change(name, before[name], value) for name, value in now.items() if before.get(name, value) != value]
    refused = [change for change in changes if change.name not in set(allow)]
    if refused:
        rows = {"dataset": "other rows or images in dataset", "eval_dataset": "other rows or images in eval_dataset"}
        what = " and ".join(
            rows.get(c.name, f"another {c.name.replace('_', ' ')}") if len(c.now) >= 32 else f"{c.name} {c.before} (now {c.now})"
            for c in refused
        )
        names = " ".join(c.name for c in refused)
        raise UserError(
            f"{folder} was trained with {what}. To resume it, undo the change, accept it with --allow {names}, "
            "or choose another output_dir."
        )
    return changes


def identify_model(path: str, revision: str = "") -> str | None:
    """Return a hub model's commit, or the SHA-256 of a model's file or folder at `path`; None if it is not on this machine.

    `revision` is a hub model's branch, tag or commit; "" means main.
    """
    if Path(path).is_dir():
        return _folder_hash(Path(path))
    if Path(path).is_file():
        return _file_hash(Path(path))
    try:
        cached = try_to_load_from_cache(path, "config.json", revision=revision or None)
    except ValueError:  # neither a folder nor a hub name
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None


def identify_data(path: str) -> str | None:
    """Return the SHA-256 of a file of rows, or of all files of a folder; None if it is not on this machine."""
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.is_file())
        return hash_parts({"": [[str(file.relative_to(place)), _file_hash(file)] for file in files]})[""]
    return _file_hash(place) if place.is_file() else None


def _file_hash(file: Path) -> str:
    found = file.stat()
    return _cached_hash(file.absolute(), found.st_size, found.st_mtime_ns, found.st_ino)


@functools.lru_cache(maxsize=1024)
def _cached_hash(file: Path, *stat: int) -> str:
    """Return the SHA-256 of a file, cached by its path and `stat` (size, modification time, inode)."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _folder_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        digest.update(f"{file.name}\0{_file_hash(file)}\n".encode())
    return digest.hexdigest()


def hash_code(*objects: Any) -> str | None:
    """Return the SHA-256 of the user's code that defines `objects`; None if no object is defined in the user's code.

    The hash covers the user's modules that define the objects, and those on which they depend.
    """
    found: dict[str, str] = {}
    for thing in objects:
        if (home := sys.modules.get(home_of(thing))) is not None and _is_user_code(home) and home.__name__ != "__main__":
            _add_module(home, found)
        thing = thing.func if isinstance(thing, functools.partial) else thing
        owner = thing if isinstance(thing, type) or hasattr(thing, "__qualname__") else type(thing)
        module = sys.modules.get(getattr(owner, "__module__", None) or "")
        if module is None or not _is_user_code(module):
            continue
        if getattr(module, "__name__", "") == "__main__":  # the rest of a script or notebook may change
            found[f"__main__.{owner.__qualname__}"] = _source(owner)
        else:
            _add_module(module, found)
    if not found:
        return None
    # only the files' names, so that a project can move to another folder
    parts = sorted((Path(name).name, text) for name, text in found.items())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # typed into a prompt: there is only the compiled code
        code = getattr(thing, "__code__", None)
        return repr((code.co_code, code.co_consts, code.co_names)) if code is not None else ""


def _add_module(module: ModuleType, found: dict[str, str]) -> None:
    """Add a user's module, the user's modules on which it depends, and its data files to `found`: {file: source or hash}."""
    file = str(module.__file__)
    if file in found:
        return
    found[file] = Path(file).read_text(errors="replace")
    for data in opened_by.get(module.__name__, ()):
        path = Path(data).resolve()
        if path.is_file() and not _is_library(path) and not _is_hidden(path, Path(file).resolve().parent):
            found[str(path)] = _file_hash(path)
    values = list(vars(module).values())
    others = {v if isinstance(v, ModuleType) else sys.modules.get(getattr(v, "__module__", None) or "") for v in values}
    others |= {sys.modules.get(name) for name in loaded_by.get(module.__name__, ())}
    for other in [*filter(None, others), *_imported_by(module, found[file])]:
        if other is not module and _is_user_code(other) and other.__name__ != "__main__":
            _add_module(other, found)


def _is_hidden(path: Path, home: Path) -> bool:
    """Return True if the path from `home` to the file has a hidden part or "__pycache__"."""
    seen = Path(os.path.relpath(path, home)).parts
    return any(part.startswith((".", "__pycache__")) and part != ".." for part in seen)


def _imported_by(module: ModuleType, source: str) -> Iterator[ModuleType]:
    """Yield the modules that are named in the import statements of `source`, the source code of `module`."""
    # unlike a function, an imported number or string does not name the module that defines it
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = (module.__package__ or "").split(".")
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    for name in names:
        if (found := sys.modules.get(name) or _placeholder_module(name)) is not None:
            yield found


def _placeholder_module(name: str) -> ModuleType | None:
    """Locate a module without importing it. Return an empty module object with its name and file, or None if it is not found."""
    spec, path = None, None
    for end in range(name.count(".") + 1):
        spec = PathFinder.find_spec(".".join(name.split(".")[: end + 1]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    made = ModuleType(name)
    made.__file__, made.__package__ = spec.origin, name if path else name.rpartition(".")[0]
    return made


def _is_user_code(module: ModuleType) -> bool:
    """Return True unless a module belongs to psigrad, to Python or to an installed package."""
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__name__", "") == "__main__"
    path = Path(file).resolve()
    return path.is_file() and not _is_library(path)


def _is_library(path: Path) -> bool:
    """Return True if a file belongs to Python, to psigrad, or to a package installed in this or another environment."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(path.is_relative_to(h) for h in _libraries())


@functools.cache
def _libraries() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    homes = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    homes += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    return tuple({Path(home).resolve() for home in homes})
