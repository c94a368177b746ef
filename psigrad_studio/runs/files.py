"""Incremental reading of files that another process may be writing, without disturbing the writer."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 16 << 20
_MARK = 256


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Yield a regular file, opened for reading.

    Raises `OSError` for anything else: links could point outside the folder, pipes would block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{path} is not a regular file")
        yield stream


def content(path: Path, most: int = 4 << 20) -> bytes:
    """Return the content of a small file; empty if it is missing, larger than `most`, or unreadable."""
    try:
        with opened(path) as stream:
            found = stream.read(most + 1)
    except OSError:
        return b""
    return found if len(found) <= most else b""


@dataclass
class Tail:
    """A reader of a growing file, which returns each line once.

    A file that was truncated, replaced or rewritten is read again from the start, and `generation` counts how often. A resumed
    run, for example, truncates its rows to its checkpoint. A last line without a newline is left for the next read.
    """

    path: Path
    longest: int = LONGEST_LINE
    """The maximum number of bytes of a line. A longer line is read in pieces, which are no valid rows."""
    generation: int = 0
    offset: int = 0
    _identity: tuple[int, int] | None = None
    _mark: bytes = b""
    _looked: tuple[int, int, int] | None = field(default=None, repr=False)

    def restarted(self) -> bool:
        """Return True if the file no longer contains the bytes that were read. Reading then starts again at the beginning."""
        try:
            with opened(self.path) as stream:
                same = self._same(stream)
        except OSError:
            same = self.offset == 0
        if same:
            return False
        self.offset, self._identity, self._mark, self._looked = 0, None, b"", None
        self.generation += 1
        return True

    def lines(self, most: int = 1 << 62) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, line) of the new complete lines, until about `most` bytes are read."""
        try:
            with opened(self.path) as stream:
                yield from self._read(stream, most)
        except OSError:
            return

    def _same(self, stream: BinaryIO) -> bool:
        status = os.fstat(stream.fileno())
        looked = (status.st_ino, status.st_size, status.st_mtime_ns)
        if looked == self._looked or self.offset == 0:
            return True
        if self._identity != (status.st_dev, status.st_ino) or status.st_size < self.offset:
            return False
        stream.seek(self.offset - len(self._mark))
        return stream.read(len(self._mark)) == self._mark

    def _read(self, stream: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
        status = os.fstat(stream.fileno())
        self._identity = (status.st_dev, status.st_ino)
        looked = (status.st_ino, status.st_size, status.st_mtime_ns)
        if looked == self._looked:
            return
        stream.seek(self.offset)
        taken = 0
        while taken < most:
            line = stream.readline(self.longest)
            if not line.endswith(b"\n") and len(line) < self.longest:  # still being written
                self._looked = looked
                return
            at = self.offset
            self.offset += len(line)
            taken += len(line)
            self._mark = line[-_MARK:]
            if len(line) > 1:
                yield at, line
