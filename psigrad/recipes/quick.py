"""A quicker start."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Where transformers reads what its models' files offer.
_READER = "transformers.utils.import_utils"


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Imports of torch and transformers without what makes them slow, a second of the time to the first step.

    The garbage collector would walk their objects again and again; what they made lives as long as the process and is not looked
    at later either. And see `_models_read_quickly`.
    """
    gc.disable()
    try:
        with _models_read_quickly():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _models_read_quickly() -> Iterator[None]:
    """transformers reads the 1600 files of its models when it is imported, looks at each of their lines, and does it again when
    the first model is wanted: it caches what it read, but 128 folders of 550. Here it looks for the line that it wants, and
    reads once.

    Where another version has it otherwise, nothing is changed; afterwards everything is as it was.
    """
    with contextlib.ExitStack() as changes:
        if _READER in sys.modules:
            _quicken(sys.modules[_READER], changes)
        else:
            hook = _AfterImport(_READER, lambda module: _quicken(module, changes))
            sys.meta_path.insert(0, hook)
            changes.callback(sys.meta_path.remove, hook)
        yield


def _quicken(reader: ModuleType, changes: contextlib.ExitStack) -> None:
    names = getattr(reader, "fetch__all__", None)
    if callable(names):
        # It takes the last line that begins so, and what follows. Where there is none, the text stays whole.
        _put(reader, "fetch__all__", lambda text: names(text[text.rfind("\n__all__") + 1 :]), changes)
    folders: Any = getattr(reader, "create_import_structure_from_path", None)
    if hasattr(folders, "cache_info") and hasattr(folders, "__wrapped__"):
        _put(reader, "create_import_structure_from_path", lru_cache(maxsize=None)(folders.__wrapped__), changes)


def _put(module: ModuleType, name: str, value: Callable[..., Any], changes: contextlib.ExitStack) -> None:
    changes.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


class _AfterImport:
    """Calls `then` with the module of that name once it was executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self.name = name
        self.then = then

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As importlib asks its finders."""
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
