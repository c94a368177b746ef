"""The JSON Lines files of a run: read them despite damaged lines, and truncate them to a step.

Damaged lines are lines that are not rows, and rows whose step is out of order.
"""

from __future__ import annotations

import bisect
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from psigrad.records.rows import parse_row, parse_step

# A file of at least `_LARGE` bytes is truncated without reading all of it, which would take 15 seconds per gigabyte: only its
# last `_TAIL` bytes are searched for a row.
_LARGE, _TAIL = 1 << 26, 1 << 22
_PART = re.compile(r"rollouts-(\d{8,})-(\d+)\.jsonl")


class RolloutPart(NamedTuple):
    """An earlier part of rollouts.jsonl, renamed when it became too large. The file name has its last step and number of rows."""

    path: Path
    last: int
    rows: int


def parts_of(folder: Path) -> list[RolloutPart]:
    """Return the renamed parts of rollouts.jsonl, oldest first."""
    found = ((path, _PART.fullmatch(path.name)) for path in folder.glob("rollouts-*.jsonl"))
    return sorted((RolloutPart(path, int(match[1]), int(match[2])) for path, match in found if match), key=lambda part: part.last)


def rollout_files(folder: Path) -> list[Path]:
    """Return the files with a run's completions, oldest first: `parts_of(folder)`, then rollouts.jsonl."""
    return [part.path for part in parts_of(folder)] + [folder / "rollouts.jsonl"]


def rename_part(folder: Path, last: int, rows: int, keep: int) -> None:
    """Rename rollouts.jsonl, which has `rows` rows up to step `last`; see `RolloutPart`.

    Then delete the oldest parts, as long as the remaining ones have at least `keep` rows (0: delete nothing).
    """
    os.replace(folder / "rollouts.jsonl", folder / f"rollouts-{last:08d}-{rows}.jsonl")
    parts = parts_of(folder)
    while keep and parts and sum(part.rows for part in parts[1:]) >= keep:
        parts.pop(0).path.unlink()


def restore_parts(folder: Path, step: int, written: int | None) -> None:
    """Undo the renaming of rollouts.jsonl since the checkpoint of `step`, when the file had `written` rows."""
    for part in reversed(parts_of(folder)):
        if part.last > step or (part.last == step and part.rows == written):
            os.replace(part.path, folder / "rollouts.jsonl")  # deletes the file begun since then


class Truncation(NamedTuple):
    """The result of truncating a file: the numbers of remaining rows and of damaged lines, which are moved to FILE.damaged."""

    rows: int
    damaged: int


def read_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file, or nothing if it is missing or not a regular file."""
    if file.is_file():
        with file.open("rb") as stream:
            yield from stream


def read_steps(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics, timings or rollouts in the order in which they were written; skip other lines."""
    return (row for line in read_lines(file) if (row := parse_step(line)) is not None)


def last_event(events: Path, *kinds: str) -> dict[str, Any]:
    """Return the last event of one of these `kinds`, searching the last megabyte of the file; {} if there is none."""
    with events.open("rb") as stream:
        stream.seek(max(0, events.stat().st_size - (1 << 20)))
        lines = stream.read().splitlines()
    return next((row for line in reversed(lines) if (row := parse_row(line)) and row.get("kind") in kinds), {})


def end_last_line(file: Path, *, cut: bool = True) -> None:
    """Make a file end with a line break, so that the next row begins a new line. Remove an incomplete last row if `cut`."""
    begin = end = 0
    line = b"\n"
    for line in read_lines(file):
        begin, end = end, end + len(line)
    if line.endswith(b"\n"):
        return
    if parse_row(line) is not None:
        with file.open("ab") as stream:
            stream.write(b"\n")
    elif cut:
        _truncate(file, begin)


