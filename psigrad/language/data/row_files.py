"""Files of rows: JSON lines, JSON, Parquet, CSV and TSV. Rows keep their line numbers for error messages.

JSON is parsed here and not through `datasets`: Arrow cannot hold a lone surrogate, and its errors name no line.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from psigrad.errors import UserError, name_reason
from psigrad.language.data.dataset_rows import BadRow, show

MAX_LINE_BYTES = 32 * 2**20
"""The maximum length of a line in bytes. A longer line is a mistake, and to read it takes the memory of several copies."""

MOST_GROWTH, LEAST_BYTES = 200, 256 * 2**20
"""A compressed file may expand to `MOST_GROWTH` times its size, or to `LEAST_BYTES` if that is more."""

_BOM = b"\xef\xbb\xbf"
_ROW_BYTES = 64  # the least memory that a row takes, even an empty one
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SPACE = re.compile(r"[ \t\r\n]*")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files, after the ending of a text file, as in rows.jsonl.gz."""


class RawRow(NamedTuple):
    """A row as read from a file, before any check, and its position, as in "my.jsonl:12"."""

    source: str
    value: object


Records = Iterator["RawRow | BadRow"]


def read_file(path: Path, name: str) -> Records:
    """Yield the rows of a file, called `name` in messages. Raise `UserError` if the file cannot be read to its end."""
    kind = kind_of_file(path.name)
    if kind not in READERS:
        known = ", ".join(READERS)
        raise UserError(f"The name of {path} must end in one of {known}; convert or rename the file.")
    try:
        yield from READERS[kind](path, name)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} can't be read ({error}); check that it is a complete, readable {path.suffix} file.") from error


def kind_of_file(name: str) -> str:
    """Return the ending that determines the reader, a key of `READERS`; empty if psigrad cannot read the file."""
    stem, ending = os.path.splitext(name.lower())
    inner = os.path.splitext(stem)[1] if ending in COMPRESSED else ending
    return inner if inner in READERS and (inner == ending or inner != ".parquet") else ""


