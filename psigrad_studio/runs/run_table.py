"""A table with runs as rows: the last value of each main metric, and the settings that differ among the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psigrad.config.nested import flatten
from psigrad.records.signals import SIGNALS
from psigrad_studio.runs.run_cache import RunCache
from psigrad_studio.runs.tokens import config_of

# The settings that do not describe the training: the run's folder, and the display of its progress.
ASIDE = frozenset({"run.output_dir", "run.progress"})


def table(cache: RunCache, ids: Sequence[str]) -> dict[str, Any]:
    """Return the table: the columns `figures` (metrics) and `settings`, and the values of both for each run."""
    places = cache.finder.places()
    known = [places[run] for run in ids if run in places]
    settings = [flatten(config_of(place.path)) for place in known]
    columns = differing(settings)
    rows: list[dict[str, Any]] = []
    present: set[str] = set()
    for place, own in zip(known, settings, strict=True):
        history = cache.history(place.id)
        last = {
            s.name: history.series[s.name].values[-1]
            for s in SIGNALS
            if s.name in history.series and history.series[s.name].values
        }
        present |= last.keys()
        rows.append({"id": place.id, "figures": last, "settings": {name: _said(own.get(name)) for name in columns}})
    return {"rows": rows, "figures": [s.name for s in SIGNALS if s.name in present], "settings": columns}


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings that differ among the runs, in the order of the first run that has them."""
    names = list(dict.fromkeys(name for own in settings for name in own if name not in ASIDE))
    return [name for name in names if len({_said(own.get(name)) for own in settings}) > 1]


def _said(value: Any) -> str:
    return "" if value is None else str(value)[:120]
