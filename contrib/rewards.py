"""Rewards: functions of completions, for `--reward contrib/rewards.py:NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psigrad.language.rollout.scoring import text_of

__all__ = ["fresh_words"]

_RUN = 3


def fresh_words(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return the share of distinct ones among all runs of three consecutive words: 1 without repetition, near 0 for a loop.
    Return None for a completion of fewer than three words.
    """
    return [_fresh(text_of(completion).lower().split()) for completion in completions]


def _fresh(words: list[str]) -> float | None:
    runs = [tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]
    return len(set(runs)) / len(runs) if runs else None
