"""A cache of rows and their tokens in memory-mapped Arrow files, each followed by its SHA-256."""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar, overload

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.examples import Answer, Example, LabelledAnswer, Pair, Steps
from psigrad.language.images import FIRST

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
_MADE: dict[str, Any] = {kind.__name__: kind for kind in (Example, Answer, Pair, LabelledAnswer, Steps)}
_NAMES = {name: [f.name for f in fields(kind)] for name, kind in _MADE.items()}
_ENDING = 64
"""The number of bytes of the SHA-256, in hexadecimal, at the end of a file."""


class UncacheableError(ValueError):
    """An error for a value that would change if it were written and read again."""


def pack_row(row: Row) -> tuple[str, list[int]]:
    """Return (the row as JSON, []). Raise `UncacheableError` for a row with images, or one that JSON cannot represent."""
    values = {f.name: value for f in fields(row) if (value := getattr(row, f.name)) not in (None, (), {})}
    try:
        text = json.dumps(values)
        if r"\ufffc" not in text and unpack_row(text, []) == row:  # an image's file can change unnoticed
            return text, []
    except (TypeError, ValueError, RecursionError):
        pass
    raise UncacheableError(row.source)


def unpack_row(text: str, _: list[int]) -> Row:
    """Return the row that `pack_row` packed."""
    values: dict[str, Any] = json.loads(text)
    for name in ("steps", "labels"):
        values[name] = tuple(values.get(name, ()))
    return Row(**values)


def pack(value: Any) -> tuple[str, list[int]]:
    """Return (the structure of a training item as JSON, its token ids)."""
    ids: list[int] = []

    def form(part: Any) -> Any:
        if type(part).__name__ in _MADE:
            return {type(part).__name__: [form(getattr(part, f.name)) for f in fields(part)]}
        if not isinstance(part, list | tuple) or not part:
            return part
        kinds = {type(part[0]), type(part[-1])}  # lists are of one kind; a pair is a number and a list
        if kinds == {bool}:
            runs = [0] if part[0] else []  # the first run is of False
            return {"flags": [*runs, *(len(list(run)) for _, run in itertools.groupby(part))]}
        if kinds == {int}:
            ids.extend(part)
            return {"ids": len(part)}
        return [form(one) for one in part]

    return json.dumps(form(value)), ids


def unpack(text: str, ids: list[int]) -> Any:
    """Return the training item that `pack` turned into (text, ids)."""
    rest = iter(ids)

    def value(form: Any) -> Any:
        if isinstance(form, list):
            return [value(one) for one in form]
        if not isinstance(form, dict):
            return form
        ((kind, parts),) = form.items()
        if kind == "ids":
            return list(itertools.islice(rest, parts))
        if kind == "flags":
            return [flag for run, n in enumerate(parts) for flag in [run % 2 == 1] * n]
        values = [tuple(part) if name == "apart" else part for name, part in zip(_NAMES[kind], map(value, parts), strict=True)]
        return _MADE[kind](*values)

    return value(json.loads(text))


@functools.cache
def _schema(bits: int = 32) -> pa.Schema:
    """Return the Arrow schema of packed items, whose token ids have `bits` bits."""
    # Imported inside functions: it imports pandas and takes 70 MB of memory, and small data does not need it.
    import pyarrow as pa

    return pa.schema([("json", pa.large_string()), ("ids", pa.large_list(pa.int64() if bits == 64 else pa.int32()))])


def batch_of(packed: Sequence[tuple[str, list[int]]]) -> pa.RecordBatch:
    """Return items from `pack` or `pack_row` as an Arrow batch."""
    import numpy as np
    import pyarrow as pa

    texts, each = zip(*packed, strict=True) if packed else ((), ())
    ends = np.cumsum([0, *map(len, each)])
    bits = 64 if any(max(ids, default=0) >= FIRST for ids in each) else 32
    # takes a tenth of pyarrow's time for lists
    flat = np.fromiter(itertools.chain.from_iterable(each), np.int64 if bits == 64 else np.int32, int(ends[-1]))
    ids = pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(flat))
    return pa.record_batch([pa.array(texts, pa.large_string()), ids], schema=_schema(bits))


def serialise(batch: pa.RecordBatch) -> tuple[int, bytes]:
    """Return (the width of the batch's token ids in bits, the batch as bytes). `deserialise` takes both."""
    return batch.schema.field("ids").type.value_type.bit_width, batch.serialize().to_pybytes()


def deserialise(bits: int, data: bytes) -> pa.RecordBatch:
    """Return the batch that `serialise` turned into (`bits`, `data`)."""
    import pyarrow as pa

    return pa.ipc.read_record_batch(pa.py_buffer(data), _schema(bits))


