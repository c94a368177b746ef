"""Several datasets as one: each with its share of the rows, and of those that are held out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.sources import LoadedRows, holdout
from psigrad.seeds import permutation

_WEIGHT = re.compile(r"^(.+):(\d+(?:\.\d*)?|\.\d+)$")


class Named(NamedTuple):
    """A dataset of several, and its weight; None where none is given."""

    name: str
    weight: float | None


def several(dataset: object) -> list[Named]:
    """The datasets of a list of names, "a.jsonl:0.7" with a weight behind it; [] for anything else.

    Raises `UserError` where only some have a weight, or one is 0.
    """
    if not isinstance(dataset, list | tuple) or not dataset or not all(isinstance(name, str) for name in dataset):
        return []
    found = [Named(m[1], float(m[2])) if (m := _WEIGHT.match(text)) else Named(text, None) for text in dataset]
    weighted = [one for one in found if one.weight is not None]
    if weighted and len(weighted) < len(found):
        bare = next(one.name for one in found if one.weight is None)
        raise UserError(f"Some datasets have a weight and {bare!r} has none; give each one, as {bare}:0.5, or none at all.")
    if any(one.weight == 0 for one in weighted):
        raise UserError(f"A dataset has weight 0 in {', '.join(map(str, dataset))}; leave it out.")
    return found


def quotas(total: int, weights: Sequence[float]) -> list[int]:
    """`total` divided in proportion to the weights, each within 1 of its share: ends are rounded, so nothing is lost."""
    ends = [round(total * sum(weights[: i + 1]) / sum(weights)) for i in range(len(weights))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def held_out(parts: Sequence[LoadedRows], shares: Sequence[float], wanted: int) -> tuple[list[LoadedRows], list[Row]]:
    """(rows to train on of each dataset, the last rows of each as held-out), `wanted` in all, divided by `shares`."""
    split = [holdout(rows, n) for rows, n in zip(parts, quotas(wanted, shares), strict=True)]
    return [train for train, _ in split], [row for _, held in split for row in held.rows]


def mixed(parts: Sequence[Sequence[Row]], weights: Sequence[float | None], seed: int) -> list[Row]:
    """As many rows as all datasets have together, of which each has its share.

    Without weights that is every row once. Else a dataset of n rows with quota q gives each of them ⌊q/n⌋ or ⌈q/n⌉ times; which
    ones come once more depends on the seed and the place of the dataset alone. Training shuffles them anew in every epoch.
    """
    rows: list[Row] = []
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(parts):
        return [row for part in parts for row in part]
    for place, (part, quota) in enumerate(zip(parts, quotas(sum(map(len, parts)), given), strict=True)):
        again, more = divmod(quota, len(part))
        rows += [*part] * again + [part[i] for i in sorted(permutation(len(part), seed, "mixture", place)[:more])]
    return rows
