"""The results of `psigrad replay` in a run's folder: the figures of each method, and its effect on every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from psigrad.records.read import messages
from psigrad.records.rows import number, parse_row
from psigrad.records.run_folder import REPLAYS
from psigrad.redaction import escape
from psigrad_studio.runs.files import content
from psigrad_studio.runs.tokens import finite

_MOST, _MOST_BYTES, _MOST_TOKENS = 50, 32 << 20, 2000


def names(run: Path) -> list[str]:
    """Return the replays of a run, sorted by name. Requests refer to a replay by its index in this list."""
    try:
        return sorted(path.stem for path in (run / REPLAYS).glob("step-*.json"))[:_MOST]
    except OSError:
        return []


def replay(run: Path, n: int) -> dict[str, Any]:
    """Return the fields of the n-th replay that have the shape psigrad writes; empty if there is no replay."""
    known = names(run)
    found = parse_row(content(run / REPLAYS / f"{known[n]}.json", _MOST_BYTES)) if n < len(known) else None
    if found is None:
        return {}
    methods = {str(name)[:100]: own for name, own in _items(found.get("methods"))}
    figures = dict.fromkeys(str(key)[:100] for own in methods.values() for key, _ in _items(own))
    return {
        "name": known[n],
        "differences": [escape(str(line))[:300] for line in _list(found.get("differences"))[:50]],
        "assumed": [escape(str(line))[:500] for line in _list(found.get("assumed"))[:20]],
        "methods": list(methods),
        "figures": [[name, [finite(number(dict(_items(own)).get(name))) for own in methods.values()]] for name in figures],
        "groups": [_group(group) for group in _list(found.get("groups"))[:8] if isinstance(group, dict)],
    }


def _group(group: dict[str, Any]) -> dict[str, Any]:
    prompt = group.get("prompt")
    said = prompt if isinstance(prompt, str) else "\n".join(text for _, text in messages(prompt))
    completions = [c for c in _list(group.get("completions"))[:64] if isinstance(c, dict)]
    return {"row": number(group.get("row")), "prompt": escape(said)[:4000], "completions": [_completion(c) for c in completions]}


def _completion(completion: dict[str, Any]) -> dict[str, Any]:
    texts = [escape(str(text)) for text in _list(completion.get("tokens"))[:_MOST_TOKENS]]
    tables = []
    for name, columns in _items(completion.get("methods")):
        table: dict[str, Any] = {"text": texts}
        for key in ("advantage", "ratio", "clipped", "weight"):
            values = [finite(number(x)) for x in _list(dict(_items(columns)).get(key))[: len(texts)]]
            table[key] = values + [None] * (len(texts) - len(values))
        tables.append({"method": str(name)[:100], "tokens": {**table, "mask": [x is not None for x in table["weight"]]}})
    return {"k": number(completion.get("k")), "reward": finite(number(completion.get("reward"))), "methods": tables}


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
