"""A bounded cache of the data of all runs: their metrics and the indices of their completions."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from psigrad.config.nested import flatten
from psigrad.errors import UserError
from psigrad.records import run_folder
from psigrad.records.read import kind_of
from psigrad_studio.runs.alert_kinds import by_kind
from psigrad_studio.runs.files import content, opened
from psigrad_studio.runs.history import History
from psigrad_studio.runs.rollout_index import RolloutIndex
from psigrad_studio.runs.run_finder import RunFinder, RunPlace
from psigrad_studio.runs.run_notes import RunNotes
from psigrad_studio.runs.tokens import config_of

MOST_POINTS, MOST_INDEXES = 20_000_000, 8
PICTURE, PICTURE_BYTES, GIF = run_folder.VIDEO, 16 << 20, (b"GIF87a", b"GIF89a")
_LAST = ("reward", "return", "accuracy", "token_accuracy", "loss")
# The settings that do not affect the training result.
_ASIDE = frozenset({"video", "record_tokens", "reward_timeout", "reward_workers", "micro_batch_tokens"})
T = TypeVar("T")


class RunCache:
    """The runs in a folder, by identifier, with their cached data."""

    def __init__(self, root: Path) -> None:
        self.finder, self.notes = RunFinder(root), RunNotes(root)
        self._lock = threading.Lock()
        self._histories: OrderedDict[str, History] = OrderedDict()
        self._rollouts: OrderedDict[str, RolloutIndex] = OrderedDict()
        self._entries: dict[str, tuple[Any, dict[str, Any]]] = {}

    def place(self, run: str) -> RunPlace:
        """Return the folder of a run. Raises `UserError` for an unknown identifier."""
        found = self.finder.places().get(run)
        if found is None:
            raise UserError("This run is not (or no longer) in the folder of runs; reload the page.")
        return found

    def history(self, run: str) -> History:
        """Return a run's metrics, with newly written rows."""
        return self._kept(self._histories, run, History, len(self.finder.places()) + 1)

    def rollouts(self, run: str) -> RolloutIndex:
        """Return the index of a run's completions, from the cache or new."""
        return self._kept(self._rollouts, run, RolloutIndex, MOST_INDEXES)

    def _kept(self, cache: OrderedDict[str, T], run: str, make: Callable[[Path], T], most: int) -> T:
        place = self.place(run)
        with self._lock:
            if run not in cache:
                cache[run] = make(place.path)
            cache.move_to_end(run)
            while len(cache) > most:
                cache.popitem(last=False)
            return cache[run]

    def entries(self, seconds: float) -> tuple[list[dict[str, Any]], bool]:
        """Return (the list entry of each run, True if all runs were read in time)."""
        deadline, found, whole = time.monotonic() + seconds, [], True
        for place in self.finder.places().values():
            known = self._entries.get(place.id)
            if time.monotonic() > deadline and known is None:
                whole = False
                continue
            if time.monotonic() <= deadline:
                self.history(place.id).catch_up(deadline - time.monotonic())
                known = (_signature(place.path), self._entry(place, known))
                self._entries[place.id] = known
            assert known is not None
            found.append(known[1] | self.notes.of(place.name))
        self._trim()
        return found, whole

    def entry(self, run: str) -> dict[str, Any]:
        """Return the list entry of one run."""
        place = self.place(run)
        return self._entry(place, None) | self.notes.of(place.name)

    def _entry(self, place: RunPlace, known: tuple[Any, dict[str, Any]] | None) -> dict[str, Any]:
        # An ended run whose files have not changed is not read again.
        if known is not None and known[1]["whole"] and known[1]["state"] != "running" and known[0] == _signature(place.path):
            return known[1]
        history = self.history(place.id)
        with history.lock:
            return self._read(place, history)

    def _read(self, place: RunPlace, history: History) -> dict[str, Any]:
        whole = history.read()
        config, state = config_of(place.path), history.state
        alerts = by_kind(history.alerts(state), history.watch)
        last = next((name for name in _LAST if name in history.series and history.series[name].values), None)
        return {
            "id": place.id,
            "name": place.name,
            **described(config, history.code),
            "state": state,
            "step": history.last_step,
            "last": None if last is None else {"name": last, "value": history.series[last].values[-1]},
            "written": history.written,
            "picture": _begins_as_gif(place.path),
            "alerts": alerts,
            "generation": history.generation,
            "version": history.version,
            "whole": whole,
        }

    def _trim(self) -> None:
        """Drop the least recently used data if the cache is too large."""
        with self._lock:
            points = {run: sum(len(s.steps) for s in h.series.values()) for run, h in self._histories.items()}
            for run in list(self._histories)[:-1]:
                if sum(points.values()) <= MOST_POINTS:
                    return
                del self._histories[run], points[run]

    def picture(self, run: str) -> bytes | None:
        """Return the recorded episode as a GIF, if the run has one."""
        found = content(self.place(run).path / PICTURE, PICTURE_BYTES)
        return found if found[:6] in GIF else None


def _begins_as_gif(run: Path) -> bool:
    """Return True if a run has a recorded episode, judged by its first bytes."""
    try:
        with opened(run / PICTURE) as stream:
            return stream.read(6) in GIF
    except OSError:
        return False


def described(config: Mapping[str, Any], code: Any) -> dict[str, Any]:
    """Return a run's method, model and seed, and a key that is equal for runs that differ only in the seed.

    The key is a hash of the settings and of the user's code.
    """
    kind, given = kind_of(config), flatten(config)
    name: Any = {"sft": "sft", "reward": "reward model", "preference": config.get("loss")}.get(kind, config.get("algorithm"))
    if isinstance(name, Mapping):
        name = name.get("name") or name.get("preset") or "own method"
    model = config.get("env") if kind == "control" else given.get("model.path")
    same = {key: value for key, value in given.items() if not key.startswith("run.") and key not in _ASIDE}
    same |= {"steps": given.get("run.max_steps"), "code": code}
    total = config.get("total_timesteps") if kind == "control" else given.get("run.max_steps")
    return {
        "kind": kind if config else "",
        "method": str(name or "unknown")[:60],
        "model": str(model or "")[:200],
        "seed": given.get("run.seed") if isinstance(given.get("run.seed"), int) else None,
        "group": hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()[:12] if config else "",
        "total": total if isinstance(total, int) and total > 0 else None,
    }


def _signature(path: Path) -> tuple[Any, ...]:
    found: list[Any] = []
    for name in ("metrics.jsonl", "timings.jsonl", "events.jsonl", "config.json", ".lock"):
        try:
            status = (path / name).stat(follow_symlinks=False)
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)
