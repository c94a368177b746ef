"""A conversation on the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TextIO

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad_serve.api_errors import ApiError
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Served


def talk(
    engine: SamplingEngine,
    lines: TextIO,
    say: Callable[[str], None],
    *,
    system: str = "",
    temperature: float = 1.0,
    max_tokens: int = 512,
    seed: int = 0,
) -> None:
    """Answer each line until an empty one or the end; Ctrl-C ends an answer. A model without a chat template continues each line
    as text.
    """
    if max_tokens < 1 or temperature < 0:
        raise UserError(f"max_tokens is {max_tokens} and temperature {temperature}; expected at least 1, and 0 or more.")
    served, opening = Served(engine), [{"role": "system", "content": system}] if system else []
    talks = bool(served.tokenizer.chat_template)
    said: list[dict[str, Any]] = list(opening)
    asked = {"temperature": temperature, "max_tokens": max_tokens}
    for turn in range(2**31):
        say("> ")
        line = lines.readline().strip()
        if not line:
            return say("\n")
        if line == "/new":
            said = list(opening)
            continue
        said.append({"role": "user", "content": line})
        try:
            row = served.conversation(said, None)[0] if talks else Row("the line", prompt=line)
            call = served.call({}, row, None, asked | {"seed": seeds.derive(seed, "chat", turn)})
            text = asyncio.run(_answer(served, call, say))
        except ApiError as error:
            said.pop()
            say(f"{error.message} /new begins another conversation.\n")
            continue
        except KeyboardInterrupt:
            text = "…"
        say("\n")
        said.append({"role": "assistant", "content": text})


async def _answer(served: Served, call: Any, say: Callable[[str], None]) -> str:
    text = ""
    async for piece in served.begin("", call).choice(0):
        say(piece.text)
        text += piece.text
    return text
