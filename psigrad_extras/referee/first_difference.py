"""Comparison of the records of two implementations, tensor by tensor in the order of computation in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Step = dict[str, Any]
_NATS = ("sampling log-probs", "log-probs", "reference log-probs", "log-probs of the pass")
TOKENS = {**dict.fromkeys(_NATS, 1.0), "advantages": 0.0, "loss weights": 0.0, "loss slopes": 0.0}
"""The tensors that have a value for each token -> the least scale by which their differences are divided."""
COLLECTED = ("batch", "rendered prompt", "prompt ids", "completion ids", "mask", "sampling log-probs", "log-probs",
             "reference log-probs", "rewards", "advantages")  # fmt: skip
UPDATED = ("rows of the update", "log-probs of the pass", "loss weights", "loss slopes", "loss", "gradient", "learning rate",
           "update")  # fmt: skip
TOLERANCE, HALF = 1e-4, 5e-2
"""The largest difference that rounding explains, as a share of a tensor's scale: in float32, and in half precision."""
_NOISE = 1e-3
"""The share of a gradient's root mean square below which an element is only rounding. Adam turns such noise into a full step."""


class TensorResult(NamedTuple):
    """The result for one tensor: its largest difference as a share of its scale, and sentences if the two sides differ.

    `step` and `update` count from 1. `update` is 0 for tensors that are computed once per step, before its updates.
    """

    name: str
    step: int
    update: int
    difference: float
    parts: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The step and the update of the tensor, as text."""
        return f"step {self.step}" + (f", update {self.update}" if self.update else "")


def compare(ours: Sequence[Step], theirs: Sequence[Step], names: tuple[str, str], tolerance: float) -> Iterator[TensorResult]:
    """Yield the result for each tensor of two records, in the order of computation."""
    sound: dict[str, Tensor] = {}
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        judge = _Judge(names, tolerance, b)
        for name in COLLECTED:
            sides = (name in a) + (name in b)
            if not sides or (sides == 1 and name == "sampling log-probs"):  # some samplers report no log-probs
                continue
            yield TensorResult(name, number, 0, *judge.judge(name, a.get(name), b.get(name)))
        yield TensorResult("updates", number, 0, *judge.judge("updates", len(a["updates"]), len(b["updates"])))
        for update, (x, y) in enumerate(zip(a["updates"], b["updates"], strict=False), 1):
            _keep_sound(sound, x["gradient"], y["gradient"])
            for name in UPDATED:
                left, right = x[name], y[name]
                if name == "update":
                    left, right = ({key: t * sound[key] for key, t in side.items() if key in sound} for side in (left, right))
                # The terms of the loss may cancel in the sum, so differences are compared with the terms' size.
                scale = sum(abs(slope) for row in y["loss slopes"].values() for slope in row) if name == "loss" else 0.0
                yield TensorResult(name, number, update, *judge.judge(name, left, right, scale))


def _keep_sound(sound: dict[str, Tensor], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Update `sound`: True for elements whose gradient is above rounding and equal on both sides in all updates so far."""
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].cpu().float(), theirs[name].cpu().float()
        if a.shape == b.shape:
            clear = (b.abs() > _NOISE * b.pow(2).mean().sqrt()) & ((a - b).abs() <= 1e-2 * b.abs())
            sound[name] = clear & sound.get(name, clear)


