"""Incremental decoding of tokens to text. Incomplete characters are held back; stop strings and tool calls are never sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psigrad.language.data.templates import decode
from psigrad.language.episodes.tool_calls import FAMILIES, ToolCall
from psigrad.language.episodes.tools import CallForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF = "\ufffd"
# The maximum number of tokens to decode together, and how many of them stay as context for the next ones.
_WINDOW, _CONTEXT = 64, 16


@dataclass(frozen=True)
class Offered:
    """The tools of a request: the model's tool-call syntax, and each tool's JSON schemas."""

    form: CallForm
    parameters: Mapping[str, Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tool -> the schema of the object of all its arguments. `parameters` has the schema of each argument instead."""
    single: bool = False
    """True if an answer may have only one call. Of several, the first is sent."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The strings with which a tool call may begin."""
        families = [family for family in FAMILIES if self.form.family in ("", family.name)]
        return tuple(family.opens for family in families)

    @property
    def bare(self) -> bool:
        """True if a turn that is only a JSON object, without marks, is a tool call."""
        return any(family.bare for family in FAMILIES if self.form.family in ("", family.name))


@dataclass
class Writer:
    """The decoder of one completion, which collects its text and releases the part that may be sent."""

    tokenizer: PreTrainedTokenizerBase
    stops: Sequence[str] = ()
    offered: Offered | None = None
    text: str = ""
    """The text so far, without a stop string and what follows it."""
    stopped: str = ""
    """The stop string that ended the text."""
    sent: int = 0
    short: bool = False
    """True if the answer has fewer calls than the model wrote."""
    _ids: list[int] = field(default_factory=list)
    _shown: int = 0
    """The number of characters of the decoded `_ids` that are already in `text`."""

    def take(self, ids: Sequence[int]) -> int:
        """Decode the next tokens. Return how many belong to the completion: all, or those up to the end of a stop string."""
        if not self.stops:
            self._take(ids)
            return len(ids)
        for i, token in enumerate(ids):
            self._take([token])
            if self.stopped:
                return i + 1
        return len(ids)

    def _take(self, ids: Sequence[int]) -> None:
        self._ids += ids
        self._grow(decode(self.tokenizer, self._ids).rstrip(_HALF))
        if len(self._ids) > _WINDOW:
            window = decode(self.tokenizer, self._ids)
            if not window.endswith(_HALF) or len(self._ids) > 4 * _WINDOW:
                self._grow(window)
                self._ids = self._ids[-_CONTEXT:]
                self._shown = len(decode(self.tokenizer, self._ids))

    def flush(self) -> None:
        """Decode the tokens that were held back as an incomplete character, at the end of the completion."""
        self._grow(decode(self.tokenizer, self._ids))

    def news(self) -> str:
        """Return the text that may be sent and was not returned before."""
        text = self.text[self.sent : max(self.sent, self._safe())]
        self.sent += len(text)
        return text

    def end(self) -> tuple[str, list[ToolCall]]:
        """Return (the unsent text, the tool calls) at the end. If a call can't be parsed, all of the turn is text."""
        read = [] if self.offered is None else self.offered.form.read(self.text, self.offered.parameters)
        calls = [call for call in read if isinstance(call, ToolCall)]
        if not calls or len(calls) < len(read):
            return self.text[self.sent :], []
        assert self.offered is not None
        begun = self.offered.form.begin(self.text)
        if begun < self.sent:  # a call without a mark
            begun = self.sent if self.sent else len(self.text) - len(self.text.lstrip())
        self.short = self.offered.single and len(calls) > 1
        return self.text[self.sent : begun].rstrip(), calls[:1] if self.short else calls

    def _grow(self, window: str) -> None:
        new = window[self._shown :]
        if not new or self.stopped:
            return
        self._shown, before = len(window), len(self.text)
        self.text += new
        found = [(at, stop) for stop in self.stops if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            at, self.stopped = min(found)
            self.text = self.text[:at]

    def _safe(self) -> int:
        """Return the length of the text that may be sent: before any call, and before a partial stop string or mark."""
        marks = () if self.offered is None else self.offered.marks
        if self.offered is not None:
            if self.offered.form.response_template is not None or (
                self.offered.bare and self.text.lstrip()[:1] in ("{", "[", "")
            ):
                return 0
            if (begun := self._first_mark()) < len(self.text):
                return len(self.text[:begun].rstrip())
        if self.stopped:
            return len(self.text)
        longest = max((overlap(self.text, word) for word in (*self.stops, *marks)), default=0)
        safe = len(self.text) - longest
        # White space before a call is dropped.
        return len(self.text[:safe].rstrip()) if marks else safe

    def _first_mark(self) -> int:
        assert self.offered is not None
        places = [at for mark in self.offered.marks if (at := self.text.find(mark)) >= 0]
        return min(places, default=len(self.text))


def overlap(text: str, word: str) -> int:
    """Return the length of the longest proper prefix of the word with which the text ends."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> list[int] | None:
    """Return the bytes of one token, which may be a part of a character; None if the tokenizer does not have them."""
    text = decode(tokenizer, [token])
    if _HALF not in text:
        return list(text.encode())
    piece = str(tokenizer.convert_ids_to_tokens([token])[0])
    if found := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return [int(found[1], 16)]
    letters = [_BYTES.get(letter, -1) for letter in piece]
    return None if -1 in letters else letters


def _byte_letters() -> dict[str, int]:
    """Return letter -> byte for the letters that byte-level vocabularies (GPT-2) use for bytes.

    Printable bytes are their own letters.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
