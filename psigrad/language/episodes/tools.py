"""Tools that the policy may call, offered through the chat template: typed Python functions and the tools of MCP servers.

Each call gets its own answer. The policy's mistakes are reported in the answer and never end the episode or the run.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError, validate_call

from psigrad import extras
from psigrad.errors import UserError
from psigrad.importing import imported_callable
from psigrad.language.data.chat.turns import Conversation, TurnForm
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.image_rows import has_parts, is_image
from psigrad.language.data.templates import decode
from psigrad.language.episodes.environments import Message, Step
from psigrad.language.episodes.tool_calls import (
    FAMILIES,
    BrokenCall,
    CallError,
    ToolCall,
    find_families,
    read_calls,
    to_calls,
)
from psigrad.language.examples import common_prefix
from psigrad.language.rewards.reward_worker import finish
from psigrad.processes.workers.shipping import pick_variables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX = "mcp:"


class ServerLost(Exception):
    """An error for a server that gives no answer, for which the policy is not at fault."""


class ServerTool(ABC):
    """One tool of a server (psigrad_extras/connect/mcp_tools.py)."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema that the chat template writes into the prompt."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of each parameter, by the parameter's name."""
        properties: Mapping[str, Any] = self.schema["function"]["parameters"].get("properties", {})
        return properties

    @abstractmethod
    def connect(self) -> Any:
        """Return this process's connection to the server, and open it if there is none. Raises `UserError` if that fails."""

    @abstractmethod
    def run(self, arguments: Mapping[str, Any]) -> str:
        """Call the tool and return the server's answer. Raises `ServerLost` if there is none."""


Tool = Callable[..., Any] | ServerTool
# A call that reveals how a template writes calls: text with quotes, a number, an object.
PROBE = ToolCall("find_price", {"item": 'a "fine" <pen>', "count": 3, "options": {"colours": ["red", None], "gift": True}})
_KINDS = {"item": {"type": "string"}, "count": {"type": "integer"}, "options": {"type": "object"}}
_PROBE_SCHEMA = {"name": PROBE.name, "description": "The price.", "parameters": {"type": "object", "properties": _KINDS}}


def resolve(tools: Sequence[str | Callable[..., Any]], variables: Sequence[str] = ()) -> list[Tool]:
    """Return the tools that a setting names.

    An item is a function, "module:function", or "mcp:COMMAND" or "mcp:http://…" for all tools of a server. `variables` are names
    of environment variables that a server receives besides the defaults. Raises `UserError` for other items and for equal names.
    """
    found: list[Tool] = []
    for tool in tools:
        if isinstance(tool, str) and tool.startswith(PREFIX):
            found += extras.load("mcp").list_tools(
                tool.removeprefix(PREFIX).strip(), tuple(sorted(pick_variables(variables).items()))
            )
        else:
            found.append(imported_callable(tool, "tool") if isinstance(tool, str) else tool)
    names = [name_of(tool) for tool in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"Two tools are named {twice!r}; rename one, since a call gives only the name.")
    return found


def name_of(tool: Tool) -> str:
    """Return the name by which the policy calls the tool."""
    return tool.name if isinstance(tool, ServerTool) else str(getattr(tool, "__name__", tool))


def schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools' JSON schemas for a row's `tools` column. Raises `UserError` for a tool without types or a docstring."""
    from transformers.utils import get_json_schema

    made = []
    for tool in tools:
        try:
            made.append(dict(tool.schema) if isinstance(tool, ServerTool) else get_json_schema(tool))
        except Exception as error:  # transformers raises several exception types for one mistake
            raise UserError(
                f"The tool {name_of(tool)!r} cannot be offered ({error}); give it type hints, a docstring and "
                "an Args section with a line for each argument."
            ) from error
    return made


@dataclass(frozen=True)
class CallForm:
    """The syntax in which the model writes calls. With neither a family nor a response template, each known syntax is tried."""

    family: str = ""
    response_template: Mapping[str, Any] | None = None
    """The tokenizer's response template, for transformers' `parse_response`."""
    prefix: str = ""
    """The end of the prompt, which `parse_response` reads before the policy's text."""
    seen: str = ""
    """The rendered call from which the syntax was determined, as rewards and tools read it; empty if the template writes none."""

    def probe(self, text: str) -> list[ToolCall | BrokenCall]:
        """Return the calls in a text that should call the tool `PROBE`, to test whether this syntax reads it."""
        return self.read(text, {PROBE.name: _KINDS})

    def read(self, text: str, parameters: Mapping[str, Mapping[str, Any]]) -> list[ToolCall | BrokenCall]:
        """Return the calls of a turn."""
        if self.response_template is None:
            return read_calls(text, parameters, [family for family in FAMILIES if family.name == self.family])
        from transformers.utils.chat_parsing import parse_response

        offered: list[Any] = [
            {"type": "function", "function": {"name": n, "parameters": {"properties": p}}} for n, p in parameters.items()
        ]
        try:
            said = parse_response(text, dict(self.response_template), prefix=self.prefix, tools=offered)
            return list(to_calls(said.get("tool_calls") or []))
        except CallError as error:
            return [BrokenCall(f"{error}; write a call as {self.seen}")]
        except Exception as error:  # a response template is a program and can raise anything
            return [BrokenCall(f"the call cannot be read ({str(error).splitlines()[0][:200]}); write one as {self.seen}")]

    def begin(self, text: str) -> int:
        """Return the position at which a turn's calls start: the first mark after the thinking.

        Without a mark, return the position at which the thinking ends.
        """
        families = [family for family in FAMILIES if self.family in ("", family.name)]
        ends = (at + len(family.thought) for family in families if (at := text.rfind(family.thought)) >= 0)
        start = max(ends, default=0)
        places = [(at, family) for family in families if (at := text.find(family.opens, start)) >= 0]
        if not places:
            return start
        at, family = min(places, key=lambda place: place[0])
        # DeepSeek writes one more mark around the list of all calls.
        leads = (self.seen.partition(family.opens)[0].rpartition(family.thought)[2], family.lead)
        return at - next((len(lead) for lead in leads if lead and text[:at].endswith(lead)), 0)

    def end(self, text: str) -> int:
        """Return the position at which the last call ends: after its mark, or the end of the text if there is no mark."""
        ends = {family.closes for family in FAMILIES if self.family in ("", family.name)} - {""}
        return max((at + len(mark) for mark in ends if (at := text.rfind(mark)) >= 0), default=len(text))

    def turn(self, text: str, parameters: Mapping[str, Mapping[str, Any]], form: TurnForm) -> Message | None:
        """Return a turn with calls as a message with `tool_calls`; None if there is no call or one is malformed."""
        calls = self.read(text, parameters)
        if not calls or any(isinstance(call, BrokenCall) for call in calls):
            return None
        said = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]  # type: ignore[union-attr]
        before = form.read_back(text[: self.begin(text)])
        parts = (
            before["content"].rstrip(),
            text[self.end(text) :].removesuffix(form.content_end).strip() if form.content_end else "",
        )
        return {**before, "content": "\n".join(filter(None, parts)), "tool_calls": said}