@dataclass(frozen=True)
class _Judge:
    names: tuple[str, str]
    tolerance: float
    step: Step
    """The other side's record of the step."""

    def judge(self, name: str, ours: Any, theirs: Any, scale: float = 0.0) -> tuple[float, tuple[str, ...]]:
        """Return (the largest difference of a tensor as a share of its scale, sentences if the two sides differ)."""
        if ours is None or theirs is None:
            return math.inf, (f"Only {self.names[ours is None]} has this tensor.",)
        if name in ("gradient", "update"):
            return self._parameters(ours, theirs)
        a, b = (self._table(name, side) for side in (ours, theirs))
        if name == "loss slopes":  # a row without a gradient needs no forward pass
            a, b = ({**dict.fromkeys(other, 0.0), **side} for side, other in ((a, b), (b, a)))
        elif name in ("log-probs of the pass", "loss weights"):
            a, b = ({place: x for place, x in side.items() if place in a.keys() & b.keys()} for side in (a, b))
        places = [*{**b, **a}]
        pairs = [(a.get(place), b.get(place)) for place in places]
        numbers = [abs(x) for pair in pairs for x in pair if isinstance(x, float) and math.isfinite(x)]
        scale = max([*numbers, scale, TOKENS.get(name, 0.0)]) or 1.0
        shares = [_share(x, y, scale) for x, y in pairs]
        largest = max(shares, default=0.0)
        if largest <= self.tolerance:
            return largest, ()
        at, count = shares.index(largest), sum(share > self.tolerance for share in shares)
        texts = ["nothing" if x is None else x if isinstance(x, str) else f"{x:.7g}" for x in pairs[at]]
        where = f"{self._where(places[at], name)}: {self.names[0]} has {texts[0]}, {self.names[1]} has {texts[1]}."
        sides = zip(*pairs, strict=True) if len(numbers) == 2 * len(pairs) else ()
        known = [torch.tensor(side, dtype=torch.float64) for side in sides]
        return largest, (where, f"{count} of {len(places)} values differ.", *self._factor(*known))

    def _table(self, name: str, side: Any) -> dict[tuple[Any, ...], Any]:
        """Return the values of one side by their keys: (row, token), (row,) or (name,). Tokens not trained on are omitted."""
        found: dict[tuple[Any, ...], Any] = {}
        rows = side.items() if isinstance(side, Mapping) else enumerate(side) if isinstance(side, list) else [(name, side)]
        for row, value in rows:
            if isinstance(value, list):
                mask = self.step["mask"][row] if name in TOKENS else [1.0] * len(value)
                found |= {(row, n): x for n, (x, counts) in enumerate(zip(value, mask, strict=False)) if counts}
            else:
                found[row,] = value
        return found

    def _where(self, place: tuple[Any, ...], name: str) -> str:
        row, *column = place
        if not isinstance(row, int) or name == "rows of the update":
            return str(row).capitalize()
        prompt = self.step["rendered prompt"][row]
        text = f"Row {row} (prompt {prompt if len(prompt) < 40 else prompt[:37] + '…'!r})"
        return text + "".join(f", {'function' if name == 'rewards' else 'token'} {n}" for n in column)

    def _parameters(self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, tuple[str, ...]]:
        """Compare each parameter: ‖a − b‖ divided by the larger norm, but at least by a thousandth of all parameters' norm."""
        total = math.sqrt(sum(float(t.double().pow(2).sum()) for t in theirs.values()))
        shares: dict[str, float] = {}
        for name in {**theirs, **ours}:
            a, b = ours.get(name), theirs.get(name)
            if a is None or b is None or a.shape != b.shape:
                shapes = ["nothing" if x is None else f"shape {tuple(x.shape)}" for x in (a, b)]
                return math.inf, (f"{name}: {self.names[0]} has {shapes[0]}, {self.names[1]} has {shapes[1]}.",)
            difference = (a.cpu().double() - b.cpu().double()).norm()
            shares[name] = float(difference / max(float(a.double().norm()), float(b.double().norm()), 1e-3 * total, 1e-30))
        largest = max(shares.values(), default=0.0)
        parted = [name for name, share in shares.items() if share > 5 * self.tolerance]  # sums over many tokens round more
        if not parted:
            return largest, ()
        name = max(parted, key=lambda name: shares[name])
        sizes = [float(side[name].norm()) for side in (ours, theirs)]
        norms = f"the norm is {sizes[0]:.6g} in {self.names[0]}, {sizes[1]:.6g} in {self.names[1]}"
        known = [torch.cat([side[name].cpu().double().flatten() for name in shares]) for side in (ours, theirs)]
        sentence = f"{name}: {norms}, and the norm of the difference is {shares[name]:.2%} of the larger."
        return largest, (sentence, f"{len(parted)} of {len(shares)} parameters differ.", *self._factor(*known))

    def _factor(self, *known: Tensor) -> Iterator[str]:
        """Yield a sentence if one side equals the other times a constant factor."""
        if known and len(known[0]) > 2 and bool(known[0].any()):
            a, b = known
            factor = float(a @ b / (a @ a))
            if abs(factor - 1) > 10 * self.tolerance and float((b - factor * a).norm()) <= 10 * self.tolerance * float(b.norm()):
                yield f"All values of {self.names[1]} are {factor:.4g} times those of {self.names[0]}."


def _share(a: Any, b: Any, scale: float) -> float:
    """Return |a − b| as a share of the scale; infinity if one value is missing, or if texts or integers differ."""
    if a == b or (a != a and b != b):
        return 0.0
    return abs(a - b) / scale if isinstance(a, float) and isinstance(b, float) and math.isfinite(a - b) else math.inf
