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


def serve(arguments: list[str]) -> int:
    """Run `psigrad serve`: serve a model over HTTP, and return the exit status."""
    usage = "psigrad serve MODEL_OR_RUN [--name NAME ...] [--port N] [--host ADDRESS] [--token TOKEN] [--max-batch N]"
    if flags.asks_for_help(arguments):
        print(f"{usage}\n       [--sampler embedded|vllm] [--dtype float32|bfloat16] [--device D] [--threads N] [--state FOLDER]")
        print("       [--chat-template-path FILE] [--trust-remote-code] [--vision]\n       psigrad serve MODEL --tinker\n")
        print("Serve a model through the APIs of OpenAI (chat completions, completions, responses) and Anthropic (messages).")
        print("Requests name the model by one of --name (default: MODEL_OR_RUN). Up to --max-batch (64) are sampled together.")
        print("The server listens on --host (default: this machine only) and --port (default: the first free one from 8500).")
        print("It requires a token: --token, PSIGRAD_SERVE_TOKEN, or a new one, which it prints. --sampler vllm samples by vLLM.")
        print("--dtype is the precision, --device is auto, cpu or cuda, and --threads limits CPU threads (default: all cores).")
        print("--chat-template-path gives another template. --trust-remote-code runs the model's own Python code. --state stores")
        print("responses on disk, so that requests can continue them after a restart. Vision-language models read images as data")
        print("URLs; --vision loads the tower of Qwen 3.5. --tinker serves the Tinker API, whose client trains adapters of the")
        print("model; they are stored in --state (default runs/tinker).")
        return 0
    models, listed, rest = flags.parse_lists(arguments, "--name")
    mine: dict[str, Any] = {"port": 0, "host": "127.0.0.1", "token": "", "tinker": False, "state": ""}
    given = flags.parse_plain("serve", rest, {**_MODEL, **mine})
    port, host, token, tinker, state = (given.pop(name) for name in mine)
    path = _only("serve", models, usage)
    names = tuple(listed["--name"]) or (path.rstrip("/"),)
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


_CHAT = """\
Talk to a model in the terminal. An empty line or Ctrl-D ends the chat, and /new starts a new one. /image FILE adds an
image to the next line, for vision-language models.

  --system TEXT    system message
  --temperature T  0 is greedy (default 1)
  --max-tokens N   longest answer (default 512; for a run without a chat template, its max_completion_length)
  --seed N         makes the answers repeatable"""


def chat(arguments: list[str]) -> int:
    """Run `psigrad chat`: talk to a model on the terminal, and return the exit status."""
    usage = "psigrad chat MODEL_OR_RUN [--system TEXT] [--temperature T] [--max-tokens N] [--seed N]"
    if flags.asks_for_help(arguments):
        print(f"{usage}\n\n{_CHAT}")
        return 0
    models, _, rest = flags.parse_lists(arguments)
    asked = {"system": "", "temperature": 1.0, "max_tokens": 0, "seed": 0}
    given = flags.parse_plain("chat", rest, {**_MODEL, **asked})
    how = {name: given.pop(name) for name in asked}
    path = _only("chat", models, usage)
    from psigrad_serve import terminal_chat
    from psigrad_serve.engine.served_model import opened_engine

    with opened_engine(path, **given) as engine:
        training = terminal_chat.read_training(path)
        terminal_chat.talk(engine, sys.stdin, lambda text: print(text, end="", flush=True), training=training, **how)
    return 0


def _only(command: str, models: list[str], usage: str) -> str:
    if len(models) != 1:
        raise UserError(f"{command} got {len(models) or 'no'} models but takes one; the usage is {usage}.")
    return models[0]
