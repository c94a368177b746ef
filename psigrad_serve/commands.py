"""The commands `psigrad serve`, which starts the gateway, and `psigrad chat`, a conversation on the terminal."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Any

from psigrad.cli import flags
from psigrad.errors import UserError

_TEXTS = {"dtype": "float32", "device": "auto", "sampler": "embedded", "chat_template_path": ""}
_MODEL: dict[str, Any] = {**_TEXTS, "threads": 0, "max_batch": 64, "trust_remote_code": False, "vision": False}
_FLAGS = """
--dtype: precision of the model, float32 or bfloat16
--device: auto, cpu or cuda
--sampler: embedded (psigrad's) or vllm
--chat-template-path: file with a chat template to use instead of the model's
--threads: CPU threads; by default all cores
--max-batch: maximum number of completions sampled at once
--trust-remote-code: run the model's own Python code
--vision: also load the vision tower, which only Qwen 3.5 needs"""
_SERVE = f"""\
Serve a model through the APIs of OpenAI (chat completions, completions, responses) and Anthropic (messages).
Vision-language models read images as data URLs.
--name: one or more names by which requests call the model; by default MODEL_OR_RUN
--port: port; by default the first free one from 8500
--host: address to listen on; the default accepts only this machine
--token: token that clients must send; by default PSIGRAD_SERVE_TOKEN, or a new one, which is printed
--tinker: serve the Tinker API, with which clients train adapters of the model
--state: folder that keeps responses, to continue them after a restart; with --tinker: adapters, by default runs/tinker{_FLAGS}"""
_CHAT = f"""\
Talk to a model in the terminal. An empty line or Ctrl-D ends the chat, and /new starts a new one. /image FILE adds an
image to the next line, for vision-language models.
--system: system message
--temperature: softmax temperature; 0 is greedy
--max-tokens: maximum tokens of an answer; by default 512, or max_completion_length of a run without a chat template
--seed: seed of the sampled answers (default 0){_FLAGS}"""


def serve(arguments: list[str]) -> int:
    """Run `psigrad serve`: serve a model over HTTP, and return the exit status."""
    mine: dict[str, Any] = {"name": (), "port": 0, "host": "127.0.0.1", "token": "", "tinker": False, "state": ""}
    given = flags.parse_plain("serve MODEL_OR_RUN", arguments, {**mine, **_MODEL}, _SERVE)
    (path,), names, port, host, token, tinker, state = (given.pop(name) for name in ("names", *mine))
    names = tuple(names) or (path.rstrip("/"),)
    if tinker and len(names) > 1:
        raise UserError(f"--tinker got the names {', '.join(names)}; it serves a single name, so give one --name.")
    from psigrad_serve import serving

    listening = serving.listen(host, port)
    say = partial(print, flush=True)
    if tinker:
        from psigrad_serve.tinker_api import TinkerServer

        with contextlib.closing(TinkerServer.of(path, names[0], state or "runs/tinker", given)) as trained:
            serving.serve(trained, listening, token, say)
        return 0
    from psigrad_serve.engine.served_model import opened_engine
    from psigrad_serve.served import Served

    with opened_engine(path, **given) as engine:
        serving.serve(Served(engine, names, state=state), listening, token, say)
    return 0


def chat(arguments: list[str]) -> int:
    """Run `psigrad chat`: talk to a model on the terminal, and return the exit status."""
    asked = {"system": "", "temperature": 1.0, "max_tokens": 0, "seed": 0}
    given = flags.parse_plain("chat MODEL_OR_RUN", arguments, {**asked, **_MODEL}, _CHAT)
    how, (path,) = {name: given.pop(name) for name in asked}, given.pop("names")
    from psigrad_serve import terminal_chat
    from psigrad_serve.engine.served_model import opened_engine

    with opened_engine(path, **given) as engine:
        training = terminal_chat.read_training(path)
        terminal_chat.talk(engine, sys.stdin, lambda text: print(text, end="", flush=True), training=training, **how)
    return 0
