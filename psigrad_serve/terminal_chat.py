"""A conversation on the terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from psigrad import seeds
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.image_rows import observation_json
from psigrad.records.row_lines import last_event
from psigrad_serve.api_errors import ApiError
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Served

MAX_TOKENS = 512
"""The maximum number of tokens of an answer, unless the user sets another number or the model's training had one."""


class Training(NamedTuple):
    """Facts about a model's training: example prompts, and the limit of tokens in a completion (0: unknown)."""

    prompts: tuple[str, ...] = ()
    max_tokens: int = 0


NO_TRAINING = Training()


def read_training(model: str) -> Training:
    """Return the facts about a model's training, given the run folder or a model in it; for another model `NO_TRAINING`."""
    path = Path(model).expanduser()
    run = next((folder for folder in (path, *path.absolute().parents[:2]) if (folder / "events.jsonl").is_file()), None)
    if run is None:
        return NO_TRAINING
    try:
        longest = json.loads((run / "config.json").read_text())["sampling"]["max_completion_length"]
        rows = last_event(run / "events.jsonl", "first_rows").get("rows", ())
        found = (text for _, pieces in rows for kind, text in pieces if kind == "prompt")
        return Training(tuple(dict.fromkeys(text.replace("\n", "\\n")[:200] for text in found))[:2], int(longest))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return NO_TRAINING  # a damaged run folder, whose model may still be usable


def introduce(training: Training) -> str:
    """Return a note for the user of a model without a chat template: how it answers, and an example prompt."""
    first = "This model has no chat template: it continues each line as text."
    return "\n  ".join((f"{first} It was trained on prompts such as:", *training.prompts)) if training.prompts else first


def talk(
    engine: SamplingEngine,
    lines: TextIO,
    say: Callable[[str], None],
    *,
    system: str = "",
    temperature: float = 1.0,
    max_tokens: int = 0,
    seed: int = 0,
    training: Training = NO_TRAINING,
) -> None:
    """Answer each of the `lines` until one is empty or they end. Ctrl-C ends an answer.

    A model without a chat template continues each line as text, and often repeats itself. With `max_tokens` 0, an answer of such
    a model has at most as many tokens as a completion had in `training`, and any other answer at most `MAX_TOKENS`.
    """
    if max_tokens < 0 or temperature < 0:
        raise UserError(f"max_tokens is {max_tokens} and temperature {temperature}; expected both to be 0 or more.")
    served, opening = Served(engine), [{"role": "system", "content": system}] if system else []
    talks = bool(served.tokenizer.chat_template)
    if not talks:
        say(f"{introduce(training)}\n")
    max_tokens = max_tokens or (not talks and training.max_tokens) or MAX_TOKENS
    said: list[dict[str, Any]] = list(opening)
    seen: list[dict[str, Any]] = []
    asked = {"temperature": temperature, "max_tokens": max_tokens}
    for turn in range(2**31):
        say("> ")
        line = lines.readline().strip()
        if not line:
            return say("\n")
        if line == "/new":
            said, seen = list(opening), []
            continue
        if line == "/image" or line.startswith("/image "):
            seen += _image(line.removeprefix("/image").strip(), served.pictures.refusal, say)
            continue
        said.append({"role": "user", "content": [*seen, {"type": "text", "text": line}] if seen else line})
        seen = []
        try:
            row = served.conversation(said, None)[0] if talks else Row("the line", prompt=line)
            call = served.call({}, row, None, asked | {"seed": seeds.derive(seed, "chat", turn)})
            text = asyncio.run(_answer(served, call, say))
        except ApiError as error:
            said.pop()
            say(f"{error.message} /new starts a new conversation.\n")
            continue
        except KeyboardInterrupt:
            text = "…"
        say("\n")
        said.append({"role": "assistant", "content": text})


def _image(path: str, refusal: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a list with the content part of the image at `path`. If it cannot be read, print why and return an empty list."""
    if not path:
        say("/image needs the name of a file: /image FILE.\n")
        return []
    try:
        if refusal:
            raise ValueError(f"is {refusal}")
        part: dict[str, Any] = observation_json([{"type": "image", "path": path}])[0]
    except (OSError, ValueError) as error:
        say(f"{path} {error}.\n")
        return []
    say("Your next line asks about the image.\n")
    return [part]


async def _answer(served: Served, call: Any, say: Callable[[str], None]) -> str:
    text = ""
    async for piece in served.begin("", call).choice(0):
        say(piece.text)
        text += piece.text
    return text
