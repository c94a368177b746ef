"""The index of a run's completions: a few numbers and the offset of each row of rollouts.jsonl. Texts are read on demand."""

from __future__ import annotations

import json
import math
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psigrad.records.rows import RolloutFigures, parse_row, rollout_figures
from psigrad_studio.runs.files import LONGEST_LINE, Tail, opened

KINDS = ("train", "eval", "episode", "other")
STATUSES = ("scored", "failed", "unscored", "")
MOST = 2_000_000


@dataclass(frozen=True)
class RolloutQuery:
    """A filter on rollouts. A field that is None allows all values."""

    step: float | None = None
    kind: str | None = None
    status: str | None = None
    low: float | None = None
    high: float | None = None
    zero: bool = False
    """True to return only rollouts that were trained on and have the advantage 0."""
    text: str = ""
    order: str = "newest"
    """The order: newest, oldest, best or worst."""


class RolloutIndex:
    """The index of one rollouts.jsonl, which grows with the file."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path / "rollouts.jsonl", threading.Lock()
        self._tail = Tail(self.path)
        self.generation = 0
        self._clear()

    def _clear(self) -> None:
        self._offset, self._group = array("q"), array("q")
        self._step, self._reward, self._advantage = array("d"), array("d"), array("d")
        self._kind, self._status, self._cut = array("b"), array("b"), array("b")
        self._last: tuple[int, str, int, int] | None = None
        self.whole = False

    def __len__(self) -> int:
        return len(self._offset)

    def read(self, seconds: float = 2.0) -> bool:
        """Read new rows for at most `seconds`. Return False if more remain."""
        deadline = time.monotonic() + seconds
        with self.lock:
            if self._tail.restarted():
                self._tail = Tail(self.path)
                self.generation += 1
                self._clear()
            self.whole = False
            while time.monotonic() < deadline and len(self) < MOST:
                before = self._tail.offset
                for at, line in self._tail.lines(1 << 20):
                    if (found := rollout_figures(line)) is not None:
                        self._add(at, found)
                if self._tail.offset - before < 1 << 20:
                    self.whole = True
                    break
            return self.whole

    def _add(self, at: int, found: RolloutFigures) -> None:
        last, here = self._last, (found.step, found.kind, found.row, found.k)
        # A prompt may be drawn twice in a step; then k starts again.
        same = last is not None and last[:3] == here[:3] and found.k > last[3]
        group = (self._group[-1] if self._group else -1) + (not same)
        self._last = here
        self._offset.append(at)
        self._group.append(group)
        self._step.append(found.step)
        self._reward.append(found.reward)
        self._advantage.append(found.advantage)
        self._kind.append(KINDS.index(found.kind) if found.kind in KINDS else 3)
        self._status.append(STATUSES.index(found.status) if found.status in STATUSES else 3)
        self._cut.append(found.cut)

    def find(self, wanted: RolloutQuery, seconds: float = 2.0) -> tuple[list[int], bool]:
        """Return (numbers of the matching rows, in order; True if all rows were searched in time)."""
        with self.lock:
            numbers = _filtered(self, wanted)
        return (numbers.tolist(), True) if not wanted.text else self._containing(numbers.tolist(), wanted.text, seconds)

    def _containing(self, numbers: Sequence[int], text: str, seconds: float) -> tuple[list[int], bool]:
        deadline, needle, found = time.monotonic() + seconds, text.casefold(), []
        raw = json.dumps(text)[1:-1].encode().lower() if text.isascii() else b""
        for i, (n, line) in enumerate(self._lines(numbers)):
            if raw in line.lower() and _speaks(line, needle):
                found.append(n)
            if i % 64 == 0 and time.monotonic() > deadline:
                return found, False
        return found, True

    def _lines(self, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        try:
            with opened(self.path) as stream:
                for n in numbers:
                    stream.seek(self._offset[n])
                    yield n, stream.readline(LONGEST_LINE)
        except (OSError, IndexError):
            return

    def rows(self, numbers: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """Return the rows by number. Rows that can no longer be read are skipped."""
        found = ((n, parse_row(line)) for n, line in self._lines([n for n in numbers if 0 <= n < len(self)]))
        return [(n, row) for n, row in found if row is not None and row.get("step") == self._step[n]]

    def group_of(self, n: int) -> list[int]:
        """Return the numbers of the rows in the group of a row."""
        with self.lock:
            if not 0 <= n < len(self):
                return []
            first = last = n
            while first > 0 and self._group[first - 1] == self._group[n]:
                first -= 1
            while last + 1 < len(self) and self._group[last + 1] == self._group[n]:
                last += 1
            return list(range(first, last + 1))

    def group(self, n: int) -> int:
        """Return the number of a row's group."""
        return self._group[n]

    def overview(self) -> dict[str, Any]:
        """Return the available filters: steps with rows, kinds, statuses, and the range of rewards."""
        with self.lock:
            step, kind, status, reward = (np.array(x) for x in (self._step, self._kind, self._status, self._reward))
        known = reward[np.isfinite(reward)]
        return {
            "total": len(step),
            "steps": np.unique(step).tolist(),
            "kinds": [KINDS[i] for i in np.unique(kind)],
            "statuses": [STATUSES[i] for i in np.unique(status)],
            "rewards": [float(known.min()), float(known.max())] if known.size else None,
        }

    def dead(self, step: float) -> tuple[int, int, int, int]:
        """Count the groups of a step that were trained on, and the dead ones, whose rewards are all equal.

        Return (all groups, dead groups, dead groups at the run's highest reward, dead groups at its lowest).
        """
        with self.lock:
            steps, kinds, reward, group = (np.array(x) for x in (self._step, self._kind, self._reward, self._group))
        trained = (kinds == 0) & np.isfinite(reward)
        if not trained.any():
            return 0, 0, 0, 0
        top, bottom = reward[trained].max(), reward[trained].min()
        there = trained & (steps == step)
        found = [reward[there & (group == g)] for g in np.unique(group[there])]
        dead = [r[0] for r in found if len(r) > 1 and (r == r[0]).all()]
        return len(found), len(dead), sum(r == top for r in dead), sum(r == bottom for r in dead)

    def worst(self, step: float, by: str, count: int = 3) -> list[int]:
        """Return the numbers of the `count` rollouts of a step to look at first: those with the lowest rewards.

        If `by` is "longest", truncated ones come first, and if it is "unscored", those without a score.
        """
        with self.lock:
            steps, kinds = np.array(self._step), np.array(self._kind)
            there = np.flatnonzero((steps == step) & (kinds == 0))
            reward = np.array(self._reward)[there]
            first = {"longest": -np.array(self._cut)[there], "unscored": -(np.array(self._status)[there] == 2).astype(int)}
        order = np.lexsort((np.nan_to_num(reward, nan=math.inf), first.get(by, np.zeros(len(there)))))
        return [int(n) for n in there[order][:count]]


