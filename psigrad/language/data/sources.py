"""From a file, a folder, a hub name or any iterable to checked rows, with every fault named by file, line, column and reason.

JSON is read here and not through `datasets`: Arrow can't hold a lone surrogate, and its errors name no line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from psigrad.errors import UserError, nearest
from psigrad.language.data import csv_rows, tasks
from psigrad.language.data.dataset_rows import FORMS, BadRow, Form, Row, RowError, fitting, rows_of, show
from psigrad.language.data.network import stay_here_without_a_network

MAX_LINE_BYTES = 32 * 2**20
"""A longer line is refused: nobody writes one on purpose, and it would be held in memory several times over."""

_SHOWN = 5
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SPACE = re.compile(r"[ \t\r\n]*")
_SPLITS = {"train": "train training", "validation": "validation valid val dev", "test": "test testing eval evaluation"}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words.split()}


class _Raw(NamedTuple):
    source: str
    value: object


_Records = Iterator["_Raw | BadRow"]


@dataclass(frozen=True)
class LoadedRows:
    """The good rows in the order of the source, and those that were left out (`bad_rows="skip"`)."""

    rows: list[Row]
    skipped: list[BadRow]


def load(
    dataset: str, *, form: Form, split: str = "train", bad_rows: Literal["stop", "skip"] = "stop", max_rows: int = 0
) -> LoadedRows:
    """The rows of a JSONL, JSON, Parquet, CSV or TSV file, a folder of them or of `Dataset.save_to_disk`, or a hub dataset.

    In a folder whose file names carry split words (train, validation, test and their usual variants) only the files of `split`
    are read; a single file is read whole. A hub configuration is named after a colon: "openai/gsm8k:main". "task:NAME" makes rows
    of a reasoning-gym task. With `max_rows` only the first ones are read, and a hub dataset is streamed.
    Raises UserError naming file, line, column and reason; with `bad_rows="skip"` malformed rows are left out and returned as
    `skipped`, and only a file that can't be read on raises.
    """
    records = _records(dataset, split, streaming=max_rows > 0)
    return _collect(islice(records, max_rows) if max_rows else records, form, dataset, bad_rows)


def from_rows(
    iterable: Iterable[object], form: Form, source: str = "rows", bad_rows: Literal["stop", "skip"] = "stop"
) -> LoadedRows:
    """The same checks for rows that are in memory: a list of dicts, a `datasets.Dataset`, any iterable of mappings."""
    if isinstance(iterable, Mapping):
        parts = ", ".join(map(str, iterable))
        raise UserError(f"The dataset is a mapping of {parts}; give one of them: a name, or rows as a list or datasets.Dataset.")
    return _collect((_Raw(f"{source}:{i}", raw) for i, raw in enumerate(iterable, 1)), form, source, bad_rows)


def holdout(rows: LoadedRows, n: int) -> tuple[LoadedRows, LoadedRows]:
    """(rows to train on, the last `n` rows as held-out); `skipped` stays with the first. UserError if none is left to train."""
    if n < 0 or n >= len(rows.rows):
        raise UserError(
            f"Holding out {n} of {len(rows.rows)} rows is not possible; set eval_prompts (--eval-prompts) to fewer, 0 for no "
            "evaluation, or give held-out rows of their own (--eval-dataset)."
        )
    cut = len(rows.rows) - n
    return LoadedRows(rows.rows[:cut], rows.skipped), LoadedRows(rows.rows[cut:], [])


def _collect(records: _Records, form: Form, name: str, bad_rows: str) -> LoadedRows:
    if form not in FORMS:
        raise UserError(f"The form {form!r} is unknown; it must be one of {', '.join(FORMS)}{nearest(form, FORMS)}")
    if bad_rows not in ("stop", "skip"):
        raise UserError(f"bad_rows is {bad_rows!r}; it must be 'stop' or 'skip'.")
    rows, bad, fits = [], [], ""
    for record in records:
        if isinstance(record, BadRow):
            bad.append(record)
            continue
        try:
            rows += rows_of(record.value, form, record.source)
        except RowError as error:
            bad.append(error.bad)
            fits = fits if len(bad) > 1 else fitting(record.value)
    if bad and (bad_rows == "stop" or not rows):
        raise UserError(_summary(name, form, len(rows) + len(bad), bad, fits))
    if not rows:
        raise UserError(f"{name} has no rows; at least one {form} row was expected.")
    return LoadedRows(rows, bad)


def _summary(name: str, form: Form, total: int, bad: list[BadRow], fitting: str) -> str:
    if len(bad) == total and len({(row.column, row.reason) for row in bad}) == 1:
        shown = f"{bad[0]}" + ("; the others likewise" if total > 1 else "")
    else:
        shown = "; ".join(str(row) for row in bad[:_SHOWN]) + (f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else "")
    cure = "mend them, or set bad_rows=skip to leave them out"
    if len(bad) == total:
        cure = f"none is left for the form {form}; " + (f"they fit the form {fitting} (docs/data.md)" if fitting else "mend them")
    return f"{name} has {len(bad)} malformed of {total} rows ({shown}); {cure}."


def _records(dataset: str, split: str, streaming: bool = False) -> _Records:
    if dataset.startswith("task:"):
        return (_Raw(f"{dataset}:{i}", raw) for i, raw in enumerate(tasks.named(dataset), 1))
    try:
        path = Path(dataset).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"The dataset {show(dataset)} can't be a path ({error}); give a file, a folder or a hub name.") from None
    if not dataset.strip():
        raise UserError("The dataset name is empty; give a JSONL, JSON, Parquet or CSV file, a folder of them, or a hub name.")
    if is_folder:
        return _folder(path, split)
    if exists:
        return _file(path, path.name)
    if path.suffix in _READERS or dataset.startswith((".", "/", "~")) or "\\" in dataset:
        raise UserError(
            f"There is no file or folder {show(dataset)}; give an existing path or a hub name{_neighbour(path) or '.'}"
        )
    file, _, behind = dataset.partition(":")
    if Path(file).suffix in _READERS:
        raise UserError(
            f"The dataset {show(dataset)} has {show(behind)} behind a file's name. A weight stands there, a number, and only "
            "beside other datasets: --dataset a.jsonl:0.7 b.jsonl:0.3."
        )
    return _hub(dataset, split, streaming)


def _neighbour(path: Path) -> str:
    """The most similar name in the folder that the path points into."""
    return nearest(path.name, os.listdir(path.parent)) if path.parent.is_dir() else ""


def _file(path: Path, name: str) -> _Records:
    if path.suffix not in _READERS:
        known = ", ".join(_READERS)
        raise UserError(f"{path} ends in {path.suffix or 'nothing'}; it must be one of {known}; convert or rename it.")
    try:
        yield from _READERS[path.suffix](path, name)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error}); check that it is a whole, readable {path.suffix} file.") from error


def _folder(path: Path, split: str) -> _Records:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        yield from _saved_dataset(path, split)
        return
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.suffix in _READERS and file.is_file())
    names = [name for name in names if not any(part.startswith((".", "dataset_info")) for part in name.split("/"))]
    if not names:
        raise UserError(f"The folder {path} holds no {', '.join(_READERS)} file; put the data there or name another folder.")
    splits = {name: _split_of(name) for name in names}
    if any(splits.values()):
        wanted = _SPLIT_OF.get(split, split)
        names = [name for name in names if splits[name] == wanted]
        if not names:
            found = ", ".join(sorted({found for found in splits.values() if found}))
            raise UserError(f"The folder {path} holds no files of the split {split!r}; it has {found}. Name one of these.")
    for name in names:
        yield from _file(path / name, name)


def _split_of(name: str) -> str:
    """The split that a file's name speaks of, as on the hub: data/train-00000-of-00002.parquet is train."""
    words = re.split(r"[^a-z]+", name.rsplit(".", 1)[0].lower())
    return next((_SPLIT_OF[word] for word in words if word in _SPLIT_OF), "")


