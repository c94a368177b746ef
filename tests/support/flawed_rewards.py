"""Rewards with a hole each, in a module that a worker imports at once."""

from __future__ import annotations

import re


def cut_to_first(completions, answer, **columns):
    """The audit's A1: the gold ends behind its first number."""
    first = [re.findall(r"[\d.]+", str(gold))[:1] for gold in answer]
    return [float(bool(gold) and re.findall(r"[\d.]+", text)[-1:] == gold) for text, gold in zip(completions, first, strict=True)]


def believes(completions, answer, **columns):
    """A judge that takes the completion's word."""
    return [1.0 if "Score: " in text else float(str(gold) in text) for text, gold in zip(completions, answer, strict=True)]


def bag_of_words(completions, answer, **columns):
    return [float(sorted(text.split()) == sorted(str(gold).split())) for text, gold in zip(completions, answer, strict=True)]
