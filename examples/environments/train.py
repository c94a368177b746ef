"""Train on an environment of another library: python examples/environments/train.py openenv|verifiers|mcp [FOLDER]

In each of three turns the policy reads a number n and must answer n + 1. A tiny model first learns from demonstrations in which
half of the answers are right. GRPO then makes nearly all of them right. With MCP, the policy answers by calling a tool.
"""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psigrad
from psigrad.language.data.chat.turns import Conversation
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import CHATML
from psigrad.language.episodes.environments import resolve
from psigrad.language.episodes.tools import schemas
from psigrad.language.models import tiny
from psigrad.runs.result import Result

HERE = Path(__file__).parent


def said(number: int, tools: Sequence[Any]) -> dict[str, Any]:
    """Return the policy's turn: the number as text, or in a tool call if there are tools."""
    if not tools:
        return {"role": "assistant", "content": str(number)}
    call = {"name": "say", "arguments": {"number": number}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def demonstrations(count: int, seed: int, tools: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Return demonstrations in which 60 % of the answers are random numbers."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        talk: list[dict[str, Any]] = []
        for number in rng.choices(range(1, 6), k=3):
            heard = {"role": "tool", "name": "say"} if talk and tools else {"role": "user"}
            turn = number + 1 if rng.random() < 0.4 else rng.randint(1, 6)
            talk += [{**heard, "content": str(number)}, said(turn, tools)]
        rows.append({"messages": talk, **({"tools": list(tools)} if tools else {})})
    return rows


def prepare(folder: Path, tools: Sequence[Any] = ()) -> str:
    """Train a tiny model on the demonstrations, and return its folder."""
    shown = demonstrations(1000, 0, tools)
    tokenizer = tiny.tokenizer(["user assistant system"], 300)
    tokenizer.chat_template = CHATML
    if tools:  # each piece of text between the numbers becomes one token
        texts = [Conversation(tokenizer, Row("a game", columns={"tools": tools})).render(row["messages"]) for row in shown[:50]]
        tokenizer.add_tokens(
            sorted({part for text in texts for part in re.split(r"\d|<\|\w+\|>|assistant\n", text) if len(part) > 1})
        )
    tiny.model("qwen3", len(tokenizer), hidden=64, layers=2, heads=4, max_length=128).save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    settings = {"learning_rate": 3e-3, "batch_size": 16, "max_steps": 400, "eval_prompts": 0}
    psigrad.train("sft", model=folder / "random", dataset=shown, output_dir=folder / "base", **settings)
    return str(folder / "base" / "model")


def learn(model: str, environment: str, folder: Path, steps: int) -> Result:
    """Train by GRPO. The environment provides the prompts and the rewards."""
    return psigrad.train(
        {"preset": "grpo", "kl": None},
        model=model,
        environment=environment,
        max_turns=3,
        max_completion_length=6,
        prompts_per_step=8,
        num_generations=8,
        eval_prompts=50,
        max_steps=steps,
        learning_rate=3e-3,
        environment_timeout=120.0,
        output_dir=folder / "grpo",
    )


def free_port() -> int:
    """Return an unused port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def main(field: str, folder: Path, steps: int = 20) -> Result:
    """Train on one library's environment, and print the mean reward before and after GRPO."""
    environment, tools, server = "verifiers:successor:player", list[Any](), None
    if field == "mcp":
        environment = f"mcp:{sys.executable} {HERE / 'mcp_server.py'}"
        tools = schemas(resolve(environment).tools)
    model = prepare(folder, tools)
    if field == "verifiers":
        sys.path.append(str(HERE))  # verifiers imports the taskset from here, also in the worker processes
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    elif field == "openenv":
        port = free_port()
        server = subprocess.Popen([sys.executable, HERE / "openenv_server.py", str(port)])
        environment = f"openenv:http://127.0.0.1:{port}"
        for _ in range(600):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
    try:
        found = learn(model, environment, folder, steps)
    finally:
        if server is not None:
            server.kill()
            server.wait()
    for when, figures in (("before", found.before), ("after", found.after)):
        mean, low, high = (figures[f"eval/reward/{part}"] for part in ("mean", "low", "high"))
        print(f"{field:9} {when:6} GRPO  reward {mean:.3f} [{low:.3f}, {high:.3f}]")
    return found


if __name__ == "__main__":
    if sys.argv[1:2] not in (["openenv"], ["verifiers"], ["mcp"]):
        sys.exit("python examples/environments/train.py openenv|verifiers|mcp [FOLDER]")
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else f"runs/{sys.argv[1]}"))
