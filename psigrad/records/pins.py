"""The pins of a run: settings, data, models, code and machine that must be unchanged when it is resumed.

Settings that may change are marked (config/fields.py). Resuming with any other change raises an error that names it, unless
`run.allow` permits it. Permitted changes are recorded among the run's events.
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
# The pins in addition to the settings, by the names that `run.allow` accepts.
PINS = (
    *("dataset", "eval_dataset", "tokenizer", "chat_template", "processor", "date"),
    *("model", "reference", "critic", "reward_model"),
    *CODE,
    *("engine", "kernels", "threads", "device"),
)


@dataclass(frozen=True)
class Change:
    """A difference between a run and its continuation: in a setting, or in a pin such as the hash of the data."""

    name: str
    before: Any
    now: Any
    is_length: bool = False
    """True if the setting determines the length of the run."""

    def __str__(self) -> str:
        return f"{self.name} was {self.before!r} and is {self.now!r}"


def check_format(folder: Path, content: Mapping[str, Any]) -> None:
    """Raise `UserError` if the format of `content`, the content of a file in `folder`, is too new for this version of psigrad."""
    form = content.get("format", FORMAT)
    if not isinstance(form, int) or form > FORMAT:
        raise UserError(
            f"{folder} has format {form!r} and this psigrad reads formats up to {FORMAT}: a newer version wrote it; "
            "update psigrad to read it or to resume the run."
        )


def check_settings(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], settings: type[Any] | None = None
) -> list[Change]:
    """Return the settings that differ between a run (`before`) and its continuation (`now`), except those marked `FREE`.

    Raise `UserError` if one must not differ: it is not marked `RECORDED`, and neither `run.allow` nor `run.extend` permits it.
    `settings` is the class whose fields have the marks. A setting that is missing in `before` counts as its default.
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
    """Return the names in `run.allow` of `now`. Raise `UserError` for a name that is neither a pin nor a setting in `known`."""
    names = set(now.get("run", {}).get("allow", ()))
    valid = {*PINS, *known, *(name.rpartition(".")[2] for name in known)}
    for name in sorted(names - valid):
        raise UserError(f"run.allow has {name!r}; expected one of {', '.join(PINS)}, or a setting{nearest(name, valid) or '.'}")
    return names


def rename_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name in which `algorithm.preset` is renamed to `algorithm`, and `loss.preset` to `loss`.

    Settings that also change a part of the preset use the longer name, others the shorter one. With one name they are comparable.
    """
    return {n.removesuffix(".preset") if n in ("algorithm.preset", "loss.preset") else n: v for n, v in settings.items()}


def hash_parts(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each part's JSON form, by name."""
    return {
        name: hashlib.sha256(json.dumps(part, sort_keys=True, default=identify).encode()).hexdigest()
        for name, part in parts.items()
    }


def check_pins(folder: Path, before: Mapping[str, Any], now: Mapping[str, str], allow: Iterable[str] = ()) -> list[Change]:
    """Return the pins in `now`, such as the hash of the data, that differ from those in `before`, a checkpoint's manifest.

    Raise `UserError` if `allow` does not name all of these pins. A pin that is only in `before` or only in `now` is not
    compared.
    """
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
    """Return the identity of the model at `path`: a hub model's commit, or the SHA-256 of a file or of a folder's files.

    `revision` is a hub model's branch, tag or commit; "" means main. Return None if the model is not on this machine.
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
    """Return the SHA-256 of a file. The cached value is used while its `stat` (size, time of change, inode) is the same."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _folder_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        digest.update(f"{file.name}\0{_file_hash(file)}\n".encode())
    return digest.hexdigest()


def hash_code(*objects: Any) -> str | None:
    """Return the SHA-256 of the user's code behind functions, classes and objects; None if none of the code is the user's.

    The hash covers the files that define the objects and the user's own modules that these files import. It also covers data
    files that these modules opened while `psigrad.importing` imported them. In a script or notebook only the definitions of the
    objects are covered, since the rest of the script may change.
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
        if getattr(module, "__name__", "") == "__main__":
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
    """Add the text of a user's module to `found`, by file name, with all files on which the module depends.

    The module depends on the data files that it opened while it was imported. It also depends on the user's modules that it
    imports anywhere in its source, or whose objects are among its values.
    """
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
    """Return True if the name of a file, or of a folder between it and the code's folder `home`, starts with . or __pycache__."""
    seen = Path(os.path.relpath(path, home)).parts
    return any(part.startswith((".", "__pycache__")) and part != ".." for part in seen)


def _imported_by(module: ModuleType, source: str) -> Iterator[ModuleType]:
    """Yield the modules that the import statements of a module's `source` name.

    The values in the module would not suffice: an imported number, for example, does not know where it was defined. A module that
    was not imported yet, because its import statement is inside a function, is located but not imported.
    """
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
    """Return an empty module with the name and the file of a module that was not imported; None if no such file is found."""
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
    """Return True if a module is the user's: not psigrad's, Python's or an installed package's."""
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
