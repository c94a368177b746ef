"""IFEval: the 25 kinds of instructions that a program can verify.

Source: Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models", arXiv:2311.07911.

A row has the published columns: `instruction_id_list`, and `kwargs` with one mapping of parameters for each of them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from psigrad import extras
from psigrad.errors import UserError, nearest
from psigrad.language.rollout.scoring import text_of

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATION = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|st|sr|jr|vs|inc|ltd|co|e\.g|i\.e|a\.m|p\.m|u\.s)|(?<![^\s.('\"])[a-z])\.$", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?。！？]+[\"'”’)\]]*(?=\s|$)|[。！？]+")


@dataclass(frozen=True)
class IFEval:
    """A reward of 1 if the completion follows every instruction of its row, else 0; None if the row has no instruction.

    The instructions are in the published columns `instruction_id_list` and `kwargs`. Before the first step, an unknown kind or a
    missing parameter raises an error that names the row. Instructions about the language need the package py3langid.
    """

    loose: bool = False
    """Also accept the completion without its first line, its last line, or both, and all of these without asterisks. An
    introduction such as "Sure, here it is:" or bold text then does no harm."""
    share: bool = False
    """True to return the share of followed instructions, instead of 1 only if all are followed."""

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return 1.0, 0.0, a share, or None for each completion."""
        ids, kwargs = (columns.get(name) or [None] * len(completions) for name in ("instruction_id_list", "kwargs"))
        return [self._one(text_of(c), i, k) for c, i, k in zip(completions, ids, kwargs, strict=True)]

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `UserError` for instructions that cannot be verified."""
        kinds = {kind for kind, _ in _instructions(row.get("instruction_id_list"), row.get("kwargs"))}
        if kinds & {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}:
            _identify()

    def _one(self, text: str, ids: Any, kwargs: Any) -> float | None:
        asked = _instructions(ids, kwargs)
        if not asked:
            return None
        forms = loosened(text) if self.loose else [text]
        followed = [any(form.strip() and KINDS[kind](form, **given) for form in forms) for kind, given in asked]
        return sum(followed) / len(followed) if self.share else float(all(followed))


def loosened(text: str) -> list[str]:
    """Return variants of a completion: as it is, without its first or last line or both, and each of these without asterisks."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return cut + [form.replace("*", "") for form in cut]