def _saved_dataset(path: Path, split: str) -> _Records:
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
        if isinstance(saved, DatasetDict):
            if split not in saved:
                raise UserError(f"{path} has no split {split!r}; it has {', '.join(saved)}. Name one of these.")
            saved = saved[split]
        yield from (_Raw(f"{path.name}:{i}", raw) for i, raw in enumerate(saved, 1))
    except UserError:
        raise
    except Exception as error:  # a damaged folder fails in Arrow, json or datasets, each with types of its own
        raise UserError(f"The saved dataset {path} can't be read ({_reason(error)}); save it again with save_to_disk.") from error


def _hub(dataset: str, split: str, streaming: bool) -> _Records:
    import datasets

    name, _, config = dataset.partition(":")
    stay_here_without_a_network()
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, config or None, split=split, streaming=streaming)
        yield from (_Raw(f"{dataset}[{split}]:{i}", raw) for i, raw in enumerate(rows, 1))
    except Exception as error:  # no network, no such name, split or configuration: datasets raises a dozen types
        raise UserError(
            f"{show(dataset)} is neither a file or folder here{_neighbour(Path(dataset))} nor a dataset that the hub could load "
            f"(split {split!r}: {_reason(error)}); check the name, the split and the network."
        ) from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


class _DuplicateKeyError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key occur twice and Python keeps the last in silence; here it is an error."""
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


def _json_lines(path: Path, name: str) -> _Records:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                _refuse_utf16(line, path)
                line = line.removeprefix(_BOM)
            size = len(line)
            if size > MAX_LINE_BYTES:
                while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
                    size += len(line)
                yield BadRow(f"{name}:{number}", "", f"is a line of {size} bytes; the most is {MAX_LINE_BYTES}")
            elif line.strip():
                yield _json_line(line.rstrip(b"\r\n"), f"{name}:{number}")


def _json_line(line: bytes, source: str) -> _Raw | BadRow:
    try:
        return _Raw(source, _DECODER.decode(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return BadRow(f"{source}:{error.start + 1}", "", f"is not UTF-8 (byte 0x{line[error.start]:02x}); save the file as UTF-8")
    except json.JSONDecodeError as error:
        hint = "; a file that is one JSON list must be named .json" if line.lstrip().startswith(b"[") else ""
        return BadRow(f"{source}:{error.colno}", "", f"is not JSON ({error.msg}){hint}")
    except (ValueError, RecursionError) as error:  # duplicate keys; integers of more than 4300 digits; nesting too deep
        return BadRow(source, "", _flaw(error))


def _flaw(error: Exception) -> str:
    return str(error) if isinstance(error, _DuplicateKeyError) else f"can't be decoded ({_reason(error)})"


def _json(path: Path, name: str) -> _Records:
    data = path.read_bytes()
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
    """`.json` often holds JSON lines, which is fine; one object over several lines is not."""
    try:
        one_object = b"\n" in data.strip() and isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return
    if one_object:
        raise UserError(f"{path}:1 opens one JSON object; a list of objects was expected. Move the list to the top level.")


def _json_list(text: str, name: str) -> _Records:
    """Objects of a JSON list one by one, so that each keeps its line number and a bad one doesn't hide the others."""
    at, line, counted = _skip(text, _skip(text, 0) + 1), 1, 0
    more = text[at : at + 1] != "]"
    while more:
        line, counted = line + text.count("\n", counted, at), at
        source = f"{name}:{line}"
        try:
            value, end = _DECODER.raw_decode(text, at)
            yield _Raw(source, value)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            yield BadRow(source, "", _flaw(error))
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
    """Where a value ends that the strict decoder refused, when Python's own can still read it."""
    try:
        return _PLAIN.raw_decode(text, at)[1]
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(_reason(error), text, at) from error


