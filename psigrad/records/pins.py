"""What a run stands on and must find again when it goes on: its format, its settings, its data and tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from psigrad.errors import UserError
from psigrad.records.rows import FORMAT

# Settings that may differ between a run and its continuation, because nothing that is computed depends on them.
MAY_CHANGE = frozenset(
    f"run.{name}"
    for name in (
        *("max_steps", "save_steps", "save_minutes", "save_total_limit", "logging_steps"),
        *("report_to", "progress", "report", "resume", "output_dir"),
    )
) | {"format", "reward_timeout", "reward_workers", "record_tokens", "optim.rehearse"}


def check_format(place: Path, held: Mapping[str, Any]) -> None:
    """Refuse what a newer psigrad wrote. Without a number it is format 0, from before there were numbers, and readable."""
    found = held.get("format", 0)
    if not isinstance(found, int) or found > FORMAT:
        raise UserError(
            f"{place} has format {found!r} and this psigrad reads formats up to {FORMAT}: a newer version wrote it; "
            "update psigrad to read it or to go on with the run."
        )


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    """What differs between two runs' settings, "name was … and is …" each.

    A setting that an older psigrad did not have counts as having its `usual` value.
    """
    old, new, default = dict(_leaves(before)), dict(_leaves(now)), dict(_leaves(usual))
    old = {name: default[name] for name in new.keys() & default.keys()} | old
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name) and name not in MAY_CHANGE]
    return [f"{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in names]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


def hashes(parts: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each part's JSON form, by name."""
    return {
        name: hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest() for name, part in parts.items()
    }


def check_hashes(folder: Path, before: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Refuse to go on where a part is another than the one that the checkpoint's manifest `before` names."""
    changed = [name for name, value in now.items() if before.get(name, value) != value]
    if changed:
        raise UserError(
            f"{folder} was trained with another {' and another '.join(changed)}; put it back to go on with this run, or choose "
            "another output_dir."
        )
