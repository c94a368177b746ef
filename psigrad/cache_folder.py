"""Where psigrad keeps what it can make again: encoded rows, converted models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder of that name in `PSIGRAD_CACHE`, or in `psigrad` in the user's folder for such things."""
    given = os.environ.get("PSIGRAD_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "psigrad") / name