def _filtered(index: RolloutIndex, wanted: RolloutQuery) -> NDArray[np.int64]:
    step, reward = np.array(index._step), np.array(index._reward)
    keep = np.ones(len(step), bool)
    if wanted.step is not None:
        keep &= step == wanted.step
    if wanted.kind is not None:
        keep &= np.array(index._kind) == KINDS.index(wanted.kind)
    if wanted.status is not None:
        keep &= np.array(index._status) == STATUSES.index(wanted.status)
    if wanted.low is not None:
        keep &= reward >= wanted.low
    if wanted.high is not None:
        keep &= reward <= wanted.high
    if wanted.zero:
        keep &= np.array(index._advantage) == 0
    numbers = np.flatnonzero(keep)
    if wanted.order in ("best", "worst"):
        sign = -1.0 if wanted.order == "best" else 1.0
        numbers = numbers[np.isfinite(reward[numbers])]
        return np.asarray(numbers[np.argsort(sign * reward[numbers], kind="stable")], np.int64)
    if wanted.order == "newest":  # newest step first; in file order within a step
        numbers = numbers[np.argsort(-step[numbers], kind="stable")]
    return np.asarray(numbers, np.int64)


def _speaks(line: bytes, needle: str) -> bool:
    """Return True if the prompt or the completion of a line contains a text, ignoring case."""
    row = parse_row(line) or {}
    return any(needle in _text(row.get(name)).casefold() for name in ("prompt", "completion"))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(m.get("content", "")) if isinstance(m, dict) else str(m) for m in value)
    return value if isinstance(value, str) else ""
