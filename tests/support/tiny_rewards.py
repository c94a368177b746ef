"""Reward functions of the tiny jobs, apart from everything heavy: the worker that runs them imports this file."""

from __future__ import annotations

import json
import os
from typing import Any

from timing import until

from psigrad.language.rewards import Failure, Unscored


def early_letters(completions, **columns):
    """Dense enough that a random model's groups have signal: the share of early letters in the completion."""
    return [sum(c in "abcdefgh \n" for c in text) / (1 + len(text)) for text in completions]


def opened(opened_thoughts, **columns):
    """1 where the prompt has opened a thought."""
    return [float(tag == "<think>\n") for tag in opened_thoughts]


def tagged(completions, **columns):
    """1 for a text with a tag such as <s7>."""
    return [float("<s" in str(text)) for text in completions]


def of_text(completions, **columns):
    """Another number for nearly every text."""
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def of_some(completions, **columns):
    """As `of_text`, but for one in three, which nobody can judge."""
    return [
        None if sum(map(ord, text)) % 3 == 0 else score for text, score in zip(completions, of_text(completions), strict=True)
    ]


def strict(completions, answer, **columns):
    out = []
    for text, right in zip(completions, answer, strict=True):
        if not text.isdigit():
            raise Failure(f"{text!r} is no number")
        out.append(float(text == right))
    return out


def broken(completions, **columns):
    raise KeyError("mark")


def wants_tokens(completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def of_misspelt(completions, anwser, **columns):
    return [1.0 for _ in completions]


def of_two(completions, level, solution):
    return [1.0 for _ in completions]


def of_nothing(completions, answer, **columns):
    return [float(text.nope) for text in completions]


def constant(completions, **columns):
    return [1.0] * len(completions)


def fails_later(prompts, completions, **columns):
    """Good for the first evaluation and some steps, then broken for good."""
    fails_later.calls += 1
    if fails_later.calls > 24:
        raise RuntimeError("the service is gone")
    return [float(len(text)) for text in completions]


fails_later.calls = 0


def some(prompts, completions, **columns):
    """Differs within a group for some prompts, is equal for others, and can't judge the rest."""
    given = []
    for prompt, completion in zip(prompts, completions, strict=True):
        letter = str(prompt)[4]
        given.append(Unscored("no judge") if letter in "ab" else float(len(completion) % 2) if letter in "cdef" else 1.0)
    return given


def marked(prompts: list[str], completions: list[str], mark: list[int], **_: Any) -> list[float]:
    return [100 * m + sum(map(ord, text)) + len(completions) for m, text in zip(mark, completions, strict=True)]


def early_prompts(prompts, completions, **columns):
    """Says nothing of the completion."""
    return [float(prompt[4] in "abcd") for prompt in prompts]


def lengths(completions, **columns):
    return [float(len(str(completion))) for completion in completions]


def add(a: int, b: int) -> int:
    """The sum.

    Args:
        a: one number
        b: another
    """
    return a + b


def price(answer: str, count: int, currency: str = "EUR") -> str:
    """What it costs.

    Args:
        answer: what is bought
        count: how many
        currency: in what
    """
    return f"{count} of {answer!r}, {currency}"


def deadly(kind: str) -> str:
    """Never comes back.

    Args:
        kind: of what
    """
    os._exit(3)


def sees_no_answers(completions, solution, **columns):
    return [1.0 for _ in solution]


def fails_on_even_lengths(completions, **columns):
    return [1.0 if len(text) % 2 else float("nan") for text in completions]


def right(completions, answer, **columns):
    return [float(text.strip() == a) for text, a in zip(completions, answer, strict=True)]


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


class Doors:
    """Opens for the row's own answer alone."""

    def reset(self, row):
        self.key = row["answer"]
        return "A door."

    def step(self, completion):
        return f"{completion} is not {self.key}", 0.5, True


class WrongDoors(Doors):
    """Raises where it should answer."""

    def step(self, completion):
        return completion.nope, 0.0, True


class Echo:
    """An environment that says what it heard; half a point for each turn with an "e" in it."""

    def reset(self, row):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        return f" you said {len(completion)}:", 0.5 * ("e" in completion), self.turns == 2


class Again:
    """Asks once more."""

    def reset(self, row):
        self.turn = 0

    def step(self, completion):
        self.turn += 1
        return "again?", float(self.turn), self.turn == 2


class Sleepy:
    """An environment that answers once it is told that sampling hangs, or never."""

    def __init__(self, events):
        self.events = events

    def reset(self, row):
        return None

    def step(self, text):
        until(lambda: '"sample"' in self.events.read_text())
        return "", 1.0, True


def has_label(completions, label, **columns):
    """1 for a label that is JSON; an error for another."""
    return [float(json.loads(own) is not None) + len(text) for own, text in zip(label, completions, strict=True)]


class Duel:
    """A game of two seats, who write once each; the first gains a point."""

    seats = 2

    def reset(self, row):
        self.turns = 0
        return 0, row["prompt"]

    def step(self, completion):
        self.turns += 1
        return self.turns % 2, "Your turn.\n", (1.0, 0.0) if self.turns == 2 else (0.0, 0.0), self.turns == 2


class Team:
    """Three seats in turn say a letter. Each gets 1 if all said the same; the last also pays 0.5 at its turn."""

    seats = 3

    def reset(self, row):
        self.said = []
        return 0, "A"

    def step(self, completion):
        self.said.append(completion)
        done = len(self.said) == 6
        won = float(len(set(self.said)) == 1) if done else 0.0
        return len(self.said) % 3, "J", [won, won, won - 0.5 * (len(self.said) == 3)], done


class Wrong(Team):
    """Gives one reward to three seats."""

    def step(self, completion):
        return 0, "J", [1.0], True


class Keyed(Team):
    """Names the seats that it rewards."""

    def step(self, completion):
        return 0, "J", {0: 1.0, 1: 0.0, 2: 0.0}, True


def reds(completions, images, **_):
    """The red of each row's image."""
    return [one.getpixel((0, 0))[0] for (one,) in images]
