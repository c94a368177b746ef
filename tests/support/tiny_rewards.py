"""Reward functions of the tiny jobs, apart from everything heavy: the worker that runs them imports this file."""

from __future__ import annotations


def early_letters(completions, **columns):
    """Dense enough that a random model's groups have signal: the share of early letters in the completion."""
    return [sum(c in "abcdefgh \n" for c in text) / (1 + len(text)) for text in completions]


def of_text(completions, **columns):
    """Another number for nearly every text."""
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def of_some(completions, **columns):
    """As `of_text`, but for one in three, which nobody can judge."""
    return [
        None if sum(map(ord, text)) % 3 == 0 else score for text, score in zip(completions, of_text(completions), strict=True)
    ]


class Parrot:
    """An environment of one turn, which pays for nothing."""

    def reset(self, row):
        """The prompt is the row's."""

    def step(self, text):
        return text, 0.0, True


class Talker(Parrot):
    """An environment that never comes to an end by itself, and pays for every turn."""

    def step(self, text):
        return "say more: " + text, of_text([text])[0], False
