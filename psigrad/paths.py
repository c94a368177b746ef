"""Resolving the paths that a user gives, and checking them before anything is written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from psigrad.errors import UserError

# The file in an output folder that is not a run folder. It names the command that made the folder, such as `psigrad compare`.
OWNER = ".psigrad"
_LONGEST_NAME = 255  # bytes, the limit of all common file systems


class TypedPath(str):
    """An absolute path with the text that the user typed. Runs record the text, so that they can resume in a moved project."""

    typed: str

    def __new__(cls, path: str, typed: str) -> TypedPath:
        """Return the string `path` with the attribute `typed`."""
        made = super().__new__(cls, path)
        made.typed = typed
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.typed


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, with `~` expanded. Raises `UserError` for a name that no file system accepts."""
    found = Path(path).expanduser().absolute()
    if "\0" in str(found):
        raise UserError(f"The name {str(path)[:40]!r} has a NUL character. Choose one without it.")
    for name in found.parts:
        if len(os.fsencode(name)) > _LONGEST_NAME:
            raise UserError(f"The name {name[:40]!r}… has {len(os.fsencode(name))} bytes. Choose one of at most {_LONGEST_NAME}.")
    return found


@contextlib.contextmanager
def kept_folder() -> Iterator[None]:
    """Restore the current folder at the end of the block, since user code in the block may call `os.chdir`."""
    before = os.open(".", os.O_RDONLY)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def expand(text: str) -> str:
    """Return an output path with `~` expanded. Raises `UserError` for a name that no file system accepts."""
    found = absolute(text)
    return TypedPath(str(found), text) if text.startswith("~") else text


def find_absolute(text: str) -> str:
    """Return an absolute path for a name that is a file or folder on this machine. Return any other name unchanged.

    `~` is expanded. A weight after a dataset's name, as in a.jsonl:0.7, is kept.
    """
    if not text or isinstance(text, TypedPath) or "\0" in text:
        return text
    weighed = re.fullmatch(r"(.+)(:(?:\d+(?:\.\d*)?|\.\d+))", text)  # a dataset with its weight
    with contextlib.suppress(OSError, RuntimeError):
        for name, rest in ((text, ""), *([weighed.groups()] if weighed else [])):
            if os.path.exists(os.path.expanduser(name)):
                return TypedPath(f"{Path(name).expanduser().absolute()}{rest}", text)
    return text


def check_folder(folder: Path, setting: str, owns: Callable[[Path], bool] = lambda folder: False) -> None:
    """Check that a command may write into a folder: it does not exist, is empty, or `owns(folder)` is True.

    Otherwise raises `UserError`, which names `setting`. Nothing is written.
    """
    nearest = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if not nearest.is_dir():
        kind = "a link to nothing" if nearest.is_symlink() and not nearest.exists() else "a file"
        raise UserError(f"{nearest} is {kind}; choose a new or an empty folder as {setting}.")
    if folder.is_dir() and any(folder.iterdir()) and not owns(folder):
        raise UserError(f"{folder} holds files that this command did not write. Choose a new or an empty folder as {setting}.")


def check_claim(folder: Path, command: str, setting: str = "output_dir") -> None:
    """Raise `UserError` if the folder holds anything that `command` did not write. Nothing is written."""
    check_folder(folder, setting, lambda found: _owner(found) in (command, ""))


def claim(folder: Path, command: str, setting: str = "output_dir") -> Path:
    """Create the output folder of a command that is not a run, or reuse a folder that the same command made earlier.

    Raises `UserError` if the folder contains anything else or cannot be written.
    """
    check_claim(folder, command, setting)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OWNER).write_text(json.dumps({"command": command}) + "\n")
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be written: {error.strerror}. Choose another {setting}.") from error
    return folder


def _owner(folder: Path) -> Any:
    """Return the name of the command that made a folder; "" if its name is not written yet; None for any other folder."""
    try:
        text = (folder / OWNER).read_text()
        return text and json.loads(text).get("command")
    except (OSError, ValueError, AttributeError):
        return None


def check_output(output: str) -> None:
    """Raise `UserError` if the file `output` cannot be written or already has content. "" means no file.

    Call this before the work whose result goes to the file. The folder of the file is created.
    """
    if not output:
        return
    path = absolute(output)
    if path.is_file() and path.stat().st_size:
        raise UserError(f"{output} exists. Name a new file as --output, or delete the old one first.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}; name another file as --output.") from error
