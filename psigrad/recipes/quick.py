"""A quicker start."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Imports of torch and transformers without the garbage collector, which would walk their objects again and again: a tenth of
    the time to the first step. What they made lives as long as the process and is not looked at later either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
