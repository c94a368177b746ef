"""Scripts of the checkout, which are in no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(path: str | Path) -> ModuleType:
    """Import a script, named by its path in the checkout. Each call returns a fresh module."""
    file = (ROOT / path).resolve()
    name = f"script_{file.parent.name}_{file.stem}"  # its dataclasses look themselves up there
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