def _open(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressing it if its last ending is one of `COMPRESSED`."""
    ending = path.suffix.lower()
    if ending == ".zst":  # Python reads it from 3.14 on
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(str(path), "zstd"))
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    opened: IO[bytes] = openers[ending](path) if ending in openers else path.open("rb")
    return opened


class _Expansion:
    """A counter of the bytes that a compressed file expands to. Its limit stops decompression bombs."""

    def __init__(self, path: Path) -> None:
        compressed = path.suffix.lower() in (*COMPRESSED, ".parquet")
        self.path, self.made = path, 0
        self.most = max(LEAST_BYTES, MOST_GROWTH * path.stat().st_size) if compressed else sys.maxsize

    def add(self, size: int) -> None:
        """Add `size` bytes to the count. Raises `UserError` if the sum exceeds the limit for this file, `most`."""
        self.made += size
        if self.made > self.most:
            raise UserError(
                f"{self.path} expands to over {self.most >> 20} MiB, {self.most // self.path.stat().st_size} times its size, "
                "like a decompression bomb; write its rows to an uncompressed .jsonl file."
            )


class _DuplicateKeyError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dictionary of a JSON object's name-value `pairs`. Raise an error for a repeated name, unlike Python's `json`."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKeyError(f"has the key {show(next(name for name in names if names.count(name) > 1))} twice")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_PLAIN = json.JSONDecoder()


def _refuse_utf16(start: bytes, path: Path) -> None:
    if start.startswith(_UTF16):
        raise UserError(f"{path}:1 starts like UTF-16 text; save the file as UTF-8.")


def _json_lines(path: Path, name: str) -> Records:
    expansion = _Expansion(path)
    with _open(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            expansion.add(len(line) + _ROW_BYTES)
            if number == 1:
                _refuse_utf16(line, path)
                line = line.removeprefix(_BOM)
            size = len(line)
            if size > MAX_LINE_BYTES:
                while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
                    size += len(line)
                    expansion.add(len(line))
                yield BadRow(f"{name}:{number}", "", f"is a line of {size} bytes; the limit is {MAX_LINE_BYTES}")
            elif line.strip():
                yield _json_line(line.rstrip(b"\r\n"), f"{name}:{number}")


def _json_line(line: bytes, source: str) -> RawRow | BadRow:
    try:
        return RawRow(source, _DECODER.decode(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return BadRow(f"{source}:{error.start + 1}", "", f"is not UTF-8 (byte 0x{line[error.start]:02x}); save the file as UTF-8")
    except json.JSONDecodeError as error:
        hint = "; a file that is one JSON list must be named .json" if line.lstrip().startswith(b"[") else ""
        return BadRow(f"{source}:{error.colno}", "", f"is not JSON ({error.msg}){hint}")
    except (ValueError, RecursionError) as error:  # duplicate keys; integers of more than 4300 digits; nesting too deep
        return BadRow(source, "", _describe_error(error))


def _describe_error(error: Exception) -> str:
    return str(error) if isinstance(error, _DuplicateKeyError) else f"can't be decoded ({name_reason(error)})"


def _json(path: Path, name: str) -> Records:
    expansion = _Expansion(path)
    with _open(path) as file:
        data = file.read(-1 if expansion.most == sys.maxsize else expansion.most + 1)
    expansion.add(len(data))
    _refuse_utf16(data, path)
    if not data.removeprefix(_BOM).lstrip().startswith(b"["):
        _refuse_one_object(data, path)
        yield from _json_lines(path, name)
        return
    try:
        text = data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise UserError(f"{path}:{line} is not UTF-8 (byte 0x{error.object[error.start]:02x}); save the file as UTF-8.") from None
    try:
        yield from _json_list(text, name)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise UserError(f"{where} is not JSON ({error.msg}); a list of objects was expected.") from None


def _refuse_one_object(data: bytes, path: Path) -> None:
    """Raise `UserError` if `data`, the content of a file, is one JSON object over several lines, instead of JSON lines."""
    try:
        one_object = b"\n" in data.strip() and isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return
    if one_object:
        raise UserError(f"{path}:1 starts one JSON object, not a list. If the object has a list of rows, keep only that list.")


def _json_list(text: str, name: str) -> Records:
    """Yield each value of a JSON list with its line number, or a `BadRow` if it has a key twice. Raise an error for bad JSON."""
    at, line, counted = _skip(text, _skip(text, 0) + 1), 1, 0
    more = text[at : at + 1] != "]"
    while more:
        line, counted = line + text.count("\n", counted, at), at
        source = f"{name}:{line}"
        try:
            value, end = _DECODER.raw_decode(text, at)
            yield RawRow(source, value)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            yield BadRow(source, "", _describe_error(error))
            end = _end_of(text, at)
        at = _skip(text, end)
        if text[at : at + 1] not in (",", "]"):
            raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        more = text[at] == ","
        at = _skip(text, at + 1) if more else at
    at = _skip(text, at + 1)
    if at < len(text):
        raise json.JSONDecodeError("Extra data after the list", text, at)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _end_of(text: str, at: int) -> int:
    """Return the index after the JSON value at text[at]. Accept repeated keys. Raise `JSONDecodeError` for other faults."""
    try:
        return _PLAIN.raw_decode(text, at)[1]
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(name_reason(error), text, at) from error


def _parquet(path: Path, name: str) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if twice := {column for column in columns if columns.count(column) > 1}:
                raise UserError(f"{path} has the column {show(min(twice))} twice; rename one of them.")
            number, expansion = 0, _Expansion(path)
            for batch in file.iter_batches(batch_size=_rows_at_once(file.metadata, expansion)):
                # A batch stores a value of a dictionary once, even if many rows repeat it, so `nbytes` is too small.
                repeated = batch.to_pylist() if "dictionary<" in str(batch.schema) else []
                expansion.add(batch.nbytes + batch.num_rows * _ROW_BYTES + sum(len(str(row)) for row in repeated))
                yield from _batch(batch, name, number)
                number += batch.num_rows
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} is not a complete Parquet file ({name_reason(error)}); write or copy it again.") from error


def _rows_at_once(metadata: Any, expansion: _Expansion) -> int:
    """Return the number of rows of a Parquet file that can be read in one batch within the limit of `expansion`."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [[group.column(i) for i in range(group.num_columns)] for group in groups]
    _Expansion(expansion.path).add(sum(max(c.total_uncompressed_size, c.num_values) for group in columns for c in group))
    repeats = ("PLAIN_DICTIONARY", "RLE_DICTIONARY")  # a value is stored once, and can repeat in every row
    largest = max((sum(c.total_uncompressed_size for c in g if {*repeats} & {*c.encodings}) for g in columns), default=0)
    return max(1, min(1024, expansion.most // max(1, largest)))


def _batch(batch: Any, name: str, number: int) -> Records:
    """Yield the rows of an Arrow batch. `number` rows of the file `name` precede it. A row with bad UTF-8 becomes a `BadRow`."""
    try:
        yield from [RawRow(f"{name}:{number + i}", raw) for i, raw in enumerate(batch.to_pylist(), 1)]
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            yield _cells(batch, i, f"{name}:{number + i + 1}")


def _cells(batch: Any, i: int, source: str) -> RawRow | BadRow:
    raw: dict[str, object] = {}
    for column in batch.schema.names:
        try:
            raw[column] = batch.column(column)[i].as_py()
        except UnicodeDecodeError as error:
            return BadRow(source, column, f"is not UTF-8 (byte 0x{error.object[error.start]:02x})")
    return RawRow(source, raw)


def _csv(default: str, path: Path, name: str) -> Records:
    for line, row in _csv_rows(path, default):
        source = f"{name}:{line}"
        yield BadRow(source, "", row) if isinstance(row, str) else RawRow(source, row)


def _csv_rows(path: Path, default: str) -> Iterator[tuple[int, dict[str, object] | str]]:
    """Yield (line number, row), or (line number, reason) for a malformed row. Try `default` first as the delimiter."""
    csv.field_size_limit(MAX_LINE_BYTES)
    try:
        with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
            lines = _csv_lines(file, path)
            first = next(lines, "")
            delimiter = _delimiter(first, default)
            reader = csv.DictReader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
            columns = list(reader.fieldnames or ())
            if not columns or any(not name for name in columns) or len(set(columns)) < len(columns):
                raise UserError(f"The first line of {path} must have a different name for each column; it has {columns}.")
            for row in reader:
                yield reader.line_num, _csv_row(row, columns)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte 0x{error.object[error.start]:02x}); save the file as UTF-8.") from error
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num} is not {'TSV' if default != ',' else 'CSV'} ({error}).") from error


def _csv_lines(file: IO[str], path: Path) -> Iterator[str]:
    """Yield the lines of a CSV file; a row can span several. Raises `UserError` for a line that is too long."""
    expansion = _Expansion(path)
    for number in itertools.count(1):
        if not (line := file.readline(MAX_LINE_BYTES + 2)):
            return
        if len(line.rstrip("\r\n")) > MAX_LINE_BYTES:
            raise UserError(f"{path}:{number} is a line of over {MAX_LINE_BYTES:,} characters; check its line breaks.")
        expansion.add(len(line) + _ROW_BYTES)
        yield line


def _delimiter(header: str, default: str) -> str:
    """Return the first of `default`, comma, semicolon, tab and | that separates names in the header; `default` if none does.

    Excel writes semicolons in locales whose decimal separator is the comma.
    """
    for delimiter in (default, ",", ";", "\t", "|"):
        with contextlib.suppress(csv.Error):
            if len(next(csv.reader([header], delimiter=delimiter), ())) > 1:
                return delimiter
    return default


def _csv_row(row: dict[str, str | None], columns: list[str]) -> dict[str, object] | str:
    if len(row) > len(columns) or None in row.values():
        return f"has {'more' if len(row) > len(columns) else 'fewer'} values than the first line has columns"
    return {name: value or None for name, value in row.items()}


READERS: dict[str, Callable[[Path, str], Records]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": partial(_csv, ","),
    ".tsv": partial(_csv, "\t"),
}
