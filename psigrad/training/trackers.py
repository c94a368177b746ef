"""Trackers behind one seam. They are told what the run folder is told, and can never stop a run."""

from __future__ import annotations

import hashlib
import importlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from psigrad.errors import UserError, nearest


class Tracker(Protocol):
    """Where figures go besides the run folder."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of one step."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        # one folder is one run, also when it goes on after a stop
        name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self.run = wandb.init(project="psigrad", id=name, name=folder.name, dir=str(folder), config=dict(config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class _Trackio:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(project="psigrad", name=folder.name, config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log({"step": step, **metrics})

    def close(self) -> None:
        self.trackio.finish()


KNOWN: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}


class Background:
    """A tracker in a thread of its own. If it fails or hangs, it is told about once and left alone; training never waits for it.

    `make` opens the tracker there. Figures wait in a queue of `ROOM` steps; beyond that the oldest are lost.
    """

    ROOM = 10_000
    PATIENCE = 20.0
    """Seconds that `close` waits for what is still in the queue."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name, self._make = name, make
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=self.ROOM)
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the figures of one step."""
        self._waiting.append((step, metrics))
        self._wake.set()

    def close(self) -> None:
        """Let the tracker finish, for at most `PATIENCE` seconds."""
        self._closing = True
        self._wake.set()
        self._thread.join(self.PATIENCE)
        if self._thread.is_alive():
            _tell(self.name, f"does not answer after {self.PATIENCE:g} s; {len(self._waiting)} steps were not sent")

    def _work(self) -> None:
        try:
            tracker = self._make()
            while not (self._closing and not self._waiting):
                self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    tracker.log(*self._waiting.popleft())
            tracker.close()
        except Exception as error:
            _tell(self.name, f"failed and gets nothing more: {type(error).__name__}: {error}")


def _tell(name: str, what: str) -> None:
    print(f"psigrad: the tracker {name} {what}", file=sys.stderr)


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of these names. Raises `UserError` for an unknown name or a package that is not installed."""
    for name in names:
        if name not in KNOWN:
            raise UserError(f"There is no tracker {name!r}; expected {', '.join(KNOWN)}{nearest(name, KNOWN)}")
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"The tracker {name} is not installed ({error}); run: pip install {name}") from error
    return [Background(name, partial(KNOWN[name], folder, config)) for name in names]
