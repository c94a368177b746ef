"""Incremental decoding of tokens to text: an incomplete character waits for its rest. Stop strings and calls are never sent."""

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
# The maximal number of tokens decoded together, and how many of them stay as context for the next ones.
_WINDOW, _CONTEXT = 64, 16


@dataclass(frozen=True)
class Offered:
    """The tools of a request: the format of the model's calls, and the schemas of each tool's parameters."""

    form: CallForm
    parameters: Mapping[str, Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The schemas of each tool's arguments as a whole."""
    single: bool = False
    """True if an answer has one call at most: of several, the first."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The strings that a call may begin with."""
        families = [family for family in FAMILIES if self.form.family in ("", family.name)]
        return tuple(family.opens for family in families)

    @property
    def bare(self) -> bool:
        """True if a turn that is a JSON object is a call."""
        return any(family.bare for family in FAMILIES if self.form.family in ("", family.name))


@dataclass
class Writer:
    """The text of one completion."""

    tokenizer: PreTrainedTokenizerBase
    stops: Sequence[str] = ()
    offered: Offered | None = None
    text: str = ""
    """The text so far, up to a stop string."""
    stopped: str = ""
    """The stop string that ended the text."""
    sent: int = 0
    short: bool = False
    """True if calls were left out."""
    _ids: list[int] = field(default_factory=list)
    _shown: int = 0
    """The characters of the window's text that are in `text`."""

    def take(self, ids: Sequence[int]) -> int:
        """Add the next tokens. Return how many are used: those up to the one that completes a stop string."""
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
        """Decode the remaining tokens at the end."""
        self._grow(decode(self.tokenizer, self._ids))

    def news(self) -> str:
        """Return the new text that may be sent."""
        text = self.text[self.sent : max(self.sent, self._safe())]
        self.sent += len(text)
        return text

    def end(self) -> tuple[str, list[ToolCall]]:
        """Return (the unsent text, the calls). A turn whose calls can't be parsed is text."""
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
        """Return the length of the text before any call, partial stop string or partial mark of a call."""
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
    """Return how many characters at the end of the text are a proper prefix of the word."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> list[int] | None:
    """Return the bytes of one token, also of half a character; None if the tokenizer does not give them."""
    text = decode(tokenizer, [token])
    if _HALF not in text:
        return list(text.encode())
    piece = str(tokenizer.convert_ids_to_tokens([token])[0])
    if found := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return [int(found[1], 16)]
    letters = [_BYTES.get(letter, -1) for letter in piece]
    return None if -1 in letters else letters


def _byte_letters() -> dict[str, int]:
    """Return the letters by which byte-level vocabularies write bytes (GPT-2): printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
