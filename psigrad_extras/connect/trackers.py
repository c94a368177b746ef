"""Experiment trackers behind one interface. They get the same data as the run folder, and their failures never stop a run."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from psigrad import extras, redaction
from psigrad.config.nested import flatten
from psigrad.errors import UserError, nearest
from psigrad.records import checkpoint
from psigrad.runs.journal import Tracker

# The columns of a table of completions, and its maximum rows per step.
COLUMNS, ROWS = ("step", "kind", "prompt", "completion", "reward", "advantage"), 32
# The number of steps between two tables of training completions. Tables of held-out completions are sent for each evaluation.
EVERY = 10


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return completions as rows of `COLUMNS`, with conversations as text."""
    return [[_cell(row.get(name)) for name in COLUMNS] for row in rows[:ROWS]]


def _cell(value: Any) -> Any:
    if isinstance(value, list | tuple):  # messages
        return "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, Mapping) else str(m) for m in value)
    return value


def run_id_of(folder: Path) -> str:
    """Return an id for the run in this folder, which stays the same when the run resumes."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def command_holds_secrets() -> bool:
    """Return True if the command line of this process has secrets, since some trackers record it unchanged."""
    return bool(redaction.clear(sys.argv) != sys.argv)


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # a resumed run logs the steps after its checkpoint again, and TensorBoard then hides the old ones
        behind = [(checkpoint.step_of(path) or 0) + 1 for path in checkpoint.steps(folder / "checkpoints")[:1]]
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=behind[0] if behind else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        clean = lambda cell: str(cell).replace("|", "\\|").replace("\n", "<br>")  # noqa: E731
        self.writer.add_text(
            "completions", "\n".join([*lines, *(f"| {' | '.join(map(clean, r))} |" for r in table_of(rows))]), step
        )

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self.wandb = wandb
        known: dict[str, Any] = {"id": run_id_of(folder), "resume": "allow"}
        if command_holds_secrets():
            known["settings"] = wandb.Settings(x_disable_meta=True)
        self.run = wandb.init(project="psigrad", name=folder.name, dir=str(folder), config=dict(config), **known)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.run.log({"completions": self.wandb.Table(columns=list(COLUMNS), data=table_of(rows))}, step=step)

    def close(self) -> None:
        self.run.finish()


class _Trackio:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(project="psigrad", name=folder.name, config=dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log({"step": step, **metrics})

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import pandas

        table = pandas.DataFrame(table_of(rows), columns=list(COLUMNS))
        self.trackio.log({"step": step, "completions": self.trackio.Table(dataframe=table)})

    def close(self) -> None:
        self.trackio.finish()


class _MLflow:
    """A run in MLflow, at MLFLOW_TRACKING_URI. Its id is stored in the run folder, so that a resumed run continues it."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        self.mlflow, noted = mlflow, folder / "mlflow_run_id"
        before = noted.read_text().strip() if noted.exists() else None
        if not (os.environ.get("MLFLOW_EXPERIMENT_NAME") or os.environ.get("MLFLOW_EXPERIMENT_ID")):
            mlflow.set_experiment("psigrad")
        run = mlflow.start_run(run_id=before, run_name=None if before else folder.name)
        if before is None:
            noted.write_text(run.info.run_id)
            mlflow.log_params({name: str(value)[:500] for name, value in flatten(config).items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow's names must not contain "@", as in pass@4.
        self.mlflow.log_metrics({re.sub(r"[^\w\-. /:]", "_", name): value for name, value in metrics.items()}, step=step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = zip(*table_of(rows), strict=True)
        self.mlflow.log_table(dict(zip(COLUMNS, map(list, columns), strict=True)), "completions.json")

    def close(self) -> None:
        self.mlflow.end_run()


class _SwanLab:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import swanlab

        self.swanlab = swanlab
        known: dict[str, Any] = {"id": run_id_of(folder), "resume": "allow", "log_dir": str(folder / "swanlog")}
        # SwanLab would record the command, and the address of git's remote with a token in it.
        probe = swanlab.Settings.Probe(git=False, runtime=not command_holds_secrets())
        known["settings"] = swanlab.Settings(probe=probe)
        swanlab.init(project="psigrad", name=folder.name, config=dict(config), **known)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.swanlab.log(dict(metrics), step=step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [self.swanlab.Text("\n".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, row, strict=True)))
                 for row in table_of(rows)]  # fmt: skip
        self.swanlab.log({"completions": texts}, step=step)

    def close(self) -> None:
        self.swanlab.finish()


KNOWN: dict[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _MLflow,
    "swanlab": _SwanLab,
}


class Background:
    """A tracker that runs in its own thread, so that training never waits for it. If it fails or hangs, psigrad warns once.

    `make` opens the tracker in that thread. Metrics wait in a queue of `ROOM` steps. If it is full, the oldest are dropped.
    """

    ROOM = 10_000
    PATIENCE = 20.0
    """The seconds that `close` waits until the queue is empty."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name, self._make = name, make
        self._waiting: deque[Callable[[Tracker], None]] = deque(maxlen=self.ROOM)
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of one step."""
        self._waiting.append(lambda tracker: tracker.log(step, metrics))
        self._wake.set()

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue the first completions of a step. Those of training are queued every tenth step."""
        if rows and (step == 1 or step % EVERY == 0 or rows[0].get("kind") == "eval"):
            kept = redaction.clear([{name: row.get(name) for name in COLUMNS} for row in rows[:ROWS]])
            self._waiting.append(lambda tracker: tracker.completions(step, kept))
            self._wake.set()

    def close(self) -> None:
        """Wait until the tracker has sent everything, for at most `PATIENCE` seconds, and close it."""
        self._closing = True
        self._wake.set()
        self._thread.join(self.PATIENCE)
        if self._thread.is_alive():
            _tell(self.name, f"did not answer for {self.PATIENCE:g} s; {len(self._waiting)} steps were not sent to it")

    def _work(self) -> None:
        try:
            tracker = self._make()
            while not (self._closing and not self._waiting):
                self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    self._waiting.popleft()(tracker)
            tracker.close()
        except Exception as error:
            _tell(self.name, f"failed and is no longer used: {type(error).__name__}: {error}")


def _tell(name: str, what: str) -> None:
    redaction.say(f"the tracker {name} {what}")


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Open the trackers of these names. Raises `UserError` for an unknown name or a package that is not installed."""
    for name in names:
        if name not in KNOWN:
            raise UserError(f"There is no tracker {name!r}; expected one of {', '.join(KNOWN)}{nearest(name, KNOWN)}")
        with extras.needing(f"The tracker {name}", name):
            importlib.import_module(name)
    return [Background(name, partial(KNOWN[name], folder, config)) for name in names]
