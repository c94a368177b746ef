"""The folder of psigrad's caches: encoded rows, converted models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder of the cache `name`: in the folder $PSIGRAD_CACHE, or else in psigrad/ of the user's cache folder."""
    given = os.environ.get("PSIGRAD_CACHE")
    return Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "psigrad") / name
