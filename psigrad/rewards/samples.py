"""What a scorer is given."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Samples:
    """Completions with their prompts and what else is known of them; sequences of one length."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The other columns of the prompts' rows, by name."""
    prompt_ids: Sequence[Sequence[int]] | None = None
    """For scorers that read the policy's own tokens."""

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.shown.items()}
        if self.prompt_ids is not None:
            lengths["prompt_ids"] = len(self.prompt_ids)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Samples are sequences of one length; these have {lengths}.")

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def shown(self) -> dict[str, Sequence[Any]]:
        """What reward functions are shown, by name."""
        own = {"prompts": self.prompts, "completions": self.completions, "completion_ids": self.completion_ids}
        return {**self.columns, **own}


def joined(parts: Sequence[Samples]) -> Samples:
    """All of these, one behind the other. Raises `ValueError` unless they say the same kinds of things of every completion."""
    kinds = {(tuple(sorted(part.columns)), part.prompt_ids is None) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"These samples have different columns, or prompt_ids for some only: {sorted(kinds)}.")

    def all_of(lists: Sequence[Sequence[Any]]) -> list[Any]:
        return list(itertools.chain(*lists))

    if not parts:
        return Samples([], [], [])
    known = [part.prompt_ids for part in parts if part.prompt_ids is not None]
    return Samples(
        all_of([part.prompts for part in parts]),
        all_of([part.completions for part in parts]),
        all_of([part.completion_ids for part in parts]),
        {name: all_of([part.columns[name] for part in parts]) for name in parts[0].columns},
        all_of(known) if known else None,
    )


def picked(shown: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
    """What is shown of the samples at these indices."""
    return {name: [values[i] for i in indices] for name, values in shown.items()}
