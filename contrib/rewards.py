"""Rewards: functions of completions, for `--reward contrib/rewards.py:NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psigrad.language.rollout.scoring import text_of

__all__ = ["fresh_words"]

_RUN = 3


def fresh_words(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The share of runs of three words that did not stand in the completion before: 1 without a repetition, near 0 for a loop.
    None for a completion of fewer than three words.
    """
    return [_fresh(text_of(completion).lower().split()) for completion in completions]


def _fresh(words: list[str]) -> float | None:
    runs = [tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]
    return len(set(runs)) / len(runs) if runs else None
