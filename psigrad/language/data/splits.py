"""Names of splits, and slices of them in the syntax of `datasets`: train, train[:90%], test[100:200]."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from psigrad.errors import UserError

_SPLITS = {"train": "train training", "validation": "validation valid val dev", "test": "test testing eval evaluation"}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words.split()}
_SLICE = re.compile(r"([^\[\]]*)\[\s*(-?\d+%?)?\s*:\s*(-?\d+%?)?\s*\]")


class SplitSlice(NamedTuple):
    """A split's name, and the two bounds of a slice. A bound is a number of rows, a share such as 90%, or empty."""

    name: str
    start: str = ""
    stop: str = ""

    @property
    def is_slice(self) -> bool:
        """True if the slice selects only a part of the split."""
        return bool(self.start or self.stop)

    @property
    def needs_total(self) -> bool:
        """True if the slice depends on the number of rows: a bound is a share (90%), or counts from the end (-100)."""
        return "%" in self.start + self.stop or "-" in self.start + self.stop

    def take(self, rows: Iterable[Any]) -> Iterator[Any]:
        """Return the rows of the slice. A share is rounded as in `datasets`, so every row is in either [:90%] or [90%:]."""
        if not self.needs_total:
            return islice(rows, int(self.start or 0), int(self.stop) if self.stop else None)
        held = list(rows)
        start, stop = (
            round(int(bound[:-1]) * len(held) / 100) if bound.endswith("%") else int(bound) if bound else None
            for bound in (self.start, self.stop)
        )
        return iter(held[start:stop])


def parse_split(split: str) -> SplitSlice:
    """Parse a split, such as train, or with a slice: train[:90%]. Raise `UserError` for an invalid slice."""
    if "[" not in split or "+" in split:  # the hub parses a sum of splits
        return SplitSlice(split)
    found = _SLICE.fullmatch(split.strip())
    if found is None:
        raise UserError(f"The split {split!r} has an invalid slice; write train[:90%], train[100:200] or train[-100:].")
    return SplitSlice(found[1].strip(), found[2] or "", found[3] or "")


def split_of(name: str) -> str:
    """Return the split that a file's name contains, such as train for data/train-00000-of-00002.parquet; "" if there is none."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLIT_OF[word] for word in words if word in _SPLIT_OF), "")


def canonical_split(name: str) -> str:
    """Return the standard name of a split, such as validation for dev."""
    return _SPLIT_OF.get(name, name)