def truncate_to_step(file: Path, step: int, written: int | None) -> Truncation:
    """Truncate a file to its rows up to step `step`. Move the damaged lines among them to FILE.damaged.

    `written` is how many rows the run had written up to `step`; None if unknown.
    """
    end_last_line(file, cut=False)
    ends, steps, end = array("q", [0]), array("q"), 0
    for line in read_lines(file):
        end += len(line)
        row = parse_step(line)
        ends.append(end)
        steps.append(-1 if row is None else row["step"])
    kept = [i for i in _longest_order(steps) if steps[i] <= step]
    last = kept[-1] + 1 if kept else 0
    # missing rows may be among the lines after the last row, so these are then kept in FILE.damaged
    behind = len(steps) if written is not None and len(kept) < written else last
    damaged = [] if len(kept) == behind else sorted({*range(behind)}.difference(kept))
    if damaged:
        _move_damaged(file, [(ends[i], ends[i + 1]) for i in damaged])
    if damaged and damaged[0] < last:
        _keep(file, [(ends[i], ends[i + 1]) for i in kept])
    elif end > ends[last]:
        _truncate(file, ends[last])
    return Truncation(len(kept), len(damaged))


def truncate_large(file: Path, step: int, written: int | None, end: int | None) -> Truncation | None:
    """Truncate a large file to its first `end` bytes, the `written` rows up to `step`, without reading all of it.

    Change nothing and return None if the file is small, or if the numbers are unknown or do not match the file.
    """
    if written is None or end is None or end < _LARGE or not file.is_file() or file.stat().st_size < end:
        return None
    with file.open("rb") as stream:
        stream.seek(max(0, end - _TAIL))
        tail = stream.read(end - stream.tell())
    last = parse_step(tail[tail[:-1].rfind(b"\n") + 1 :])
    if not tail.endswith(b"\n") or last is None or last["step"] > step:
        return None
    _truncate(file, end)
    return Truncation(written, 0)


def _longest_order(steps: array[int]) -> list[int]:
    """Return the positions of the longest non-decreasing subsequence of `steps`, by patience sorting. Steps of -1 are ignored."""
    ends: list[int] = []  # ends[n]: of the subsequences of length n + 1, the position of the smallest last step
    lasts: list[int] = []
    before = array("q")
    for i, step in enumerate(steps):
        at = bisect.bisect_right(lasts, step) if step >= 0 else -1
        before.append(ends[at - 1] if at > 0 else -1)
        if at >= 0:
            ends[at : at + 1], lasts[at : at + 1] = [i], [step]
    found, at = [], ends[-1] if ends else -1
    while at >= 0:
        found.append(at)
        at = before[at]
    return found[::-1]


def _move_damaged(file: Path, spans: list[tuple[int, int]]) -> None:
    with file.open("rb") as stream, file.with_name(f"{file.name}.damaged").open("ab") as aside:
        for begin, end in spans:
            stream.seek(begin)
            aside.write(stream.read(end - begin).rstrip(b"\n") + b"\n")
        aside.flush()
        os.fsync(aside.fileno())


def _keep(file: Path, spans: list[tuple[int, int]]) -> None:
    with file.open("rb") as stream:

        def pieces() -> Iterator[bytes]:
            for begin, end in spans:
                stream.seek(begin)
                yield stream.read(end - begin)

        replace_file(file, pieces())


def replace_file(file: Path, content: Iterable[bytes], writer: str = "") -> None:
    """Replace the content of a file atomically, and flush it to the disk.

    Processes that may do this at the same time must pass different values of `writer`.
    """
    beside = file.with_name(f".{file.name}{writer}.tmp")
    try:
        with beside.open("wb") as stream:
            stream.writelines(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def identity(path: Path) -> tuple[int, int] | None:
    """Return (device, inode) of a file or folder; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def restore_file(file: Path, stream: BinaryIO) -> None:
    """Write a file again from its open `stream`, after it was deleted or replaced by another file. Close the stream.

    If there is another file of this name now, rename it to FILE.replaced.
    """

    def pieces() -> Iterator[bytes]:
        stream.seek(0)
        while piece := stream.read(1 << 20):
            yield piece

    if file.is_file():
        os.replace(file, file.with_name(f"{file.name}.replaced"))
    replace_file(file, pieces())
    stream.close()


def _truncate(file: Path, size: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(size)
        os.fsync(stream.fileno())
