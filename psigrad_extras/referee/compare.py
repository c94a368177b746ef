"""Comparison of two records, tensor by tensor in the order of a step, up to the first one where they part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Step = dict[str, Any]
COLLECTED = (
    *("batch", "rendered prompt", "prompt ids", "completion ids", "mask", "sampling log-probs", "log-probs"),
    *("reference log-probs", "rewards", "advantages"),
)
UPDATED = (
    *(
        "rows of the update",
        "log-probs of the pass",
        "loss weights",
        "loss slopes",
        "loss",
        "gradient",
        "learning rate",
        "update",
    ),
)
SAYS = {
    "batch": "prompts of a step, completions of each, and updates",
    "sampling log-probs": "log-probs under the distribution that tokens are drawn from",
    "log-probs": "log-probs of the policy before the update",
    "rewards": "of each function, then their weighted sum",
    "loss weights": "the weight of each token's loss: 1 over the normaliser",
    "loss slopes": "the derivative of the loss by each token's log-prob",
}
TOLERANCE, HALF = 1e-4, 5e-2
"""The share of a tensor's scale by which rounding may move it, if both sides compute in float32, and if one does in half precision."""
_NATS = ("sampling log-probs", "log-probs", "reference log-probs", "log-probs of the pass")
_NOISE = 1e-3
"""An element of a gradient below this share of its root mean square is rounding, which Adam turns into a full step."""


@dataclass(frozen=True)
class Finding:
    """The result for one tensor: its largest difference as a share of its scale, and where the sides part, if they do."""

    name: str
    step: int
    update: int
    """From 1; 0 for what is computed once for a collection."""
    difference: float
    parts: tuple[str, ...] = ()
    """Sentences; empty if the tensors are equal."""

    @property
    def place(self) -> str:
        """The step and the update, for the user."""
        return f"step {self.step}" + (f", update {self.update}" if self.update else "")


def compare(ours: Sequence[Step], theirs: Sequence[Step], names: tuple[str, str], tolerance: float) -> Iterator[Finding]:
    """Yield the findings in the order of computation."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        for name in COLLECTED:
            if name in a or name in b:
                yield Finding(name, number, 0, *_compare(name, a.get(name), b.get(name), names, tolerance))
        counts = [{"updates": len(side["updates"])} for side in (a, b)]
        if counts[0] != counts[1]:
            yield Finding("updates", number, 0, *_compare("updates", *counts, names, tolerance))
        sound: dict[str, Tensor] = {}
        for update, (x, y) in enumerate(zip(a["updates"], b["updates"], strict=False), 1):
            _keep_sound(sound, x["gradient"], y["gradient"])
            for name in UPDATED:
                left, right = x.get(name), y.get(name)
                if name == "loss":  # it may be a sum of terms that cancel
                    scale = sum(abs(slope) for row in y["loss slopes"].values() for slope in row)
                    left, right = ({"of the update": value} for value in (left, right))
                    yield Finding(name, number, update, *_compare(name, left, right, names, tolerance, scale))
                    continue
                if name == "update":
                    left, right = ({key: t * sound[key] for key, t in side.items() if key in sound} for side in (left, right))
                yield Finding(name, number, update, *_compare(name, left, right, names, tolerance))


def _keep_sound(sound: dict[str, Tensor], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Keep in `sound` the elements whose gradient is no rounding and the same on both sides, in all updates so far."""
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].cpu().float(), theirs[name].float()
        if a.shape == b.shape:
            clear = (b.abs() > _NOISE * b.pow(2).mean().sqrt()) & ((a - b).abs() <= 1e-2 * b.abs())
            sound[name] = clear & sound.get(name, clear)


def _compare(
    name: str, ours: Any, theirs: Any, names: tuple[str, str], tolerance: float, scale: float = 0.0
) -> tuple[float, tuple[str, ...]]:
    if ours is None or theirs is None:
        if (ours is None) == (theirs is None) or name == "sampling log-probs":
            return 0.0, ()
        return math.inf, (f"Only {names[theirs is not None]} has it.",)
    if isinstance(ours, float):
        ours, theirs = {name: ours}, {name: theirs}
    if isinstance(ours, Mapping) and isinstance(next(iter(ours.values()), None), Tensor):
        return _compare_parameters(ours, theirs, names, tolerance)
    columns = [_table(side) for side in (ours, theirs)]
    if name == "loss slopes":  # a row without a gradient needs no forward pass
        columns = [{key: side.get(key, 0.0) for key in {**columns[0], **columns[1]}} for side in columns]
    elif name in ("log-probs of the pass", "loss weights"):
        columns = [{key: x for key, x in side.items() if key in columns[0].keys() & columns[1].keys()} for side in columns]
    return _compare_tables(*columns, names, tolerance, max(scale, 1.0 if name in _NATS else 0.0))