class ArrowSequence(Sequence[T], Generic[T]):
    """A sequence of items stored in Arrow batches. `decode` decodes an item on every access."""

    def __init__(self, batches: Sequence[pa.RecordBatch], decode: Callable[[str, list[int]], T]) -> None:
        self.batches, self._decode = [batch for batch in batches if batch.num_rows], decode
        self._starts: list[int] = [0, *itertools.accumulate(batch.num_rows for batch in self.batches)]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        at = bisect.bisect_right(self._starts, i) - 1
        texts, ids = self.batches[at].columns
        return self._decode(texts[i - self._starts[at]].as_py(), ids[i - self._starts[at]].values.to_pylist())

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True)
class PreparedRows(Generic[T]):
    """A run's rows: `rows` to train on, `held_out` to evaluate on. `items` and `held_out_items` are the same rows, tokenised."""

    rows: Sequence[Row]
    held_out: Sequence[Row]
    items: Sequence[T]
    held_out_items: Sequence[T]
    sums: Mapping[str, str] = field(default_factory=dict)
    """The checksums of the rows that a run pins, if known."""


def write(path: Path, prepared: PreparedRows[Any], messages: Any, max_bytes: int) -> None:
    """Write the rows and `messages` to `path`, then delete the folder's least recently used files until it fits `max_bytes`.

    If the rows cannot be cached, no error is raised.
    """
    import pyarrow as pa

    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    rows = [_batches(part, pack_row) for part in (prepared.rows, prepared.held_out)]
    made = [_batches(part, pack) for part in (prepared.items, prepared.held_out_items)]
    with contextlib.suppress(OSError, UncacheableError, pa.ArrowException):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            counts = []
            with pa.ipc.new_file(str(temporary), _schema()) as out:
                for part in (*rows, *made):
                    counts.append(sum(1 for batch in part if out.write_batch(batch) is None))
                note = {"parts": counts, "told": messages, "sums": dict(prepared.sums)}
                out.write_batch(batch_of([(json.dumps(note), [])]))
            with temporary.open("r+b") as file:
                file.write(_digest(file, temporary.stat().st_size))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _evict(path, max_bytes)


def read(path: Path) -> tuple[PreparedRows[Any], Any] | None:
    """Return (the memory-mapped rows in the cache, the messages logged about them), or None if the file is missing or damaged."""
    if not path.is_file():
        return None
    import pyarrow as pa

    try:
        size = path.stat().st_size - _ENDING
        with path.open("rb") as file:
            if size <= 0 or _digest(file, size) != file.read():
                return None
        mapped = pa.memory_map(str(path)).read_buffer(size)
        found = pa.ipc.open_file(pa.BufferReader(mapped))
        batches = [found.get_batch(i) for i in range(found.num_record_batches)]
        note = json.loads(batches[-1].column(0)[0].as_py())
        os.utime(path)
    except (OSError, ValueError, pa.ArrowException):
        return None
    ends = [0, *itertools.accumulate(note["parts"])]
    parts = [batches[start:end] for start, end in itertools.pairwise(ends)]
    rows, made = [ArrowSequence(part, unpack_row) for part in parts[:2]], [ArrowSequence[Any](part, unpack) for part in parts[2:]]
    return PreparedRows(rows[0], rows[1], made[0], made[1], note["sums"]), note["told"]


def limit() -> int:
    """Return the cache limit in bytes: `PSIGRAD_CACHE_GB`, or 20 GB if it is not set."""
    given = os.environ.get("PSIGRAD_CACHE_GB", "20")
    try:
        return int(float(given) * 1e9)
    except ValueError:
        raise UserError(f"PSIGRAD_CACHE_GB is {given!r}; give a number of gigabytes, 0 to keep no rows.") from None


def _batches(part: Sequence[Any], packed: Callable[[Any], tuple[str, list[int]]]) -> Iterator[pa.RecordBatch]:
    if isinstance(part, ArrowSequence):
        yield from part.batches
        return
    for start in range(0, len(part), 2048):
        yield batch_of([packed(one) for one in part[start : start + 2048]])


def _evict(newest: Path, max_bytes: int) -> None:
    """Delete temporary files over an hour older than `newest`, and least recently used files until the rest fits `max_bytes`."""
    kept = sorted(newest.parent.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    used = 0
    for file in kept:
        used += file.stat().st_size
        stale = file.name.startswith(".") and file.stat().st_mtime < newest.stat().st_mtime - 3600
        if stale or (used > max_bytes and not file.name.startswith(".")):
            file.unlink(missing_ok=True)


def _digest(file: BinaryIO, size: int) -> bytes:
    """Read the first `size` bytes of a file, and return their SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    while piece := file.read(min(1 << 20, size - file.tell())):
        digest.update(piece)
    return digest.hexdigest().encode()
