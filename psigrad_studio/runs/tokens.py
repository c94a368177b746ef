"""A completion token by token: text, log-probs, ratio, KL, entropy and advantage, if the run recorded them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from psigrad.language.images import FIRST, label_of
from psigrad.records.rows import number, parse_row
from psigrad.redaction import escape
from psigrad_studio.runs.files import content

MOST_TOKENS = 2000
_COLUMNS = {
    "logprob": "logprobs",
    "sampling": "sampling_logprobs",
    "trained": "trained_logprobs",
    "entropy": "entropy",
    "advantage": "advantages",
}


def token_table(row: Mapping[str, Any], texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return name -> value for each token of a completion. Figures that the run did not record have no column.

    ratio is π_trained / π_sampled in the last pass over the batch. kl is the k3 estimate of KL(π_sampled ‖ π_ref) at the token.
    """
    count = len(texts)
    found: dict[str, list[Any]] = {"text": list(texts)}
    for name, key in _COLUMNS.items():
        if isinstance(row.get(key), list):
            found[name] = _figures(row[key], count)
    old = found.get("logprob")
    if old is not None and "trained" in found:
        found["ratio"] = [_exp(new - was) if _both(new, was) else None for new, was in zip(found["trained"], old, strict=True)]
    if old is not None and isinstance(row.get("ref_logprobs"), list):
        reference = _figures(row["ref_logprobs"], count)
        found["kl"] = [_k3(ref - was) if _both(ref, was) else None for ref, was in zip(reference, old, strict=True)]
    mask = row.get("mask")
    found["mask"] = [bool(m) for m in mask[:count]] + [False] * (count - len(mask)) if isinstance(mask, list) else [True] * count
    rewards = row.get("step_rewards")
    if isinstance(rewards, list):
        at = {pair[0]: number(pair[1]) for pair in rewards if isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int}
        found["earned"] = [finite(at.get(i)) for i in range(count)]
    return found


def _figures(values: Sequence[Any], count: int) -> list[float | None]:
    own = [finite(number(value)) for value in values[:count]]
    return own + [None] * (count - len(own))


def finite(value: float | None) -> float | None:
    """Return the number, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def _both(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None


def _exp(x: float) -> float | None:
    return math.exp(x) if abs(x) < 500 else None


def _k3(log_ratio: float) -> float | None:
    """Return the k3 estimate of the KL, exp(x) − 1 − x with x = log π_ref − log π; None if it is not finite."""
    e = _exp(log_ratio)
    return None if e is None else e - 1 - log_ratio


def texts_of(row: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Return the text of each token of a completion, or its id if there is no tokenizer."""
    given = row.get("completion_ids")
    known = (range(2**31), range(FIRST, 2 * FIRST))
    ids = [i for i in (given if isinstance(given, list) else ()) if type(i) is int and any(i in x for x in known)][:MOST_TOKENS]
    if tokenizer is None:
        return [f"#{i}" for i in ids]
    return [escape(text) for text in _pieces(tokenizer, ids)]


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return a text for each token. Joined, they are the full text. A character of several tokens belongs to the last of them."""
    found, start, said = [], 0, ""
    for end in range(1, len(ids) + 1):
        if ids[end - 1] >= FIRST:
            found.append(label_of(ids[end - 1]))
            start, said = end, ""
            continue
        now = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
        if now.endswith("\ufffd") and end < len(ids) and end - start < 16:
            found.append("")
            continue
        found.append(now[len(said) :] if now.startswith(said) else now)
        # Decode each token together with the previous one, since some tokenizers treat a first token differently.
        start = end - 1
        said = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
    return found


def tokenizer_of(run: Path, config: Mapping[str, Any], root: Path) -> Any:
    """Return the tokenizer that a run saved, or that of its first model if this is in the folder of runs; otherwise None."""
    places = [run / "model", *sorted((run / "checkpoints").glob("step-*"), reverse=True)[:1]]
    model = config.get("model")
    if isinstance(model, Mapping) and isinstance(model.get("path"), str):
        places += _inside(Path(model["path"]), root, run)
    for place in places:
        file = place / "tokenizer.json"
        if (said := content(file, 32 << 20)) and (found := _loaded(said)) is not None:
            return found
    return None


def _inside(path: Path, root: Path, run: Path) -> list[Path]:
    """Return the path of the model that a run names, if it is below the folder of runs."""
    try:
        top = root.resolve()
        tried = (
            [path]
            if path.is_absolute()
            else [base / path for base in (Path(), *run.parents) if base == Path() or top in (base, *base.parents)]
        )
        return [found for one in tried if top in (found := one.resolve()).parents]
    except (OSError, ValueError, RuntimeError):
        return []


@lru_cache(maxsize=8)
def _loaded(said: bytes) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(said)
    except Exception:  # an invalid file can raise anything; token numbers are shown then
        return None


def config_of(run: Path) -> dict[str, Any]:
    """Return a run's settings; empty if there are none, or if they are nested too deeply."""
    found = parse_row(content(run / "config.json")) or {}
    return {} if is_deep(found) else found


def is_deep(value: Any, most: int = 50) -> bool:
    """Return True if JSON is nested deeper than `most`. Recursive functions would reach Python's limit."""
    level = [value]
    for _ in range(most):
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [part for parts in inner for part in parts]
    return bool(level)
