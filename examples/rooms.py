"""A small model learns to call a tool in several turns: python examples/rooms.py [FOLDER] [FAMILY …]

Each room has one door, which leads to another room. A question names a room and asks where you are after two doors. The policy
must call the tool `open_door`, call it again with the result, and answer with the second result. In 60 % of the demonstrations
the answer is a guess, or comes after one door. Supervised fine-tuning copies these mistakes, and GRPO removes them. No training
question starts in a held-out room.

FAMILY is the name of a chat template in TRL, such as qwen3. Each template formats calls, results and ends of turns differently.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import string
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

import psigrad
from psigrad.language.models import tiny
from psigrad.runs.result import Result

MARKED = ("turn", "tool", "tool_call", "tool_response", "channel")
FAMILIES = {
    "qwen3_instruct_2507": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "llama3_1": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
    "gemma4": [f"<|{name}>" for name in MARKED] + [f"<{name}|>" for name in MARKED] + ['<|"|>'],
}
"""Chat templates, and their special tokens."""
ROOMS = [f"{letter}{digit}" for letter in string.ascii_uppercase for digit in range(10)]
HELD_OUT, GUESSED, STOPPED = 60, 0.3, 0.3


def open_door(room: str) -> str:
    """The room behind the door.

    Args:
        room: where you are.
    """
    return ROOMS[int.from_bytes(hashlib.sha256(room.encode()).digest()[:4], "big") % len(ROOMS)]


class OtherHouse:
    """The tool of the control. It has the same name, and its results are useless."""

    @staticmethod
    def open_door(room: str) -> str:
        """The room behind the door.

        Args:
            room: where you are.
        """
        return open_door(f"another {room}")


def call(room: str) -> dict[str, Any]:
    """Return a turn that calls the tool."""
    function = {"name": "open_door", "arguments": {"room": room}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def demonstration(room: str, rng: random.Random) -> list[dict[str, Any]]:
    """Return a demonstration, which guesses, stops after the first door, or is right."""
    draw = rng.random()
    turns = []
    if draw < GUESSED:
        room = rng.choice(ROOMS)
    for _ in range(0 if draw < GUESSED else 1 if draw < GUESSED + STOPPED else 2):
        behind = open_door(room)
        turns += [call(room), {"role": "tool", "name": "open_door", "content": behind}]
        room = behind
    return [*turns, {"role": "assistant", "content": room}]


def prepare(folder: Path, family: str, seed: int = 0) -> None:
    """Write the rows, and an untrained model with the family's chat template."""
    rng = random.Random(seed)
    rooms = rng.sample(ROOMS, len(ROOMS))
    asked = {room: [{"role": "user", "content": f"{room}: two doors on?"}] for room in rooms}
    prompts = [{"prompt": asked[room], "answer": open_door(open_door(room))} for room in rooms]
    shown = [
        {"messages": [*asked[room], *demonstration(room, rng)], "tools": [get_json_schema(open_door)]}
        for room in 4 * rooms[HELD_OUT:]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", prompts[:HELD_OUT]), ("prompts", prompts[HELD_OUT:]), ("demonstrations", shown)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tokenizer = tokenizer_of(family, shown)
    model = tiny.model("qwen3", len(tokenizer), hidden=128, layers=2, heads=4, max_length=512, seed=seed)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")


def tokenizer_of(family: str, rows: list[dict[str, Any]]) -> Any:
    """Return a tokenizer with the family's template and special tokens. Each line that the template writes is a single token."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None, "the chat templates come with trl: pip install trl"
    made = tiny.tokenizer([""], 300)
    made.add_special_tokens({"bos_token": "<|bos|>", "additional_special_tokens": FAMILIES[family]})
    made.chat_template = (Path(spec.origin).parent / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")
    between = re.compile("|".join([*map(re.escape, ["<|bos|>", *FAMILIES[family]]), r"[A-Z]\d"]))
    texts = [str(made.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)) for row in rows[:50]]
    lines = {line for text in texts for part in between.split(text) for line in part.splitlines(keepends=True)}
    made.add_tokens(sorted(line for line in lines if len(line) > 1))
    return made


def kwargs_of(family: str) -> dict[str, Any]:
    """Return the template's arguments. They turn off Qwen3's thinking."""
    return {"enable_thinking": False} if family == "qwen3" else {}


def tune(folder: Path, family: str, seed: int = 0, steps: int = 600) -> Result:
    """Fine-tune the model on the demonstrations."""
    return psigrad.train(
        "sft",
        model=folder / "base",
        chat_template_kwargs=kwargs_of(family),
        dataset=str(folder / "demonstrations.jsonl"),
        eval_prompts=0,
        batch_size=32,
        max_steps=steps,
        learning_rate=2e-3,
        warmup_steps=20,
        seed=seed,
        output_dir=str(folder / "sft"),
    )


def reinforce(folder: Path, family: str, tool: Any = open_door, seed: int = 0, steps: int = 80, name: str = "grpo") -> Result:
    """Train further by GRPO with the tool. Return the result, with the accuracy on held-out rooms before and after."""
    return psigrad.train(
        {"preset": "grpo", "kl": None},
        model=folder / "sft" / "model",
        chat_template_kwargs=kwargs_of(family),
        dataset=str(folder / "prompts.jsonl"),
        eval_dataset=str(folder / "held_out.jsonl"),
        eval_prompts=HELD_OUT,
        tools=[tool],
        reward="exact",
        max_turns=4,
        max_completion_length=16,
        prompts_per_step=8,
        num_generations=8,
        max_steps=steps,
        learning_rate=5e-4,
        seed=seed,
        output_dir=str(folder / name),
    )


def main(folder: Path, family: str, seed: int = 0) -> None:
    """Run the example, then its control: GRPO on the same fine-tuned model with a tool whose results are useless."""
    prepare(folder, family, seed)
    tune(folder, family, seed)
    for what, tool in (("with the tool", open_door), ("control", OtherHouse.open_door)):
        found = reinforce(folder, family, tool, seed, name=what.replace(" ", "_"))
        for when, figures in (("before", found.before), ("after", found.after)):
            mean, low, high = (figures[f"eval/exact/{part}"] for part in ("mean", "low", "high"))
            print(f"{family:9} {what:13} {when:6} GRPO  {mean:.3f} of the held-out questions are right [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/rooms")
    for family in sys.argv[2:] or FAMILIES:
        main(root / family, family)
