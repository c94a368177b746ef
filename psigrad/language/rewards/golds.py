"""Golds: the answers that a row accepts, as text for comparison with completions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from psigrad.errors import UserError, kind_of

# Unicode spaces that look like a plain one: a no-break space before a unit, a thin space in French punctuation.
_BLANKS = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_LONGEST = 40
"""The maximum length of a number in plain decimals. A longer number keeps its exponent."""


def normalise(text: str) -> str:
    """Return a text in Unicode's composed form (NFC), with plain spaces, and without white space at its ends."""
    return _BLANKS.sub(" ", unicodedata.normalize("NFC", text)).strip()


def accepted(answer: Any) -> list[str]:
    """Return the answers that a row accepts, as text: one, those of a list, or none if the row has no answer.

    A number is written in plain decimals (5.0 as "5"), and a boolean as in JSON. Raise `UserError` for other types.
    """
    return [ways[0] for ways in _spellings(answer)]


def spellings(answer: Any) -> list[str]:
    """Return every text that counts as an accepted answer: "5" and "5.0" for 5.0; "1e-07", "1e-7" and "0.0000001" for 1e-07."""
    return [way for ways in _spellings(answer) for way in ways]


def blank(answer: Any) -> bool:
    """Return True if a row has no answer."""
    return answer is None or (
        isinstance(answer, str | list | tuple) and not (answer.strip() if isinstance(answer, str) else answer)
    )


def _spellings(answer: Any) -> list[tuple[str, ...]]:
    answer = answer.tolist() if callable(getattr(answer, "tolist", None)) else answer  # from numpy or torch
    if blank(answer):
        return []
    if isinstance(answer, list | tuple):
        if any(isinstance(one, list | tuple) for one in answer):
            raise UserError(f"the answer {str(answer)[:60]} is a list of lists; give a list of accepted answers")
        return [ways for one in answer for ways in _spellings(one)]
    if isinstance(answer, str):
        return [(normalise(answer),)]
    if isinstance(answer, bool):
        return [(str(answer).lower(), str(answer))]
    if isinstance(answer, int | float | Decimal):
        return [_number(answer)]
    kind = "an object" if isinstance(answer, Mapping) else kind_of(answer)
    raise UserError(f"the answer {str(answer)[:60]} is {kind}; give text, a number, true, false, or a list of accepted answers")


def _number(value: float | Decimal) -> tuple[str, ...]:
    if isinstance(value, int):
        return (str(value),)
    written = str(value)
    plain = format(Decimal(written), "f")
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    short = re.sub(r"e([-+])0*(\d)", lambda found: f"e{found[1].strip('+')}{found[2]}", written)
    return tuple(dict.fromkeys([plain if len(plain) <= _LONGEST else written, written, short]))
