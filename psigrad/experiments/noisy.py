"""Rewards with an error: the task's score plus normal noise that is a function of the answer.

A learned reward model errs so: the same answer always gets the same wrong score.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from psigrad.language.rewards.builtin import exact
from psigrad.language.rewards.outcomes import text_of


def half(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """1 for the right answer, else 0, plus noise of standard deviation 0.5."""
    return _noisy(0.5, prompts, completions, answer)


def whole(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """1 for the right answer, else 0, plus noise of standard deviation 1."""
    return _noisy(1.0, prompts, completions, answer)


def _noisy(size: float, prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any]) -> list[float]:
    scores = exact(completions, answer)
    return [(s or 0.0) + size * _normal(p, c) for s, p, c in zip(scores, prompts, completions, strict=True)]


def _normal(prompt: Any, completion: Any) -> float:
    """A standard normal number that is a function of the two texts."""
    digest = hashlib.blake2b(f"{text_of(prompt)}\0{text_of(completion)}".encode(), digest_size=8).digest()
    return NormalDist().inv_cdf((int.from_bytes(digest, "big") + 0.5) / 2**64)
