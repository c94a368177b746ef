"""Answers by a letter, and the answers of well-known benchmarks, whose rows stand in `psigrad/language/data/benchmarks.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.errors import UserError
from psigrad.language.rewards.math_answers import Math
from psigrad.language.rewards.outcomes import text_of

_SAID = re.compile(
    r"\\boxed\{\s*(?:\\text\{)?\(?([A-Z])\b|(?:answer|choice|option)\s*(?:is|:)?[\s*:]*\(?([A-Z])\b(?!['’])", re.IGNORECASE
)
_ALONE = re.compile(r"\W*([A-Za-z])\W*(?:\n|$)")
_FIRST = re.compile(r"\W*([A-Za-z])\b(?!['’])")


@dataclass(frozen=True)
class Choice:
    r"""1 where the letter that the completion chooses is the column `answer`, a letter or the number of a choice from 0; else 0.

    That is the letter that is the first line, else the last letter in a \boxed{…} or behind "answer is", "choice" or "option",
    else the one that the completion begins with. None where the answer is empty.
    """

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
        """1.0, 0.0 or None for each completion."""
        golds = [None if a is None or str(a) == "" else letter_of(a) for a in answer]
        return [None if gold is None else float(chosen(text_of(c)) == gold) for c, gold in zip(completions, golds, strict=True)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises `UserError` for an answer that is no choice."""
        if (answer := row.get("answer")) is not None and str(answer) != "":
            letter_of(answer)


def letter_of(answer: Any) -> str:
    """A choice as its letter: 2 is C, "c" and "(C)" too. Raises `UserError` for what is none."""
    text = str(answer).strip().strip("().").upper()
    if re.fullmatch(r"[A-Z]", text):
        return text
    if re.fullmatch(r"\d{1,2}", text) and int(text) < 26:
        return chr(ord("A") + int(text))
    raise UserError(f"the answer {str(answer)[:60]!r} is neither a letter nor the number of a choice from 0")


def chosen(text: str) -> str:
    """The letter that a completion chooses; empty where it chooses none."""
    if alone := _ALONE.match(text):
        return alone[1].upper()
    said = [one or other for one, other in _SAID.findall(text)]
    first = _FIRST.match(text)
    return (said[-1] if said else first[1] if first else "").upper()


@dataclass(frozen=True)
class BenchmarkReward:
    """What a benchmark's answers are worth by `compare`: the completion up to `stop`, where a base model goes on to the next
    question.
    """

    name: str
    compare: Math | Choice
    stop: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """1.0, 0.0 or None for each completion."""
        texts = map(text_of, completions)
        return self.compare([text.split(self.stop)[0] if self.stop else text for text in texts], **columns)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises `UserError` for an answer that cannot be compared."""
        if row.get("answer") in (None, ""):
            raise UserError("the row has no answer")
        self.compare.check_row(row)
