"""Small truths about disks that checkpoints and run folders share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Everything in a file, or the names in a folder, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` of every file below a folder, then of the folders."""
    below = sorted(folder.rglob("*"))
    for path in [*(p for p in below if p.is_file()), *(p for p in below if p.is_dir()), folder]:
        sync(path)


def free_bytes(path: Path) -> int:
    """Bytes free where `path` is or would be."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def size_of(folder: Path) -> int:
    """Bytes in the files below a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def is_trouble(error: BaseException) -> bool:
    """Whether an exception tells of the disk: the Rust code of safetensors and tokenizers has no OSError and says it in words."""
    return isinstance(error, OSError) or "(os error " in str(error)
