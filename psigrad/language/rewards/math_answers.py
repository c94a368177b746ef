"""The reward `math`, which compares a completion's last statement with the row's answer, mathematically."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from psigrad.errors import UserError
from psigrad.language.rewards.golds import accepted, normalise
from psigrad.language.rewards.numeric import Number, equal, find_marked, read_number, unwrap, without_emphasis
from psigrad.language.rollout.scoring import text_of

_LATEX = r"\sqrt |\infty |\pi |\cdot |\times |\cup |\cap |\emptyset |\le |\ge |\pm |\in |^{2}|^{3}|^\circ|-| "
_UNICODE = str.maketrans(dict(zip("√∞π·×∪∩∅≤≥±∈²³°\N{MINUS SIGN}\u00a0", _LATEX.split("|"), strict=True)))
_SPACES = re.compile(r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|(?<!\\)\\[!,;: ]|\\q?quad(?![A-Za-z])|~")
_ROOT = re.compile(r"\\sqrt (\d+|[A-Za-z]|\([^()]*\))")
_FENCED = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$((?:[^$\\]|\\.)+)\$|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]", re.DOTALL)
_ANSWER = re.compile(r"(?i)\banswers?\b\W{0,5}(?:(?:is|are)\b|[:=])\W{0,3}?\s?")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox|operatorname)\s?\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]*\}")
_KNOWN = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|pi|and|or|min|max|gcd|lcm|mod|det"
_WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:{_KNOWN})(?![A-Za-z]))[A-Za-z]{{3,}}")
_SENTENCE = re.compile(r"\n|(?<=[^\d\s])\. |\.\s+(?=[A-Z])")
_BETWEEN = re.compile(r"\s*(?:,|,?\s*and|,?\s*or)\s*")
_SHORT_UNITS = "mm|cm|dm|km|mg|kg|ml|cl|ft|yd|mi|lb|oz|hr|hz|kb|mb|gb|am|pm"
# Numerals in another base, or a date: compared as digits, not as a product or difference.
_DIGITS = re.compile(r"[\dA-Z]+_\{?\d+\}?|0[xX][\da-fA-F]+|\d{4}-\d\d?-\d\d?|\d\d?[/.]\d\d?[/.]\d{4}")
_UNIT = re.compile(
    rf"(?<=[\d}}\])iα-ω])\s*((?:\\(?:text|mathrm|mbox|textbf)\s?\{{[^{{}}]*\}}|\^\{{?\\circ\}}?(?:[ ]?[CF](?![A-Za-z]))?"
    rf"|(?<![\\A-Za-z])(?:(?:{_SHORT_UNITS})(?:/[A-Za-z]{{1,4}})?|m/s)(?![A-Za-z])"
    r"|(?<![\\A-Za-z])[A-Za-z]{3,}(?:[ /][A-Za-z]+)*)(?:\^\{?[23]\}?)?)$",
    re.IGNORECASE,
)
_PROSE = re.compile(
    rf"(?:(?<=\s)|^)(?!(?:{_KNOWN}|{_SHORT_UNITS})(?![A-Za-z]))[A-Za-z]{{2,}}(?:'\w+)?[.,:;!?]?(?=\s|$)", re.IGNORECASE
)
# Two adjacent numbers are not one number, but a parser would multiply or add them.
_TWO_NUMBERS = re.compile(r"(?<![\^_\d.])\d[\d.]*(?:\s+|_\{?)[\d.]")
# Text that takes the parser hours. `_is_small` checks all parsed expressions.
_HUGE = re.compile(r"\\[dt]?binom[^a-z]*\d{4}|\d{4}\s?!|!\s?!")
_LONGEST = 500


@dataclass(frozen=True)
class MathAnswer:
    """A parsed answer, which is a number, words, or LaTeX for math-verify, and the unit after it."""

    latex: str
    number: Number | None = None
    words: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Math:
    r"""A reward of 1 if the completion's answer equals an accepted answer mathematically, otherwise 0.

    The column `answer` holds one answer or a list. Numbers are compared as in `numeric`, words as words, and all else by
    math-verify, which decides if two expressions are equal. The completion's answer is its marked answer (`find_marked`), the
    text after "the answer is", its last LaTeX in delimiters such as $…$, or its last line. Units must agree if both answers have
    one. The reward is None if the row's answer is null or cannot be parsed completely. `check_row` rejects the second case.
    """

    def __call__(self, completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return 1.0, 0.0 or None for each completion."""
        return [self._one(normalise(text_of(c)), a) for c, a in zip(completions, answer, strict=True)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `UserError` for an answer that cannot be compared."""
        for gold in accepted(row.get("answer")):
            if gold_answer(gold) is None:
                raise UserError(f"the answer {gold[:80]!r} cannot be read completely as a number, LaTeX or words")

    def _one(self, text: str, answer: Any) -> float | None:
        golds = [gold for one in accepted(answer) if (gold := gold_answer(one)) is not None]
        return float(any(_matches(gold, text) for gold in golds)) if golds else None


@lru_cache(1 << 16)
def gold_answer(text: str) -> MathAnswer | None:
    r"""Return a row's answer, parsed from its \boxed{…}, the text after its ####, or the whole text.

    Return None if the answer cannot be parsed completely.
    """
    own = find_marked(text)
    gold = _read(text if own is None else own)
    return None if gold is None or not (gold.number or gold.words or _parse(gold.latex) is not None) else gold


def _read(text: str) -> MathAnswer | None:
    """Return a text as an answer, classified by its characters without parsing LaTeX. Return None if it is not an answer."""
    inner = unwrap(text)
    if number := read_number(inner):
        return MathAnswer(inner, number)
    text = _clean(_FENCED.sub(lambda found: next(part for part in found.groups() if part is not None), inner))
    if number := read_number(text):
        return MathAnswer(text, number)
    if _DIGITS.fullmatch(text):
        return MathAnswer(text, words=re.sub(r"[{}]", "", text).casefold())
    bare = _TEXT.sub(r" \1 ", text)
    said = _TEXT.fullmatch(text) or not re.search(r"[\d\\=<>^+*/]", bare)
    if said and (_WORD.search(bare) or bare.strip("( )").isalpha()):
        return MathAnswer(text, words=_fold(bare))
    unit = ""
    if behind := _UNIT.search(text):
        text, unit = text[: behind.start()].strip(), _unit(behind[1])
        if number := read_number(text):
            return MathAnswer(text, number, unit=unit)
    spoiled = (_PROSE, _TWO_NUMBERS, _HUGE)
    if not text or len(text) > _LONGEST or any(pattern.search(text) for pattern in spoiled):
        return None
    if _WORD.search(_ENVIRONMENT.sub("", _TEXT.sub(r" \1 ", text))):
        return None
    return MathAnswer(text, unit=unit)


def _clean(text: str) -> str:
    """Return LaTeX without spacing commands, and with Unicode signs such as √ as LaTeX commands."""
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", text.translate(_UNICODE))
    return _ROOT.sub(r"\\sqrt{\1}", _SPACES.sub(" ", text)).strip().removesuffix(".").strip()


def _fold(text: str) -> str:
    """Return words in lower case, without punctuation at their ends or redundant white space."""
    return " ".join(re.sub(r"[$*`\"]", "", text).split()).strip(" .,;:!()[]").casefold()


def _unit(text: str) -> str:
    r"""Return a normalised unit: cm^2 for cm², \text{ cm}^2 and square cm; degree for °."""
    text = re.sub(r"\^\{?\\circ\}?", " degree", _TEXT.sub(r"\1", text)).casefold()
    text, squares = re.subn(r"\bsq(?:uare|\.)?\s", "", text)
    text, cubes = re.subn(r"\bcubic\s", "", text)
    return re.sub(r"[\s{}.]", "", text).removesuffix("s") + ("^2" if squares else "^3" if cubes else "")


def _same_unit(a: str, b: str) -> bool:
    """Return True if two units could be the same: km matches kilometre, but not cm."""
    (a, power), (b, power_) = (unit.replace("/", "").partition("^")[::2] for unit in (a, b))
    short, long = sorted((a, b), key=len)
    if power != power_:
        return False
    if len(short) > 3:
        return long.startswith(short)
    letters = iter(long)
    return short == long or (len(long) > 3 and short[:1] == long[0] and all(letter in letters for letter in short))


def _last_words(text: str) -> tuple[str, bool]:
    """Return (a completion's last statement, True if it follows "the answer is").

    It is the marked answer, the text after "the answer is", the last LaTeX in delimiters such as $…$, or the last line.
    """
    if (own := find_marked(text)) is not None:
        return own, False
    tails = (text[found.end() :] for found in reversed(list(_ANSWER.finditer(text))))
    tail = next((tail.strip() for tail in tails if re.search(r"\w", tail)), "")
    said = tail or text
    fences = [found for found in _FENCED.finditer(said) if not _PROSE.search(_TEXT.sub("", found[0]))]
    first, last = (0, 0) if tail else (len(fences) - 1, len(fences) - 1)
    while 0 <= last < len(fences) - 1 and _BETWEEN.fullmatch(said, fences[last].end(), fences[last + 1].start()):
        last += 1
    while first > 0 and not tail and _BETWEEN.fullmatch(said, fences[first - 1].end(), fences[first].start()):
        first -= 1
    if fences and not re.search(r"\d", said[: fences[0].start()] if tail else said[fences[-1].end() :]):
        behind = _SENTENCE.split(said[fences[last].end() :], maxsplit=1)[0]
        return said[fences[first].start() : fences[last].end()] + behind, bool(tail)
    lines = [line for line in said.splitlines() if re.search(r"\w", line)]
    if not lines:
        return "", False
    sentences = [part for part in _SENTENCE.split(lines[0 if tail else -1]) if re.search(r"\w", part)]
    if tail:
        return sentences[0], True
    return next((part for part in reversed(sentences) if re.search(r"[\d\\]", part)), sentences[-1]), False


def _matches(gold: MathAnswer, text: str) -> bool:
    said, announced = _last_words(without_emphasis(text))
    if gold.words:
        last = re.split(r"(?i)\b(?:is|are|was|be)\b|[:=]", said)[-1]
        folded = [_fold(_TEXT.sub(r" \1 ", unwrap(piece))) for piece in (said, last)]
        lettered = len(gold.words) == 1 and re.match(rf"\W*{re.escape(gold.words)}\s?[).:]", said.casefold()) is not None
        return lettered or gold.words in [*folded, *(piece.replace("{", "").replace("}", "") for piece in folded)]
    if len(said) > 2 * _LONGEST:
        return False
    found = _trim(said, announced)
    if found is None and "=" in said and "=" not in gold.latex:
        found = _trim(said.rpartition("=")[2], announced)
    if found is None or (gold.unit and found.unit and not _same_unit(gold.unit, found.unit)):
        return False
    if gold.number and "=" in found.latex:
        found = _trim(found.latex.rpartition("=")[2], announced) or found
    if gold.number and found.number:
        return equal(found.number, gold.number)
    if (gold.number and gold.number.parts) or (found.number and found.number.parts):
        return False
    if gold.latex == found.latex:
        return True
    # sympy takes minutes to compare a list of many numbers with a union
    if found.latex.count(",") > 4 + 2 * gold.latex.count(","):
        return False
    from math_verify import verify

    # math-verify's time-outs need SIGALRM in the main thread. The pool kills hanging calls itself, so suppress the warning that
    # they are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    wanted, read = _parse(_latex(gold)), _parse(_latex(found))
    return read is not None and bool(verify([wanted], [read], timeout_seconds=None))


def _trim(said: str, announced: bool) -> MathAnswer | None:
    """Return the answer in `said`, parsed without surrounding words except its unit; None if there is none or it is negated.

    Of several answers, return the last, or the first if they are `announced` by "the answer is".
    """
    said = said.replace("**", "").strip().strip("`")
    if (whole := _read(said)) is not None and not whole.words:
        return whole
    pieces = [piece for piece in _PROSE.split(said) if re.search(r"[\w\\]", piece)]
    if not pieces:
        return None
    piece = pieces[0 if announced else -1]
    start = said.index(piece) if announced else said.rindex(piece)
    if re.search(r"(?i)(?:\bnot|\bnever|n't)\s*$", said[:start]):
        return None
    for text in (said[start:], piece):
        if (found := _read(text.strip(" ,:;"))) is not None and not found.words:
            return found
    return None


def _latex(answer: MathAnswer) -> str:
    """Return unambiguous LaTeX for math-verify: a number such as 1,000 or 1 1/2 becomes an integer or a fraction."""
    number = answer.number
    if number is None:
        return answer.latex
    top, bottom = number.value.as_integer_ratio()
    return (str(top) if bottom == 1 else rf"\frac{{{top}}}{{{bottom}}}") + (r"\%" if number.percent else "")


@lru_cache(1 << 12)
def _parse(latex: str) -> Any:
    """Return math-verify's parse of the complete LaTeX, or None if it cannot parse it or the result is not small."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    form = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False)
    try:
        plain = normalize_latex(latex, form)
        found = latex2sympy(plain, is_real=not should_treat_as_complex(plain), normalization_config=None)
        return found if _is_small(found) else None
    except Exception:  # the parser raises Exception itself, and any other error on malformed text
        return None


def _is_small(expression: Any) -> bool:
    """Return True if the expression is small enough to be evaluated fast.

    A power of numbers can have an exponent up to 999, and a power of a sum one up to 30 and, expanded, 500 terms. A factorial can
    have a number up to 999 as its argument. A sum or product can have up to 1000 terms, or infinitely many.
    """
    from sympy import Add, Basic, Integer, Pow, Product, Sum, factorial, preorder_traversal

    # matrices are not instances of Basic
    for part in (part for part in preorder_traversal(expression) if isinstance(part, Basic)):
        grows = part.args[1] if isinstance(part, Pow) else part.args[0] if isinstance(part, factorial) else Integer(0)
        most = 999 if part.is_number else 30 if isinstance(part, Pow) and isinstance(part.args[0], Add) else None
        if most and grows.is_number and (abs(grows) > most if grows.is_Number else grows.has(Pow, factorial)):
            return False
        if isinstance(part, Pow) and isinstance(part.args[0], Add) and grows.is_Integer:
            others = len(part.args[0].args) - 1
            if math.comb(others + abs(int(grows)), others) > 500:  # the number of terms of a power of a sum
                return False
        ranges = [limit[2] - limit[1] for limit in part.limits if len(limit) == 3] if isinstance(part, Sum | Product) else ()
        if any(length.is_number and length.is_finite and length > 999 for length in ranges):
            return False
    return True
