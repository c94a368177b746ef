"""Typed Python functions as tools: offered through the chat template, called by the policy, answered in a turn of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError, validate_call

from psigrad.errors import UserError
from psigrad.language.rollout.episodes.environments import Message, Step

# The form of Hermes and Qwen templates; others write the bare object.
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
Tool = Callable[..., Any]


def schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """JSON schemas of the tools for a dataset row's `tools` column. Raises `UserError` for one without types or docstring."""
    from transformers.utils import get_json_schema

    made = []
    for tool in tools:
        try:
            made.append(get_json_schema(tool))
        except Exception as error:  # transformers has several exception types for one mistake
            raise UserError(
                f"The tool {getattr(tool, '__name__', tool)!r} cannot be offered ({error}); give it type hints, a docstring and "
                "an Args section with a line for each argument."
            ) from error
    return made


class ToolBox:
    """An environment that runs the tools that a completion calls; a completion without a call ends the episode.

    A call is {"name": …, "arguments": {…}} in <tool_call> tags, or bare. Arguments are checked against the type hints; a mistake
    is the tool's answer, not the end. The reward comes from reward functions, which see the whole conversation.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.__name__: validate_call(tool) for tool in tools}

    def reset(self, row: Mapping[str, Any]) -> None:
        """Nothing to prepare."""

    def step(self, completion: str) -> Step:
        """Answer every call of the completion."""
        found = calls(completion)
        if not found:
            return Step("", 0.0, True)
        return Step([self._answer(call) for call in found], 0.0, False)

    def _answer(self, call: Mapping[str, Any]) -> Message:
        name, arguments = call.get("name"), call.get("arguments", {})
        if name not in self.tools:
            content = f"error: there is no tool {name!r}; expected {', '.join(self.tools)}"
        elif not isinstance(arguments, Mapping):
            content = f"error: the arguments of {name} are no object"
        else:
            content = self._run_tool(name, arguments)
        return {"role": "tool", "name": str(name), "content": content}

    def _run_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            return str(self.tools[name](**arguments))
        except ValidationError as error:
            first = error.errors()[0]
            return f"error: {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        except Exception as error:  # whatever a tool raises is an answer that the policy can learn from
            return f"error: {type(error).__name__}: {error}"


def calls(completion: str) -> list[dict[str, Any]]:
    """The tool calls of a completion, in order; what is no JSON object is no call."""
    texts = _CALL.findall(completion) or [completion]
    made = []
    for text in texts:
        try:
            call = json.loads(text)
        except ValueError:
            continue
        if isinstance(call, dict) and "name" in call:
            made.append(call)
    return made
