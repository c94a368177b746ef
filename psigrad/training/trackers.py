"""Trackers behind one seam. They are told what the run folder is told, and can never stop a run."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
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


class Quiet:
    """A tracker whose failures are said once, and which is then left alone: observability never raises into training."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self.broken = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of one step, unless it failed before."""
        self._quietly(lambda: self.tracker.log(step, metrics))

    def close(self) -> None:
        """No more will come."""
        self._quietly(self.tracker.close)

    def _quietly(self, work: Callable[[], None]) -> None:
        if self.broken:
            return
        try:
            work()
        except Exception as error:
            self.broken = True
            _say(self.name, error)


def _say(name: str, error: Exception) -> None:
    warnings.warn(f"The tracker {name} failed and gets nothing more: {type(error).__name__}: {error}", stacklevel=4)


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of these names; one that does not start is said and left out.

    Raises `UserError` for an unknown name or a package that is not installed.
    """
    for name in names:
        if name not in KNOWN:
            raise UserError(f"There is no tracker {name!r}; expected {', '.join(KNOWN)}{nearest(name, KNOWN)}")
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(Quiet(name, KNOWN[name](folder, config)))
        except ImportError as error:
            raise UserError(f"The tracker {name} is not installed ({error}); run: pip install {name}") from error
        except Exception as error:
            _say(name, error)
    return opened
