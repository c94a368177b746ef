"""Rows of CSV and TSV files: the first line names the columns, every value is text."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from psigrad.errors import UserError

# Labels of unpaired preferences, which other files hold as true and false.
_LABELS = {"true": True, "false": False, "1": True, "0": False}


def read(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, object] | str]]:
    """(line, row) of each row, or what is wrong with it. An empty cell is no value. Raises `UserError` where the file is none."""
    csv.field_size_limit(32 * 2**20)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            columns = list(reader.fieldnames or ())
            if not columns or any(not name for name in columns) or len(set(columns)) < len(columns):
                raise UserError(f"The first line of {path} must name its columns, each once; it has {columns}.")
            for row in reader:
                yield reader.line_num, _row(row, columns)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte 0x{error.object[error.start]:02x}); save the file as UTF-8.") from error
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num} is not {'TSV' if delimiter != ',' else 'CSV'} ({error}).") from error


def _row(row: dict[str, str | None], columns: list[str]) -> dict[str, object] | str:
    if len(row) > len(columns) or None in row.values():
        return f"has {'more' if len(row) > len(columns) else 'fewer'} values than the first line has columns"
    values: dict[str, object] = {name: value for name, value in row.items() if value != ""}
    label = str(values.get("label", "")).lower()
    return {**values, "label": _LABELS[label]} if label in _LABELS else values
