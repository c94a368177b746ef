"""Benchmarks that resume: each measurement is a line of a JSON Lines file, and is not repeated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.records.row_lines import end_last_line, read_lines
from psigrad.records.rows import parse_row
from psigrad.runs.machine import provenance

Line = dict[str, Any]


def read(file: Path) -> list[Line]:
    """Return the lines of a file, except an incomplete last line."""
    return [line for text in read_lines(file) if (line := parse_row(text)) is not None]


def append(file: Path, line: Line) -> None:
    """Append a line, in place of an incomplete last line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    end_last_line(file)
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Asked:
    """The arguments of a benchmark. `where` has the dtype, threads and processor, which comparable lines share."""

    names: list[str]
    dtype: str
    threads: int
    pairs: int
    file: Path
    where: Line

    def taken(self, **key: Any) -> list[Line]:
        """Return the lines with this key that were measured under the same conditions."""
        return [line for line in read(self.file) if {**self.where, **key}.items() <= line.items()]

    def keep(self, line: Line, **key: Any) -> None:
        """Append a line with this key, measured under these conditions."""
        append(self.file, {**key, **line, **self.where})


def ask(description: str | None, known: Collection[str], file: Path, *, dtype: str, pairs: int) -> Asked:
    """Read names among the `known` ones, and options, from the command line. Raises `UserError` for an unknown name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"names of {', '.join(known)} (default: all)")
    parser.add_argument("--dtype", default=dtype, choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=pairs, help=f"pairs of steps, one of each side (default: {pairs})")
    parser.add_argument("--json", type=Path, default=file)
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in known]:
        raise UserError(f"{unknown[0]} is none of {', '.join(known)}.")
    where = {"dtype": given.dtype, "threads": given.threads, "processor": provenance("cpu")["processor"]}
    return Asked(given.names or list(known), given.dtype, given.threads, given.pairs, given.json, where)
