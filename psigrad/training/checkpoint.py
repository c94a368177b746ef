"""Checkpoints that are either whole or not there.

A save writes a folder beside, fsyncs every file, writes `manifest.json` (sizes and SHA-256) last, renames, and fsyncs the parent. There is
no pointer file: the latest checkpoint is the newest that verifies. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from psigrad.errors import UserError

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.tmp-(\d+)-[0-9a-f]+")


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is not what was written."""


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that verifies (or None), its step, and a line for each newer one that was passed over."""

    path: Path | None
    step: int = 0
    ignored: list[str] = field(default_factory=list)


def save(root: Path, step: int, write: Callable[[Path], None], *, meta: Mapping[str, Any]) -> Path:
    """Make `root/step-…` out of what `write(folder)` puts into a folder; `meta` goes into the manifest.

    A checkpoint of the same step is replaced. Raises `CheckpointError` where the disk is full or read-only: what was there before is
    untouched.
    """
    final = root / f"step-{step:08d}"
    beside = root / f".step-{step:08d}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        write(beside)
        files = {str(path.relative_to(beside)): _sealed(path) for path in sorted(beside.rglob("*")) if path.is_file()}
        manifest = beside / MANIFEST
        manifest.write_text(json.dumps({"step": step, **meta, "files": files}, indent=1) + "\n")
        for path in [manifest, *(p for p in beside.rglob("*") if p.is_dir()), beside]:
            _fsync(path)
        if final.exists():
            aside = root / f".step-{step:08d}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            os.rename(final, aside)
            os.rename(beside, final)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(beside, final)
        _fsync(root)
    except (OSError, SafetensorError) as error:
        needed = sum(path.stat().st_size for path in beside.rglob("*") if path.is_file()) if beside.exists() else 0
        shutil.rmtree(beside, ignore_errors=True)
        raise _failed(root, error, needed) from error
    return final


def _failed(root: Path, error: Exception, written: int) -> CheckpointError:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    if not full:
        return CheckpointError(f"The checkpoint could not be written to {root}: {error}; the older checkpoints are intact.")
    free = shutil.disk_usage(root if root.exists() else root.parent).free
    return CheckpointError(
        f"The disk under {root} is full: {written} bytes of the checkpoint were written and {free} bytes are free; the older checkpoints "
        "are intact. Free some space and start again: the run goes on from the newest."
    )


def _sealed(path: Path) -> dict[str, Any]:
    _fsync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written. Raises `CheckpointError` naming the file that is not."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = dict(manifest["files"])
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} has no {MANIFEST}: its save was never finished.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name}/{MANIFEST} is damaged ({type(error).__name__}: {error}).") from None
    if manifest.get("step") != step_of(path):
        raise CheckpointError(f"{path.name}/{MANIFEST} is of step {manifest.get('step')!r}; the folder was renamed or mixed up.")
    for name, (size, digest) in expected.items():
        _verify_file(path, name, size, digest)
    return dict(manifest)


def _verify_file(root: Path, name: str, size: int, digest: str) -> None:
    file = root / name
    if (
        Path(name).is_absolute()
        or ".." in Path(name).parts
        or any(p.is_symlink() for p in (file, *file.parents) if root in p.parents)
    ):
        raise CheckpointError(f"{root.name}/{MANIFEST} names {name!r}, which leads out of the checkpoint; it is not one of ours.")
    if not file.is_file():
        raise CheckpointError(f"{root.name}/{name} is missing.")
    if file.stat().st_size != size:
        raise CheckpointError(f"{root.name}/{name} has {file.stat().st_size} bytes; {size} were written.")
    actual = sha256(file)
    if actual != digest:
        raise CheckpointError(f"{root.name}/{name} has SHA-256 {actual[:16]}…; {digest[:16]}… was written.")


def step_of(path: Path) -> int | None:
    """The step in a checkpoint folder's name, or None for another folder."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def _steps(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if step_of(path) is not None and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: -(step_of(path) or 0))


def latest(root: Path) -> Found:
    """The newest checkpoint under `root` that verifies; the lines in `ignored` say why newer ones do not."""
    ignored = []
    for path in _steps(root):
        try:
            verify(path)
        except CheckpointError as error:
            ignored.append(str(error))
            continue
        return Found(path, step_of(path) or 0, ignored)
    return Found(None, 0, ignored)


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` (at least 1) checkpoints, counted from the newest that verifies, and leftovers of dead saves."""
    newest = latest(root)
    if newest.path is not None:
        older = [path for path in _steps(root) if (step_of(path) or 0) < newest.step]
        for path in older[max(1, keep) - 1 :]:
            shutil.rmtree(path, ignore_errors=True)
    for path in root.iterdir() if root.is_dir() else ():
        match = _TEMPORARY.fullmatch(path.name)
        if match and int(match.group(1)) != os.getpid() and not _alive(int(match.group(1))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Named tensors as a safetensors file."""
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises `CheckpointError` where it is none."""
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no safetensors file ({error}).") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """AdamW's moments and step counts as "exp_avg.<name>" and so on; `names` are the parameters' in the optimiser's order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{key}.{name}": value
        for name, parameter in zip(names, parameters, strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`. Raises `CheckpointError` where the tensors are of other parameters."""
    parameters = {
        name: p for name, p in zip(names, (p for group in optimizer.param_groups for p in group["params"]), strict=True)
    }
    states: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        if name not in parameters:
            raise CheckpointError(f"The optimiser's state holds {name!r}, which is no parameter that learns in this run.")
        states.setdefault(name, {})[kind] = value
    for name, state in states.items():
        p = parameters[name]
        optimizer.state[p] = {k: v.clone() if k == "step" else v.to(device=p.device, dtype=v.dtype) for k, v in state.items()}
