"""A quicker start."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Imports of torch and transformers without what makes them slow, half a second of the time to the first step.

    The garbage collector would walk their objects again and again; what they made lives as long as the process and is not looked
    at later either. And see `_models_read_once`.
    """
    gc.disable()
    try:
        with _models_read_once():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _models_read_once() -> Iterator[None]:
    """transformers reads the 1600 files of its models when it is imported, and again when the first of them is wanted: it caches
    what it read, but 128 folders of 550. What it knows from the first time is handed out the second time.

    Where another version has it otherwise, or has read them twice already, nothing is changed.
    """
    import transformers
    from transformers.utils import import_utils

    asked: Any = getattr(import_utils, "define_import_structure", None)
    models = Path(transformers.__file__).parent / "models"
    found = getattr(asked, "cache_info", None)
    if found is None or found().currsize != 1:
        yield
        return

    def known(path: Any, prefix: str | None = None) -> Any:
        if Path(path) != models / "__init__.py" or prefix is not None:
            return asked(path, prefix)
        # the same call as transformers' own, from its cache
        return _within("models", asked(models, prefix="models"))

    import_utils.define_import_structure = known
    try:
        yield
    finally:
        import_utils.define_import_structure = asked


def _within(package: str, structure: dict[Any, dict[str, set[str]]]) -> dict[Any, dict[str, set[str]]]:
    """An import structure as it is inside of one of its packages."""
    start = f"{package}."
    return {
        needs: {name.removeprefix(start): names for name, names in modules.items() if name.startswith(start)}
        for needs, modules in structure.items()
    }
