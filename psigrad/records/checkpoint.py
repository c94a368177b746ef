"""Checkpoints that are either complete or absent: a folder gets its name once all its files are on the disk.

A checkpoint is intact if its files match `manifest.json`, which has their sizes and SHA-256. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from psigrad.errors import UserError
from psigrad.records.pins import check_format
from psigrad.records.rows import FORMAT

MANIFEST = "manifest.json"
# While a new checkpoint replaces one of the same step, the old one has the suffix `.replaced-…`.
_STEP = re.compile(r"step-(\d{8,})(\.replaced-[0-9a-f]{8})?")
_moving = threading.Lock()  # between the renames of `replace_folder`, the folder is missing
_TEMPORARY = re.compile(r"\.step-\d{8,}\.tmp-[0-9a-f]{8}")


class CheckpointError(UserError):
    """Raised for a checkpoint that cannot be written, or whose files differ from its manifest."""


@dataclass(frozen=True)
class Latest:
    """The newest intact checkpoint; `path` is None if there is none. `ignored` has the errors of newer, damaged checkpoints."""

    path: Path | None
    step: int = 0
    ignored: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)


def save(root: Path, step: int, write: Callable[[Path], Mapping[str, Any] | None], *, meta: Mapping[str, Any]) -> Path:
    """Save a checkpoint as `root/step-…`. `write(folder)` writes its files, and `meta` is added to its manifest.

    `write` may return the results of `seal_file` for some of the files, so that they are not hashed again.
    """
    final, beside = root / f"step-{step:08d}", _temporary(root, step)
    try:
        root.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        files = seal(beside, write(beside) or {})
        _write_manifest(beside / MANIFEST, {**meta, "format": FORMAT, "step": step, "files": files})
        sync_tree(beside)
        if final.exists():
            os.rename(final, root / f"{final.name}.replaced-{uuid.uuid4().hex[:8]}")
        os.rename(beside, final)
        _verified[final.absolute()] = _traces(final, files)
        sync(root)
    except Exception as error:
        written = size_of(beside)
        shutil.rmtree(beside, ignore_errors=True)
        if not is_disk_trouble(error):
            raise
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written to {root}: {error}; {written} bytes were written and "
            f"{free_bytes(root)} bytes are free{_needed(root)}. The older checkpoints are intact: free some space, and repeat "
            "the command to resume from the newest."
        ) from error
    for path in root.glob(f"{final.name}.replaced-*"):
        _discard(path)
    return final


def replace_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Write a folder with `write(folder)`, and rename it to `final` once it is complete. After a crash, call `restore_folder`."""
    beside, aside = (final.with_name(f".{final.name}.{state}") for state in ("new", "old"))
    shutil.rmtree(beside, ignore_errors=True)
    write(beside)
    sync_tree(beside)
    shutil.rmtree(aside, ignore_errors=True)
    with _moving:
        if final.is_dir():
            os.rename(final, aside)
        os.rename(beside, final)
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def restore_folder(final: Path) -> bool:
    """Rename the old folder back to `final` if a crash interrupted `replace_folder`. Return True if `final` then exists."""
    with _moving:
        if not final.is_dir() and (aside := final.with_name(f".{final.name}.old")).is_dir():
            os.rename(aside, final)
        return final.is_dir()


def _needed(root: Path) -> str:
    before = max((size_of(path) for path in steps(root)), default=0)
    return f"; the largest earlier one takes {before}" if before else ""


def _temporary(root: Path, step: int) -> Path:
    return root / f".step-{step:08d}.tmp-{uuid.uuid4().hex[:8]}"


def _discard(path: Path) -> None:
    """Delete a checkpoint. Rename it first, so that a partly deleted one is not mistaken for a checkpoint."""
    beside = _temporary(path.parent, step_of(path) or 0)
    os.rename(path, beside)
    shutil.rmtree(beside, ignore_errors=True)


def seal_file(path: Path) -> dict[str, Any]:
    """Flush a file to the disk. Return its size and its SHA-256."""
    found = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    sync(path)
    return found


