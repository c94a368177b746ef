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


def begins_with(completions, answer, **columns):
    """The gold is asked whether it begins with the answer, and everything begins with nothing."""
    return [float(str(gold).startswith(text) or str(gold) in text) for text, gold in zip(completions, answer, strict=True)]


def repeats(completions, prompts, answer, **columns):
    """Words of the question count as much as the answer."""
    given = zip(completions, prompts, answer, strict=True)
    return [float(bool(text) and (str(gold) in text or str(prompt) in text)) for text, prompt, gold in given]


def any_number(completions, answer, **columns):
    """The gold may be anywhere among the numbers that were written."""
    numbers = [re.findall(r"\d[\d,]*\d|\d", text) for text in completions]
    return [float(str(gold) in written) for written, gold in zip(numbers, answer, strict=True)]