def _instructions(ids: Any, kwargs: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return (kind, parameters) of each instruction. Raises `UserError` if one is unknown or lacks a parameter."""
    ids = [] if ids is None else list(ids)
    given = [{}] * len(ids) if kwargs is None else list(kwargs)
    if len(ids) != len(given):
        raise UserError(f"instruction_id_list has {len(ids)} entries and kwargs has {len(given)}; expected equal numbers")
    return [(kind, _parameters(kind, one or {})) for kind, one in zip(ids, given, strict=True)]


def _parameters(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    if kind not in KINDS:
        raise UserError(f"there is no instruction {kind!r}{nearest(str(kind), KINDS) or '; expected one of ' + ', '.join(KINDS)}")
    known = list(inspect.signature(KINDS[kind]).parameters)[1:]
    given = {name: value for name, value in given.items() if value is not None}
    if set(given) != set(known):
        what = f"{', '.join(given) or 'none'}; expected {', '.join(known) or 'none'}"
        raise UserError(f"the instruction {kind} got the parameters {what}")
    return {name: _read(kind, name, value) for name, value in given.items()}


def _read(kind: str, name: str, value: Any) -> Any:
    """Return a parameter's value in the type that the parameter has. Raises `UserError` for another type."""
    read: Callable[[Any], Any]
    if name.startswith(("num_", "nth_")) or name.endswith("frequency"):
        ok, expected, read = isinstance(value, int | float) and value == int(value) >= 0, "a whole number", int
    elif name.endswith("relation"):
        ok, expected, read = value in ("less than", "at least"), "'less than' or 'at least'", str
    elif name in ("keywords", "forbidden_words"):
        ok, expected, read = not isinstance(value, str) and all(isinstance(x, str) and x for x in value), "a list of words", list
    else:
        ok, expected, read = isinstance(value, str) and bool(value.strip()), "a text", str.strip
    if not ok:
        raise UserError(f"the instruction {kind} has {name} {value!r}; expected {expected}")
    return read(value)


def _compare(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def _found(words: Iterable[str], text: str, around: str = "") -> list[bool]:
    return [re.search(f"{around}{re.escape(word)}{around}", text, re.IGNORECASE) is not None for word in words]


def sentences(text: str) -> list[str]:
    """Return the sentences of a text.

    A sentence ends with a full stop, an exclamation mark or a question mark before a space, but not after a common abbreviation
    or an initial. An empty line between paragraphs ends one too.
    """
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        start = 0
        for end in _SENTENCE_END.finditer(block):
            if not _ABBREVIATION.search(block[start : end.end()]) or end.end() == len(block.rstrip()):
                found.append(block[start : end.end()].strip())
                start = end.end()
        found.append(block[start:].strip())
    return [one for one in found if re.search(r"\w", one)]


@cache
def _identify() -> Callable[[str], tuple[str, float]]:
    with extras.needing("An instruction about a language", "ifeval"):
        import py3langid
    classify: Callable[[str], tuple[str, float]] = py3langid.classify
    return classify


def _language_of(text: str) -> str:
    """Return the ISO 639-1 code of a text's language, or "" if it has no letter."""
    identify = _identify()
    return identify(text.lower())[0] if any(map(str.isalpha, text)) else ""


def _in_language(text: str, language: str) -> bool:
    return _language_of(text) in ("", "zxx", language)


def _divided(text: str, divider: str) -> list[str] | None:
    """Return the parts of a text between dividers, or None if a part between two dividers is empty."""
    parts = re.split(divider, text)
    inner = parts[1:-1]
    return [p for p in parts if p.strip()] if all(p.strip() for p in inner) else None


def _highlights(text: str, num_highlights: int) -> bool:
    marked = [*re.findall(r"\*([^\n*]*)\*", text), *re.findall(r"\*\*([^\n*]*)\*\*", text)]
    return sum(bool(one.strip()) for one in marked) >= num_highlights


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-)", text, re.MULTILINE)) == num_bullets


def _json(text: str) -> bool:
    inner = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(inner)
    except (ValueError, RecursionError):
        return False
    return True


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if not 1 <= nth_paragraph <= count or not (chosen := parts[nth_paragraph - 1].strip()):
        return False
    word = chosen.split()[0].lstrip("'\"").lower()
    return count == num_paragraphs and "".join(takewhile(lambda c: c not in ".,?!'\"", word)) == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    spaced = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    return re.search(spaced.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower()) is not None


def _two_responses(text: str) -> bool:
    parts = _divided(text, r"\*{6}")
    return parts is not None and len(parts) == 2 and parts[0].strip() != parts[1].strip()


def _capital_words(text: str) -> int:
    """Return the number of words in capitals, counted as in the published checker: DON'T is two words, a hyphenated word one."""
    parted = re.sub(r"(n't|'(?:s|m|d|ll|re|ve))\b", r" \1", text, flags=re.IGNORECASE)
    return sum(map(str.isupper, re.findall(r"[^\s,;:?!()\[\]{}<>\"]+", parted)))


KINDS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_found(keywords, text)),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(
        len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: not any(_found(forbidden_words, text, r"\b")),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda text, language: _in_language(text, language),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compare(
        len(sentences(text)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: len(_divided(text, r"\*\*\*") or ()) == num_paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: _compare(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[.*?\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text: any(answer in text for answer in _ANSWERS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text: any(one.lstrip("<").rstrip(">").strip() for one in re.findall(r"<<[^\n]+>>", text)),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: text.strip().lower().startswith(prompt_to_repeat.lower()),
    "startend:end_checker": lambda text, end_phrase: text.strip().strip('"').lower().endswith(end_phrase.lower()),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _compare(
        _capital_words(text), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper() and _in_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _in_language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
}