def _parquet(path: Path, name: str) -> _Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if twice := {column for column in columns if columns.count(column) > 1}:
                raise UserError(f"{path} has the column {show(min(twice))} twice; rename one of them.")
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                yield from _batch(batch, name, number)
                number += batch.num_rows
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} is not a whole Parquet file ({_reason(error)}); write or copy it again.") from error


def _batch(batch: Any, name: str, number: int) -> _Records:
    """The rows of an Arrow batch. Its text is not checked when it is read, so a cell of bad UTF-8 shows up only here."""
    try:
        yield from [_Raw(f"{name}:{number + i}", raw) for i, raw in enumerate(batch.to_pylist(), 1)]
    except UnicodeDecodeError:
        for i in range(batch.num_rows):
            yield _cells(batch, i, f"{name}:{number + i + 1}")


def _cells(batch: Any, i: int, source: str) -> _Raw | BadRow:
    raw: dict[str, object] = {}
    for column in batch.schema.names:
        try:
            raw[column] = batch.column(column)[i].as_py()
        except UnicodeDecodeError as error:
            return BadRow(source, column, f"is not UTF-8 (byte 0x{error.object[error.start]:02x})")
    return _Raw(source, raw)


def _separated(delimiter: str, path: Path, name: str) -> _Records:
    for line, row in csv_rows.read(path, delimiter):
        source = f"{name}:{line}"
        yield BadRow(source, "", row) if isinstance(row, str) else _Raw(source, row)


_READERS: dict[str, Callable[[Path, str], _Records]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": partial(_separated, ","),
    ".tsv": partial(_separated, "\t"),
}
