"""Constraints on sampling: penalties, biases, and a grammar of the answer, for JSON or a tool call.

llguidance returns the tokens that the grammar allows at each position. A token is drawn from the policy's distribution over these
tokens.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from psigrad import extras
from psigrad.language.episodes.tool_calls import FAMILIES
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.types import DrawnToken
from psigrad_serve.api_errors import ApiError
from psigrad_serve.engine.streams import Steer

if TYPE_CHECKING:
    from psigrad_serve.writer import Offered

# The style in which models write JSON. Unlimited white space would be valid JSON too.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Calls can be forced only in a syntax in whose example the arguments are JSON.
_SHOWN = re.compile(r'(.*?)\badd\b(.*?)\{"a": 1\}(.*)', re.DOTALL)


@dataclass(frozen=True)
class Wish:
    """A request's constraints on sampling, which change the logits l_j before the temperature is applied.

    Formula: l_j + bias_j - frequency · c_j - presence · [c_j > 0], with c_j the number of times that token j was drawn, as OpenAI
    defines it.
    """

    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str = ""
    """The grammar of the answer, in llguidance's format; "" if any answer is allowed."""

    def __bool__(self) -> bool:
        return bool(self.frequency or self.presence or self.bias or self.grammar)

    def steer(self, forms: Forms) -> Steer:
        """Return the function that changes the logits of one completion, for `SamplingEngine.submit`."""
        counts: Counter[int] = Counter()
        matcher = forms.matcher(self.grammar) if self.grammar else None

        def steer(logits: Tensor, drawn: Sequence[DrawnToken]) -> Tensor:
            counts.update(token.id for token in drawn[-1:])
            for token, bias in self.bias.items():
                logits[token] += bias
            for token, count in counts.items():
                logits[token] -= self.frequency * count + self.presence
            if matcher is None:
                return logits
            for last in drawn[-1:]:
                matcher.consume_token(last.id)
            allowed = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
            if matcher.is_error():
                raise ApiError(f"The completion cannot follow the requested format: {_reason(matcher.get_error())}", status=500)
            bits = (allowed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
            mask = torch.nn.functional.pad(bits.flatten().bool()[: len(logits)], (0, max(0, len(logits) - 8 * len(allowed))))
            return logits.masked_fill(~mask.to(logits.device), -torch.inf)

        return steer


class Forms:
    """A compiler of grammars for the vocabulary of one model."""

    def __init__(self, model: LanguageModel) -> None:
        self._model, self._lock = model, threading.Lock()
        self._known: Any = None

    def matcher(self, grammar: str) -> Any:
        """Return llguidance's matcher for one completion, which computes the tokens that the grammar allows next."""
        from llguidance import LLMatcher

        return LLMatcher(self._tokens(), grammar, log_level=0)

    def check(self, grammar: str, param: str) -> None:
        """Raise `ApiError` if the grammar from the field `param` is invalid."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            said = str(extras.not_installed(param, error, "serve"))
            raise ApiError(said, param=param, code="unsupported_parameter") from None
        wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens())
        if wrong:
            raise ApiError(f"Invalid value for {param!r}: {_reason(messages[0])}", param=param, code="invalid_value")
        matcher = self.matcher(grammar)
        matcher.compute_bitmask()
        if matcher.is_error():  # valid, but no text matches it, such as a schema that is only a reference to itself
            why = f"Invalid value for {param!r}: no answer can have this format ({_reason(matcher.get_error())[:-1]})."
            raise ApiError(why, param=param, code="invalid_value")

    def _tokens(self) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._known is None:
                ends = sorted(self._model.eos_token_ids)
                tokenizer: Any = self._model.tokenizer
                self._known = from_tokenizer(tokenizer, self._model.vocabulary, ends)
            return self._known


def _reason(error: str) -> str:
    """Return the first sentence of llguidance's error message, without the parser's state that may follow it."""
    sentence = re.split(r"\n|<state>", error.strip())[0].rstrip(". ")
    return f"{sentence[:200]}."


def json_grammar(response_format: Any, param: str) -> str:
    """Return the grammar of OpenAI's `response_format`, or of the responses API's `format`; "" if that is text."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is None or kind == "text":
        return ""
    if kind == "json_object":
        return _lark(f"%json {json.dumps({'type': 'object', 'x-guidance': _WRITTEN})}")
    if kind != "json_schema":
        raise ApiError(
            f"{param} is {json.dumps(response_format)[:80]}; expected the type text, json_object or json_schema.",
            param=param, code="invalid_value",
        )  # fmt: skip
    held = response_format.get("json_schema", response_format)
    schema = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(f"{param} has no schema; add one.", param=param, code="missing_required_parameter")
    return _lark(f"%json {json.dumps({**schema, 'x-guidance': _WRITTEN})}")


def chosen_tool(choice: Any) -> str | None:
    """Return the name of the tool that `tool_choice` forces in any API, "" if any tool will do, or None if no call is forced."""
    if isinstance(choice, dict):
        choice = {name: value for name, value in choice.items() if name != "disable_parallel_tool_use"}
    if choice in (None, "auto", "none", {"type": "auto"}, {"type": "none"}):
        return None
    if choice in ("required", {"type": "any"}):
        return ""
    named = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") in ("function", "tool") else None
    if isinstance(named, dict) and isinstance(named.get("name"), str):
        return str(named["name"])
    raise ApiError(
        f'tool_choice is {json.dumps(choice)[:80]}; expected "auto", "none", "required", or an object that names a tool.',
        param="tool_choice", code="invalid_value",
    )  # fmt: skip


def call_grammar(offered: Offered | None, name: str, added: Mapping[str, int]) -> str:
    """Return the grammar of one call of the tool `name`, or of any tool if that is "", in the model's tool-call syntax.

    `added` has the added tokens, which stand for whole words such as <tool_call>. The grammar allows these words only as these
    tokens.
    """
    if offered is None or (name and name not in offered.schemas):
        there = "no tools" if offered is None else ", ".join(offered.schemas)
        raise ApiError(
            f"tool_choice forces {name or 'a call'!r}, but the request offers {there}.", param="tool_choice", code="invalid_value"
        )
    family = next(one for one in FAMILIES if one.name == (offered.form.family or "Hermes"))
    form = None if offered.form.response_template is not None else _SHOWN.fullmatch(family.shown)
    if form is None:
        raise ApiError(
            f"tool_choice cannot force a call in this model's format ({family.name}); give auto or none.",
            param="tool_choice", code="unsupported_parameter",
        )  # fmt: skip
    opens, between, closes = form.groups()
    calls = [
        " ".join(
            (
                *_words(f"{family.lead}{family.opens}{opens}{tool}{between}", added),
                f"%json {json.dumps({**schema, 'x-guidance': _WRITTEN})}",
                *_words(f"{closes}{family.closes}", added),
            )
        )
        for tool, schema in offered.schemas.items()
        if name in ("", tool)
    ]
    return _lark("\n | ".join(calls))


def _lark(rule: str) -> str:
    return f"%llguidance {{}}\nstart: {rule}\n"


def _words(text: str, added: Mapping[str, int]) -> Iterator[str]:
    """Yield the parts of a text in the grammar's syntax: text in quotes, and added tokens by their ids."""
    known = sorted(filter(None, added), key=len, reverse=True)
    for part in re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]:
        if part:
            yield f"<[{added[part]}]>" if part in added else json.dumps(part)