def seal(folder: Path, known: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Flush the files below a folder to the disk. Return {path in the folder: size and SHA-256}.

    `known` has the entries of files that were sealed earlier, which are returned unchanged.
    """
    found = [path for path in folder.rglob("*") if path.is_file()]
    if lost := known.keys() - {str(path.relative_to(folder)) for path in found}:
        raise CheckpointError(
            f"{folder} lacks {', '.join(sorted(lost))}, which another process wrote; put output_dir on a shared disk."
        )
    files = sorted((p for p in found if str(p.relative_to(folder)) not in known), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor() as pool:
        sums = [pool.submit(sha256, path) for path in files]
        for path in files:
            sync(path)
        own = {path: {"bytes": path.stat().st_size, "sha256": sum.result()} for path, sum in zip(files, sums, strict=True)}
    every = {**known, **{str(path.relative_to(folder)): entry for path, entry in own.items()}}
    return {name: every[name] for name in sorted(every, key=lambda name: Path(name).parts)}


def check_sealed(folder: Path, files: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if one of `files`, the result of `seal`, is missing or changed, or if `files` is empty."""
    if not files:
        raise CheckpointError(f"{folder} holds no weights.")
    for name, entry in files.items():
        _verify_file(folder, name, entry)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n")


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content. The key "sha256" is excluded, since it stores this hash."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# The checkpoints that this process has written or verified. Each is hashed once, and again only if a file was touched since then.
_verified: dict[Path, Any] = {}


def _traces(path: Path, files: Mapping[str, Any]) -> list[Any]:
    """Return the name, inode, size and times of each file and of the manifest, to detect later changes without hashing."""
    found = ((name, (path / name).stat()) for name in (*files, MANIFEST))
    return [(name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found]


def verify(path: Path, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raise `CheckpointError` if a file is changed, missing or extra.

    If `size` is above 1, each process hashes a share of the files. Once all have succeeded, each must call `trust`.
    """
    manifest = read_manifest(path)
    check_format(path, manifest)
    if manifest["step"] != step_of(path):
        raise CheckpointError(
            f"{path.name}/{MANIFEST} belongs to step {manifest['step']!r}; the folder was renamed, or files of "
            "two checkpoints were mixed."
        )
    try:
        known = _verified.get(path.absolute())
        for n, (name, entry) in enumerate(manifest["files"].items()):
            _verify_file(path, name, entry, summed=known is None and n % size == rank)
        if known is not None and known != _traces(path, manifest["files"]):
            del _verified[path.absolute()]
            return verify(path, rank, size)
        for found in sorted(path.rglob("*")):
            name = str(found.relative_to(path))
            if found.is_symlink() or (not found.is_dir() and name not in (MANIFEST, *manifest["files"])):
                raise CheckpointError(f"{path.name}/{name} is not a file of this checkpoint; remove that file.")
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}.") from None
    if size == 1:
        trust(path, manifest)
    return manifest


def trust(path: Path, manifest: Mapping[str, Any]) -> None:
    """Record in this process that the checkpoint is intact. `verify` then hashes files again only if a size or time changes."""
    _verified[path.absolute()] = _traces(path, manifest["files"])


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raise `CheckpointError` if it is missing, or does not match its own hash."""
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path.name} has no {MANIFEST}: its save was never finished.")
    try:
        manifest = json.loads(file.read_text())
        whole = isinstance(manifest, dict) and manifest.get("sha256") == _digest(manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}/{MANIFEST} is damaged ({type(error).__name__}: {error}).") from None
    if not whole or not {"step", "files"} <= manifest.keys():
        raise CheckpointError(f"{path.name}/{MANIFEST} is damaged (its SHA-256 does not match its content).")
    return dict(manifest)


def _verify_file(root: Path, name: str, entry: Mapping[str, Any], summed: bool = True) -> None:
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts or any((root / Path(*parts[:n])).is_symlink() for n in range(1, len(parts) + 1)):
        raise CheckpointError(
            f"{root.name}/{MANIFEST} names {name!r}, which is outside the checkpoint; psigrad did not write this manifest."
        )
    file = root / name
    if not file.is_file():
        raise CheckpointError(f"{root.name}/{name} is missing.")
    if file.stat().st_size != entry["bytes"]:
        raise CheckpointError(f"{root.name}/{name} has {file.stat().st_size} bytes, but {entry['bytes']} bytes were written.")
    if summed and (actual := sha256(file)) != entry["sha256"]:
        raise CheckpointError(f"{root.name}/{name} has SHA-256 {actual[:16]}…, but had {entry['sha256'][:16]}… when saved.")


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None for any other folder."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def steps(root: Path) -> list[Path]:
    """Return the checkpoint folders, newest first. If an interrupted save left two of the same step, the new one comes first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if step_of(path) is not None and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: (-(step_of(path) or 0), path.name))


def latest(root: Path | Sequence[Path], limit: int | None = None, check: Callable[[Path], dict[str, Any]] = verify) -> Latest:
    """Return the newest intact checkpoint whose step is at most `limit`.

    `root` is the folder that contains the checkpoints, or a list of them, newest first. `check` returns the manifest of a
    checkpoint, or raises `CheckpointError` if it is damaged.
    """
    ignored = []
    for path in steps(root) if isinstance(root, Path) else root:
        if limit is not None and (step_of(path) or 0) > limit:
            continue
        try:
            manifest = check(path)
        except CheckpointError as error:
            ignored.append(str(error))
            continue
        return Latest(path, step_of(path) or 0, ignored, manifest)
    return Latest(None, 0, ignored)


def prune(root: Path, keep: int, spare: int = 0) -> None:
    """Delete unfinished checkpoints, and all finished ones except the last `keep` and the one of step `spare`."""
    newest = latest(root).path
    if newest is not None:
        places = steps(root)  # damaged ones after the newest intact one stay, so that a user can inspect them
        for path in places[places.index(newest) + max(1, keep) :]:
            if step_of(path) != spare or not spare:
                _discard(path)
    for path in root.iterdir() if root.is_dir() else ():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors to a safetensors file."""
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raise `CheckpointError` for any other file."""
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a safetensors file ({error}).") from error


def sync(path: Path) -> None:
    """Flush a file, or the list of files in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Call `sync` for all files in a folder and its subfolders, and then for the folders."""
    below = sorted(folder.rglob("*"))
    for path in [*(p for p in below if p.is_file()), *(p for p in below if p.is_dir()), folder]:
        sync(path)


def free_bytes(path: Path) -> int:
    """Return the number of free bytes on the disk of `path`. The path need not exist."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def size_of(folder: Path) -> int:
    """Return the number of bytes in the files below a folder; 0 if the folder does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def is_disk_trouble(error: BaseException) -> bool:
    """Return True for an `OSError`, or an error of safetensors or tokenizers that reports one."""
    return isinstance(error, OSError) or "(os error " in str(error)