def _table(side: Any) -> dict[tuple[Any, ...], Any]:
    """Return the values by place: (row,) or (row, token), or the name of a figure."""
    found: dict[tuple[Any, ...], Any] = {}
    for row, value in side.items() if isinstance(side, Mapping) else enumerate(side):
        if isinstance(value, list):
            found |= {(row, n): x for n, x in enumerate(value)}
        else:
            found[row,] = value
    return found


def _compare_tables(
    ours: Mapping[Any, Any], theirs: Mapping[Any, Any], names: tuple[str, str], tolerance: float, least: float
) -> tuple[float, tuple[str, ...]]:
    numbers = [x for side in (ours, theirs) for x in side.values() if not isinstance(x, str) and math.isfinite(x)]
    scale = max([abs(x) for x in numbers] + [least]) or 1.0
    exact = all(isinstance(x, int | str) for side in (ours, theirs) for x in side.values())
    largest, parted = 0.0, []
    for place in {**ours, **theirs}:
        a, b = ours.get(place), theirs.get(place)
        if a is None or b is None or isinstance(a, str) or isinstance(b, str):
            difference = 0.0 if a == b else math.inf
        elif a == b or (math.isnan(a) and math.isnan(b)):
            difference = 0.0
        else:
            difference = abs(a - b) / scale if math.isfinite(a - b) else math.inf
        largest = max(largest, difference)
        if difference > (0.0 if exact else tolerance):
            parted.append(place)
    if not parted:
        return largest, ()
    sentences = [_at(parted[0], ours, theirs, names), f"{len(parted)} of {len({**ours, **theirs})} values part."]
    return largest, (*sentences, *_factor(ours, theirs, names, tolerance))


def _at(place: tuple[Any, ...], ours: Mapping[Any, Any], theirs: Mapping[Any, Any], names: tuple[str, str]) -> str:
    row, *token = place
    where = (f"Row {row}" if isinstance(row, int) else str(row).capitalize()) + "".join(f", place {n}" for n in token)
    texts = ["nothing" if (x := side.get(place)) is None else x if isinstance(x, str) else f"{x:.7g}" for side in (ours, theirs)]
    return f"{where}: {names[0]} has {texts[0]!s}, {names[1]} has {texts[1]!s}."


def _factor(ours: Mapping[Any, Any], theirs: Mapping[Any, Any], names: tuple[str, str], tolerance: float) -> Iterator[str]:
    """Yield a sentence if one side is the other times one factor, everywhere or row by row."""
    shared = [(place, ours[place], theirs[place]) for place in ours.keys() & theirs.keys()]
    pairs = [(p, a, b) for p, a, b in shared if not isinstance(a, str) and not isinstance(b, str) and a and math.isfinite(b / a)]
    if len(pairs) < 3 or len(pairs) < sum(bool(b) for _, _, b in shared):
        return
    by_row: dict[Any, list[float]] = {}
    for (row, *_), a, b in pairs:
        by_row.setdefault(row, []).append(b / a)
    every = [factor for row in by_row.values() for factor in row]
    if max(every) - min(every) <= 10 * tolerance * max(map(abs, every)):
        yield f"{names[1]}'s are {every[0]:.4g} times {names[0]}'s everywhere."
    elif all(max(row) - min(row) <= 10 * tolerance * max(map(abs, row)) for row in by_row.values()):
        yield f"{names[1]}'s are {names[0]}'s times one factor a row, from {min(every):.4g} to {max(every):.4g}."


def _compare_parameters(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], names: tuple[str, str], tolerance: float
) -> tuple[float, tuple[str, ...]]:
    """Compare tensors by parameter: ‖a − b‖ over ‖b‖, or over a small share of the whole tensor's norm if that is larger."""
    total = math.sqrt(sum(float(t.double().pow(2).sum()) for t in theirs.values()))
    largest, parted = 0.0, []
    for name in {**theirs, **ours}:
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or a.shape != b.shape:
            return math.inf, (f"{name}: {names[0]} has {_shape(a)}, {names[1]} has {_shape(b)}.",)
        difference, norms = float((a.cpu().double() - b.double()).norm()), (float(a.double().norm()), float(b.double().norm()))
        share = difference / (max(*norms, 1e-3 * total) or 1.0)
        largest = max(largest, share)
        if share > 5 * tolerance:
            parted.append((share, name, norms))
    if not parted:
        return largest, ()
    share, name, norms = max(parted)
    sentence = (
        f"{name}: the norms are {norms[0]:.6g} in {names[0]} and {norms[1]:.6g} in {names[1]}, and the two differ by {share:.2%}."
    )
    return largest, (sentence, f"{len(parted)} of {len(theirs)} parameters part.", *_ratio(ours, theirs, names, tolerance))


def _ratio(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], names: tuple[str, str], tolerance: float) -> Iterator[str]:
    a, b = (torch.cat([side[name].cpu().double().flatten() for name in theirs]) for side in (ours, theirs))
    factor = float(a @ b / (a @ a)) if bool(a.any()) else 0.0
    if float((b - factor * a).norm()) <= 10 * tolerance * float(b.norm()):
        yield f"{names[1]}'s is {factor:.4g} times {names[0]}'s in every parameter."


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