def call_form_of(tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> CallForm:
    """Return the syntax of calls under the tokenizer's chat template: the one that parses a rendered call back exactly.

    If a template offers no tools or writes no calls, psigrad writes them in Hermes' syntax. If the vocabulary then has the marks
    of any syntax, the model may use that one, so each call is parsed by the marks around it. `arguments` are those of the
    template.
    """
    before, seen, shows_hermes = _play(tokenizer, arguments)
    own = getattr(tokenizer, "response_template", None)
    written = [CallForm("", own, before, seen)] if own else []
    written += [CallForm(family.name, seen=seen) for family in find_families(seen) if seen]
    exact = [form for form in written if form.probe(seen) == [PROBE]]
    if shows_hermes and any(family.opens in tokenizer.get_added_vocab() for family in FAMILIES):
        return CallForm(seen=seen)
    return next(iter(exact), CallForm(seen=seen))


def _play(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Render a test conversation. Return (the prompt with a question, the next turn, which calls a tool, a flag).

    The flag is True if psigrad itself offers tools or writes calls, because the template does not.
    """
    question: Message = {"role": "user", "content": "What is the price?"}
    call = {"type": "function", "id": "call00001", "function": {"name": PROBE.name, "arguments": PROBE.arguments}}
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    offered = {"tools": [{"type": "function", "function": _PROBE_SCHEMA}], "chat_template_kwargs": arguments}
    try:
        conversation = Conversation(tokenizer, Row("a test conversation", columns=offered))
        before, after = conversation.render([question], generation_prompt=True), conversation.render([question, turn])
    except UserError:  # no template, or one that rejects calls
        return "", "", False
    shared = common_prefix(before, after)
    # <think> and <tool_call> start with the same letters, so the common prefix may end inside a tag.
    mark = re.search(r"[<\[][^<>\[\]\s]*$", before[:shared])
    seen = decode(tokenizer, tokenizer(after[mark.start() if mark else shared :], add_special_tokens=False)["input_ids"])
    shows_hermes = conversation.dialect.calls == "hermes" or not conversation.dialect.tools
    return (before, seen, shows_hermes) if PROBE.name in seen else ("", "", False)


@dataclass(frozen=True)
class ToolBoxes:
    """The factory of a run's `ToolBox` environments."""

    tools: Sequence[Tool]
    form: CallForm = field(default_factory=CallForm)

    def prepare(self) -> None:
        """Connect to the servers of all tools in advance, since that can take longer than the time limit of a call."""
        for tool in self.tools:
            if isinstance(tool, ServerTool):
                tool.connect()

    def __call__(self) -> ToolBox:
        """Return a new environment, for one episode."""
        return ToolBox(self.tools, self.form)


class ToolBox:
    """An environment that runs the tools that a completion calls. A completion without a call ends the episode.

    Arguments are checked against the type hints. The reward comes from reward functions, which see the whole conversation.
    """

    def __init__(self, tools: Sequence[Tool], form: CallForm | None = None) -> None:
        self.form = form or CallForm()
        self.tools = {name_of(tool): tool if isinstance(tool, ServerTool) else validate_call(tool) for tool in tools}
        self.parameters = {name_of(tool): _parameters_of(tool) for tool in tools}

    def reset(self, row: Mapping[str, Any]) -> None:
        """Do nothing: there is nothing to prepare."""

    def step(self, completion: str) -> Step:
        """Run every call of the completion and return the answers. Without a call, the episode is done."""
        found = self.form.read(completion, self.parameters)
        return Step([self._answer(call) for call in found], 0.0, False) if found else Step("", 0.0, True)

    def _answer(self, call: ToolCall | BrokenCall) -> Message:
        if isinstance(call, BrokenCall):
            return {"role": "tool", "name": "error", "content": f"error: {call.reason}"}
        if call.name in self.tools:
            content = self._run_tool(call.name, call.arguments)
        else:
            content = f"error: there is no tool {call.name[:80]!r}; expected {', '.join(self.tools)}"
        return {"role": "tool", "name": call.name[:80], "content": content}

    def _run_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the answer as text, or as content parts if it has images."""
        tool = self.tools[name]
        try:
            made = tool.run(arguments) if isinstance(tool, ServerTool) else tool(**arguments)
            made = finish(made) if inspect.isawaitable(made) else made
            parts = made if isinstance(made, list) else [made]
            return made if any(map(is_image, parts)) and has_parts(made) else str(made)
        except ServerLost:  # not the policy's fault, so the episode is unscored
            raise
        except ValidationError as error:
            first = error.errors()[0]
            return f"error: {name}: {'.'.join(map(str, first['loc']))[:80]}: {first['msg']}"
        except Exception as error:  # any exception of a tool becomes an answer that the policy can learn from
            return f"error: {type(error).__name__}: {error}"


def _parameters_of(tool: Tool) -> Mapping[str, Any]:
    if isinstance(tool, ServerTool):
        return tool.parameters
    try:
        function: Any = tool
        return dict(TypeAdapter(function).json_schema().get("properties", {}))
    except Exception:  # JSON schemas cannot express some types; unquoted values are then read as JSON
        return {}
