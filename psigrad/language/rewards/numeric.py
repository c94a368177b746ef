"""Numbers in their usual written forms, and the reward that compares a completion's last number with the answer's."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from psigrad.errors import UserError
from psigrad.language.rewards.golds import accepted
from psigrad.language.rollout.scoring import text_of

_SEPARATOR = r"(?:[,_ '’\u00a0\u2009\u202f]|\{,\}|\\[,:; !])"
_INTEGER = rf"(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d{{1,2}}(?:,\d\d){{1,6}},\d{{3}}(?!\d)|\d+)"
_EXPONENT = r"(?:\^|\*\*)(?:\{([-+]?\d+)\}|([-+]?\d+))"
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
# A sign counts only if it is not a subtraction or hyphen: the last number of "7-5" is 5. A fraction, a power or a time is one
# number: otherwise 3/2 would match 1/2. Repeats are bounded, so that hostile text costs linear time.
_NUMBER = re.compile(
    rf"""((?:(?<![\w.)])[-+]|(?<==[ ])[-+][ ])?) (?:{_CURRENCY}[ ]?(-?))?
    (?: (?:(\d+)[ ]?)? \\[cdt]?frac(?:[ ]?\{{[ ]?(-?{_INTEGER})[ ]?\}}[ ]?\{{[ ]?({_INTEGER})[ ]?\}}|[ ]?(\d)[ ]?(\d))
    |   (\d+(?::\d+){{1,3}})(?![\d:])
    |   (\d+){_EXPONENT}
    |   (?:(\d+)[ ])?(\d+)/(\d+)(?!\w)
    |   ({_INTEGER}(?:\.\d+)?|\.\d+)(?:[eE]([-+]?\d+)|[ ]?(?:\\times|\\cdot|[×x*·])[ ]?10{_EXPONENT}|/({_INTEGER})(?!\w))?
    )(?:[ ]?{_CURRENCY}(?!\d))? ([ ]?(?:\\?%|per[ ]?cent\b))?""",
    re.VERBOSE,
)
_SIGNS = str.maketrans("\N{FRACTION SLASH}\N{MINUS SIGN}\N{EN DASH}", "/--")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_RECURRING = re.compile(r"(\d{1,30})\.(\d{0,30})\\(?:overline|bar)\s?\{(\d{1,30})\}")
# Text that makes a number part of an expression, so that it is not an answer by itself.
_BEFORE = re.compile(r"(?:√|\\sqrt(?:\[\d{0,9}\])?\{?|\^\{?|_\{?|\\log|\\ln)[ ]?$")
_AFTER = re.compile(r"[ ]?(?:\\pi|π|\\sqrt|√|\^(?!\{?\\circ)|\\times|\\cdot|\{?\\[cdt]?frac)")
_WRAPPED = re.compile(r"\$\$(.*)\$\$|\$((?:[^$\\]|\\.)*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s?\{")
# Text between marks of Markdown, but neither the subscript of x_1 nor the power of 2**3.
_EMPHASIS = re.compile(r"(?<![\w\\)\]}])((?<!\*)\*\*+|_+)(?![\s{*_])([^*_\n]+)(?<!\s)\1(?![\w{(])")
_BETWEEN = re.compile(r"[\s$,;.]*(?:and|or)?[\s$,;.]*")
_LARGEST = 400
"""The maximum number of digits, and the largest exponent, of a number that is compared. Larger ones are slow to compute."""


@dataclass(frozen=True)
class Number:
    """A number: its value and whether a percent sign follows it, or the parts of a time or ratio such as 12:30."""

    value: Fraction
    percent: bool = False
    parts: tuple[int, ...] = ()


def equal(found: Number | None, wanted: Number, tolerance: float = 1e-6) -> bool:
    """Return True if two numbers are equal: integers exactly, others within `tolerance` · |wanted|.

    Times and ratios are compared part by part. 50% equals 50%, 0.5 and, since questions ask for "what percent", 50.
    """
    if found is None or found.parts or wanted.parts:
        return found is not None and found.parts == wanted.parts
    if found.percent == wanted.percent:
        return _near(found.value, wanted.value, tolerance)
    of_percent, plain = (found.value, wanted.value) if found.percent else (wanted.value, found.value)
    pairs = [(of_percent, plain), (of_percent / 100, plain)]
    return any(_near(*(pair if found.percent else pair[::-1]), tolerance) for pair in pairs)


def _near(found: Fraction, wanted: Fraction, tolerance: float) -> bool:
    return found == wanted or (wanted.denominator > 1 and abs(found - wanted) <= Fraction(repr(float(tolerance))) * abs(wanted))


@lru_cache(1 << 16)
def read_number(text: str) -> Number | None:
    """Return the number that makes up the whole text; None if there is anything else in it."""
    text = unwrap(_plain(text))
    found = _NUMBER.fullmatch(re.sub(r"^([-+])\s+", r"\1", text).removesuffix("."))
    return None if found is None else _value(found)


def last_number(text: str) -> Number | None:
    """Return the last number in a text, or None if it is part of an expression such as 2√3, whose value differs."""
    text = _plain(text)
    found = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if found is None or _BEFORE.search(text, max(0, found.start() - 20), found.start()) or _AFTER.match(text, found.end()):
        return None
    return _value(found)


def _plain(text: str) -> str:
    """Return the text with plain minus and fraction signs, ½ as 1/2, and recurring decimals as fractions."""
    spelled = _VULGAR.sub(_as_digits, text)
    return _RECURRING.sub(_as_fraction, spelled).translate(_SIGNS).strip()


def _as_digits(found: re.Match[str]) -> str:
    """Return ½ as 1/2, separated from a digit before it."""
    beside = found.string[max(0, found.start() - 1)].isdigit()
    return " " * beside + unicodedata.normalize("NFKC", found[0])


def _as_fraction(found: re.Match[str]) -> str:
    r"""Return a recurring decimal as a fraction: 0.1\overline{6} as 15/90.

    The numerator is all digits minus those that do not recur, here 16 − 1. The denominator has a nine for each recurring digit
    and a zero for each other decimal.
    """
    whole, once, again = found.groups()
    return f"{int(whole + once + again) - int(whole + once)}/{'9' * len(again)}{'0' * len(once)}"


def without_emphasis(text: str) -> str:
    """Return a text without the marks of Markdown in **72** and _72_."""
    return _EMPHASIS.sub(r"\2", text)


def unwrap(text: str) -> str:
    """Return the content of LaTeX marks if they enclose the whole text."""
    text = text.strip().removesuffix(".").strip() if "$" in text or "\\" in text else text.strip()
    found = _WRAPPED.fullmatch(text)
    return text if found is None else next(part for part in found.groups() if part is not None).strip()


def find_marked(text: str) -> str | None:
    r"""Return the marked answer of a text: the content of its last \boxed{…}, or the text after the last ####.

    If the last statement has several \boxed{…}, the last 100 of them are joined by commas. If the text has an <answer>…</answer>,
    only the last one is searched, and its whole content is returned if nothing in it is marked. Return None if there is no mark.
    """
    _, tag, block = text.rpartition("<answer>")
    if tag and "</answer>" in block:
        inner = block.partition("</answer>")[0]
        return inner.strip() if (own := find_marked(inner)) is None else own
    joined, end, at = "", len(text), len(text)
    for _ in range(100):
        start = max(text.rfind("\\boxed", 0, at), text.rfind("\\fbox", 0, at))
        at = start
        opened = _BOX.match(text, start) if start >= 0 else None
        close = _closing(text, opened.end()) if opened else -1
        if opened is None or close < 0 or (joined and not _BETWEEN.fullmatch(text, close + 1, end)):
            break
        joined, end = text[opened.end() : close].strip() + (", " + joined if joined else ""), start
    if joined:
        return joined
    _, mark, rest = text.rpartition("####")
    return rest.strip() if mark else None


def _closing(text: str, at: int) -> int:
    """Return the position of the brace that closes a group opened just before `at`, or -1 if there is none."""
    depth = 1
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if not depth:
            return found.start()
    return -1


def _value(found: re.Match[str]) -> Number | None:
    """Return the number of a match; None if it is invalid, such as 1/0, or too large for exact arithmetic."""
    sign, inner, mixed, top, bottom, a, b, parts, base, *ups, whole, n, d, number, e, ten, ten_, under, percent = found.groups()
    if any(sum(map(str.isdigit, given)) > _LARGEST for given in found.groups() if given):
        return None
    if parts:
        return None if sign or inner or percent else Number(Fraction(0), parts=tuple(map(int, parts.split(":"))))
    power = int(next(filter(None, (*ups, e, ten, ten_)), 0))
    if abs(power) > _LARGEST:
        return None
    if base:
        value = Fraction(int(base)) ** power if power * len(base) <= 2 * _LARGEST and (int(base) or power > 0) else None
    elif number:
        value = _divide(Fraction(_digits(number)) * Fraction(10) ** power, _digits(under or "1"))
    else:
        value = _divide(Fraction(_digits(top or a or n)), _digits(bottom or b or d))
        value = None if value is None else value + int(mixed or whole or 0)
    if value is None:
        return None
    return Number(-value if (sign.strip() == "-") != (inner == "-") else value, bool(percent))


def _divide(above: Fraction, below: str) -> Fraction | None:
    return above / int(below) if int(below) else None


def _digits(text: str) -> str:
    return re.sub(r"[^\d.-]", "", text)


@dataclass(frozen=True)
class Numeric:
    r"""A reward of 1 if the completion's number equals the column `answer`, or one of a list in it; otherwise 0.

    The completion's number is the last one in its last \boxed{…}, otherwise after its last ####, otherwise in the whole text. If
    the completion has an <answer>…</answer>, only the last one is searched. An integer must match exactly, and other numbers
    within `tolerance` times their size. The reward is None if the row's answer is null or is not just a number. `check_row`
    rejects the second case.
    """

    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise UserError(f"numeric: tolerance is {self.tolerance}; it must be 0 or more.")

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return 1.0, 0.0 or None for each completion."""
        return [self._one(text_of(c), a) for c, a in zip(completions, answer, strict=True)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `UserError` for an answer that cannot be compared."""
        for gold in accepted(row.get("answer")):
            if gold_number(gold) is None:
                raise UserError(f"the answer {gold[:80]!r} is no plain number; for expressions, use the reward 'math'")

    def _one(self, text: str, answer: Any) -> float | None:
        wanted = [number for gold in accepted(answer) if (number := gold_number(gold)) is not None]
        if not wanted:
            return None  # the row has no number to compare with: not applicable, and not the policy's fault
        own = find_marked(text := without_emphasis(text))
        found = last_number(text) if own is None else _in_mark(own)
        return float(any(equal(found, number, self.tolerance) for number in wanted))


def gold_number(text: str) -> Number | None:
    """Return the number of an answer, or the marked number of a worked solution; None for anything else."""
    return read_number(text if (own := find_marked(text)) is None else own)


def _in_mark(text: str) -> Number | None:
    """Return the number in a marked answer, after its last equals sign. Words may surround it.

    Return None if it is part of an expression, such as 2√3.
    """
    text = text.rpartition("=")[2]
    beside = _NUMBER.sub("", re.sub(r"\\(?:text|mathrm)\s?\{[^{}]*\}|\^\{?\\circ\}?", "", _plain(text)))
    return read_number(text) or (None if re.search(r"[\d\\*^_√π+/]", beside) else last_number(text))
