"""Figures of `learn` for TensorBoard, in folders that are numbered as Stable-Baselines3 does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from psigrad.runs.trackers import open_trackers

Log = Callable[[int, Mapping[str, float]], None]
"""Is told the steps so far and the figures of a line."""


@contextmanager
def logging_to(root: str | Path | None, name: str, again: bool) -> Iterator[Log]:
    """Logs figures in the folder `root`/`name`_N, with N one more than there are; `again`: in the newest of them. Without `root`
    nowhere. Raises `UserError` where TensorBoard is not installed.
    """
    if root is None:
        yield lambda steps, figures: None
        return
    numbers = [int(n) for path in Path(root).glob(f"{name}_*") if (n := path.name.removeprefix(f"{name}_")).isdigit()]
    newest = max(numbers, default=0)
    (tracker,) = open_trackers(["tensorboard"], Path(root) / f"{name}_{max(1, newest if again else newest + 1)}", {})
    try:
        yield tracker.log
    finally:
        tracker.close()
