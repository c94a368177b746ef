"""The run folder: all data of a run, as files in open formats. Trainers write it; reports and the studio only read it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from psigrad import paths, redaction
from psigrad.errors import NO_LOCKS, UserError
from psigrad.records import checkpoint, output_folder, pins, row_lines
from psigrad.records.output_folder import ROWS
from psigrad.records.rows import FORMAT, parse_row

VIDEO = "episode.gif"
_WRITTEN = (".jsonl", ".json", ".damaged", ".html", ".txt", ".log", ".gif")
REPLAYS = "replays"
"""The folder, within a run folder, of the pages that `psigrad replay` writes."""
# The size in bytes at which a new rollouts.jsonl starts.
PART = 1 << 30


class RunFolderError(UserError):
    """Raised for a run folder that is in use, is damaged, cannot be written, or does not match the setting `run.resume`."""


def to_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as one line of strict JSON.

    NaN and infinities become strings. All non-ASCII characters are escaped, so lone surrogates are preserved.
    """
    return (json.dumps(_strict(row), ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return value


def settings_before(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the run in `folder`, from config.json or its newest checkpoint; None if there is no run."""
    file = folder / "config.json"
    found = parse_row(file.read_bytes()) if file.exists() else None
    if found is None and (newest := checkpoint.latest(folder / "checkpoints")).path is not None:
        return newest.manifest.get("settings")
    if found is None and file.exists():
        raise RunFolderError(
            f"{file} is damaged, and there is no checkpoint; copy it from a backup, or choose another output_dir."
        )
    return found


class RunFolder:
    """A run folder that this process has locked and writes. Use `RunFolder.open` to open one."""

    def __init__(self, path: Path, lock: BinaryIO) -> None:
        self.path, self._lock = path, lock
        self.checkpoints = path / "checkpoints"
        self._files: dict[str, BinaryIO] = {}
        self.settings: dict[str, Any] = {}
        """The run's settings in the form of config.json."""
        self._changes: list[pins.Change] = []
        self.rows: dict[str, int] = {}
        """{file: number of rows} for metrics, timings and rollouts."""
        self.checkpoint_bytes = 0
        """The size of the newest checkpoint that this process has saved; 0 before the first one."""
        self.finished = False
        """True if the run finished earlier, its model is unchanged, and there is nothing left to do."""
        self._identity, self._ends = row_lines.identity(path), dict[str, int]()
        self.pins: dict[str, str] = {}
        """The pins of a finished run, by the names of `pins.PINS`."""

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, path: str | Path, config: Mapping[str, Any], resume: str = "auto", settings: type[Any] | None = None
    ) -> Iterator[RunFolder]:
        """Create the folder at `path`, or resume the run in it, and hold its lock while the block runs.

        Raise `UserError` if the folder contains other files or a run with other settings, if another process has locked it, or
        if it does not match `resume`. The class `settings` marks the settings that may differ.
        """
        path = paths.absolute(path)
        if str(path).encode("utf-8", "replace") != os.fsencode(path):  # the Rust libraries that write models accept no other name
            raise RunFolderError(f"The path {str(path)!r} is not UTF-8; choose another output_dir.")
        with _errors_of(path):
            paths.check_folder(path, "output_dir", output_folder.is_run)
            fresh, created = not (path.exists() and any(path.iterdir())), output_folder.create(path)
            for name in (".lock", ".config.json.tmp", "config.json", *(f"{rows}.jsonl" for rows in ROWS)):
                _reject_link(path / name, Path.is_file, "regular file")
            for name in ("checkpoints", "model"):
                _reject_link(path / name, Path.is_dir, "folder")
            for place in path.iterdir():  # other written files: damaged rows, parts, pages, and temporary files
                if place.name.startswith(".") or place.suffix in _WRITTEN:
                    _reject_link(place, lambda one: one.is_file() or one.is_dir(), "regular file or folder")
            lock = lock_folder(path)
        folder = cls(path, lock)
        try:
            with _errors_of(path):
                folder._begin({"format": FORMAT, **config}, resume, settings)
            yield folder
        except (UserError, KeyboardInterrupt):
            if fresh and not folder._has_started():
                output_folder.remove_unused(path, created)
            raise
        finally:
            for stream in folder._files.values():
                stream.close()
            lock.close()

    def _begin(self, config: Mapping[str, Any], resume: str, settings: type[Any] | None) -> None:
        if resume == "never" and any(self.checkpoints.glob("step-*")):
            raise RunFolderError(
                f"{self.path} has checkpoints, but resume is 'never'; choose another output_dir, or set resume to 'auto'."
            )
        if resume == "must" and checkpoint.latest(self.checkpoints).path is None:
            raise RunFolderError(
                f"{self.path} has no usable checkpoint, but resume is 'must'; check output_dir, or set resume to 'auto'."
            )
        file = self.path / "config.json"
        now = self.settings = json.loads(redaction.without(to_line(redaction.hide(config)), redaction.values()))
        changes: list[pins.Change] = []
        before = settings_before(self.path)
        if before is not None:
            pins.check_format(self.path, before)
            if self._has_started():
                changes = pins.check_settings(self.path, before, now, settings)
        damaged = self._has_started() and not (file.exists() and parse_row(file.read_bytes()))
        if damaged and file.exists():
            os.replace(file, file.with_name("config.json.damaged"))
        self._changes = changes
        if damaged or not changes:
            self._write_settings(before if before is not None and changes else now)
        self.checkpoints.mkdir(exist_ok=True)
        checkpoint.restore_folder(self.path / "model")
        for leftover in (".model.new", ".model.old"):
            shutil.rmtree(self.path / leftover, ignore_errors=True)
        row_lines.end_last_line(self.path / "events.jsonl")
        for name in ROWS:
            self._open(name)
        longer = any(change.is_length for change in changes)
        last = row_lines.last_event(self.path / "events.jsonl", "started", "resumed", "finished")
        self.finished = not longer and last.get("kind") == "finished" and self._holds_model(last.get("model") or {})
        self.pins = last.get("pins") or {}
        if damaged:
            known = "" if before is not None else " No checkpoint has the earlier settings, so the current ones are used."
            self._warn("config_damaged", f"config.json was damaged or missing and is written again.{known}")

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        row_lines.replace_file(self.path / "config.json", [(json.dumps(settings, indent=1) + "\n").encode()])

    def _holds_model(self, files: Mapping[str, Any]) -> bool:
        """Return True if the model of a finished run is unchanged. `files` has the sizes and hashes from the event "finished".

        If it has changed, rename its folder, so that the run writes the model again.
        """
        model = self.path / "model"
        try:
            checkpoint.check_sealed(model, files)
            return True
        except checkpoint.CheckpointError as error:
            if checkpoint.latest(self.checkpoints).path is None:
                raise RunFolderError(
                    f"{self.path} is finished, but its model is damaged, and there is no checkpoint to rebuild it from; "
                    f"copy the model from a backup, or choose another output_dir. {error}"
                ) from None
            aside = self.path / "model.damaged"
            if model.exists():
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(model, aside)
            self._warn("model_damaged", f"{error} The model is written again from the newest checkpoint.", reason=str(error))
            return False

    def _has_started(self) -> bool:
        """Return True if the run has a checkpoint, rows of metrics, timings or rollouts, or an event "started"."""
        files = [self.path / f"{name}.jsonl" for name in ROWS if name != "events"]
        if any(self.checkpoints.glob("step-*")) or any(file.exists() and file.stat().st_size for file in files):
            return True
        events = self.path / "events.jsonl"
        return events.exists() and b'"kind": "started"' in events.read_bytes()

    def _open(self, name: str) -> int:
        """Open the file `name`.jsonl for appending, and return its size in bytes."""
        self._files[name] = (self.path / f"{name}.jsonl").open("a+b", buffering=0)
        self._ends[name] = os.fstat(self._files[name].fileno()).st_size
        return self._ends[name]

    def _append(self, name: str, lines: bytes) -> None:
        stream, rest = self._files[name], memoryview(redaction.without(lines, redaction.values()))
        if name != "events":
            self.rows[name] = self.rows.get(name, 0) + lines.count(b"\n")
        with _errors_of(self.path):
            end = stream.seek(0, os.SEEK_END)
            try:
                while rest:
                    rest = rest[stream.write(rest) :]
                self._ends[name] = stream.tell()
            except OSError:
                stream.truncate(end)  # a row is either complete or absent
                raise

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Write one row of metrics.jsonl; `row` has a "step"."""
        self._append("metrics", to_line(row))

    def timings(self, row: Mapping[str, Any]) -> None:
        """Write one row of timings.jsonl: measured times, which differ if the run is repeated."""
        self._append("timings", to_line(row))

    def rollouts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of rollouts.jsonl."""
        told = ({**row, "reason": redaction.hide(row["reason"])} if row.get("reason") else row for row in rows)
        self._append("rollouts", b"".join(map(to_line, told)))

    def event(self, kind: str, **fields: Any) -> None:
        """Write an event: the time, `kind` and `fields`. Secrets are redacted, except in the field `rows` (dataset rows)."""
        if kind in ("started", "resumed") and self._changes:  # not earlier: a start that fails changes nothing
            changes, self._changes = {c.name: [c.before, c.now] for c in self._changes}, []
            self._write_settings(self.settings)
            self.event("settings_changed", changes=changes)
        data = {name: value for name, value in fields.items() if name == "rows"}
        self._append("events", to_line({"time": time.time(), "kind": kind, **redaction.hide(fields), **data}))

    def _warn(self, kind: str, text: str, **fields: Any) -> None:
        self.event(kind, **fields)
        redaction.say(f"{self.path}: {text}")

    def _check_unmoved(self) -> None:
        """Raise `RunFolderError` if the folder was moved or deleted. Restore files that were deleted or replaced."""
        if row_lines.identity(self.path) != self._identity:
            raise RunFolderError(
                f"{self.path} was moved or deleted during the run, so the run stopped. Move it back and start again: the run "
                "continues from its newest checkpoint."
            )
        for name, stream in tuple(self._files.items()):
            file, held = self.path / f"{name}.jsonl", os.fstat(stream.fileno())
            if row_lines.identity(file) != (held.st_dev, held.st_ino):
                row_lines.restore_file(file, stream)
                self._open(name)
                self._warn("rows_restored", f"{file.name} was deleted or replaced and is written again.", file=file.name)
            elif held.st_size < self._ends[name] and name in self.rows:
                row_lines.end_last_line(file)
                self._open(name)
                left = sum(1 for _ in row_lines.read_lines(file))
                missing, self.rows[name] = self.rows[name] - left, left
                self._warn("rows_missing", f"{file.name} was shortened and lacks {missing} rows.", file=file.name, rows=missing)

    def flush(self, step: int = -1, keep: int = 0) -> None:
        """Flush all written rows to the disk.

        Before a checkpoint is saved, pass its `step`, so that a large rollouts.jsonl is renamed. For `keep` see `rename_part`.
        """
        with _errors_of(self.path):
            self._check_unmoved()
            for stream in self._files.values():
                os.fsync(stream.fileno())
            if step >= 0 and os.fstat(self._files["rollouts"].fileno()).st_size >= PART:
                self._files["rollouts"].close()
                row_lines.rename_part(self.path, step, self.rows.get("rollouts", 0), keep)
                self.rows["rollouts"] = self._open("rollouts")
                checkpoint.sync(self.path)

    def rewind(
        self, step: int, written: Mapping[str, int] = MappingProxyType({}), ends: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Remove the rows of steps after `step` from metrics, timings and rollouts. Warn about damaged lines and missing rows.

        `written` and `ends` are the numbers of rows and of bytes that each file had when the checkpoint of `step` was saved.
        """
        with _errors_of(self.path):
            row_lines.restore_parts(self.path, step, written.get("rollouts"))
            for name in ("metrics", "timings", "rollouts"):
                file, expected = self.path / f"{name}.jsonl", written.get(name)
                self._files[name].close()
                found = row_lines.truncate_large(file, step, expected, ends.get(name))
                left, damaged = found or row_lines.truncate_to_step(file, step, expected)
                self.rows[name], _ = left, self._open(name)
                if damaged:
                    said = f"Damaged lines of {file.name} were moved to {file.name}.damaged; their number is {damaged}."
                    self._warn("rows_damaged", said, file=file.name, lines=damaged)
                if expected is not None and left < expected:
                    said = f"{file.name} lacks {expected - left} of its {expected} rows; the run continues without them."
                    self._warn("rows_missing", said, file=file.name, rows=expected - left)

    def ends(self) -> dict[str, int]:
        """Return {file: number of bytes} for metrics, timings and rollouts."""
        return {name: os.fstat(self._files[name].fileno()).st_size for name in self.rows}

    def disk_low(self) -> str:
        """Return an error message if the free disk space is less than 1.5 times the newest checkpoint's size; otherwise ""."""
        free, needed = checkpoint.free_bytes(self.path), self.checkpoint_bytes
        if free >= 1.5 * needed:
            return ""
        return f"The disk of {self.path} has {free} bytes free, and a checkpoint takes {needed}."

    def save_model(self, write: Callable[[Path], None]) -> Path:
        """Call `write(folder)` to write the final model, and return its path. A crash leaves the old model or the new one."""
        with _errors_of(self.path):
            self._check_unmoved()
            checkpoint.replace_folder(self.path / "model", write)
        return self.path / "model"


class NullRunFolder(RunFolder):
    """The run folder on every rank except rank 0. It has the path and writes nothing."""

    def __init__(self, path: Path, finished: bool) -> None:
        self.path, self.checkpoints = path, path / "checkpoints"
        self.checkpoint_bytes, self.finished, self.settings, self.rows, self.pins = 0, finished, {}, {}, {}
        self._changes = []

    def _append(self, name: str, lines: bytes) -> None:
        pass

    def rollouts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: rank 0 writes the rows."""

    def flush(self, step: int = -1, keep: int = 0) -> None:
        """Do nothing: rank 0 writes the rows and flushes them."""

    def rewind(
        self, step: int, written: Mapping[str, int] = MappingProxyType({}), ends: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Do nothing: rank 0 rewinds the files."""

    def disk_low(self) -> str:
        """Return "", since only rank 0 checks the disk."""
        return ""

    def save_model(self, write: Callable[[Path], None]) -> Path:
        """Return the path of the final model, which rank 0 writes."""
        return self.path / "model"


def truncate(folder: RunFolder, rows: Mapping[str, int], ends: Mapping[str, int]) -> None:
    """Truncate each file of rows to its first `ends[file]` bytes, which are `rows[file]` rows."""
    with _errors_of(folder.path):
        for name in folder.rows:
            folder._files[name].truncate(ends.get(name, 0))
    folder.rows = dict(rows)


def _reject_link(path: Path, is_right: Callable[[Path], bool], expected: str) -> None:
    """Raise `RunFolderError` if `path` is a link, or exists and fails the test `is_right`. `expected` names the right kind."""
    if path.is_symlink():
        raise RunFolderError(f"{path} is a link; a run folder holds its own files, so remove the link.")
    if path.exists() and not is_right(path):
        raise RunFolderError(f"{path} is not a {expected}; remove it, or choose another output_dir.")


def lock_folder(path: Path) -> BinaryIO:
    """Lock the folder and return the open lock file. Raise `RunFolderError` if another process holds the lock."""
    stream = (path / ".lock").open("a+b")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            where = f"{path} is on a file system without locks"
            redaction.say(f"{where}; make sure that no other run writes there.")
            return stream
        if not isinstance(error, BlockingIOError):
            raise
        stream.seek(0)
        holder = stream.read().decode(errors="replace").strip() or "another process"
        stream.close()
        raise RunFolderError(f"{path} is in use by {holder}; wait for it, stop it, or choose another output_dir.") from None
    stream.truncate(0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    stream.write(f"process {os.getpid()} on {socket.gethostname()}, since {started}".encode())
    stream.flush()
    return stream


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Convert disk errors in the block to a `RunFolderError` with advice."""
    try:
        yield
    except Exception as error:
        if not checkpoint.is_disk_trouble(error):
            raise
        what, why = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or error
        raise RunFolderError(
            f"{what} cannot be written: {why} ({checkpoint.free_bytes(path)} bytes are free). Everything saved before is intact. "
            "Free space or fix the permissions, and start again: the run continues from its newest checkpoint."
        ) from error
