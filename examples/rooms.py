"""A small model learns to use a tool over several turns, in three families' tongues: python examples/rooms.py [FOLDER] [FAMILY …]

Every room of a house has one door. The question is where you are behind the second, and only the tool `open_door` knows: the
policy has to call it, call it again with the answer, and say what it heard last. The demonstrations are careless: six in ten
guess, or stop behind the first door. Supervised fine-tuning copies that as often as it was shown. GRPO unlearns it. Held-out
rooms begin no training question.

The chat templates are the families' own, as trl has them: each writes calls, tools' answers and ends of turns in its own way.
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

import psigrad
from psigrad.language.models import tiny
from psigrad.runs.result import Result

MARKED = ("turn", "tool", "tool_call", "tool_response", "channel")
FAMILIES = {
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
    """A tool of the same name that knows another house: what it answers leads nowhere."""

    @staticmethod
    def open_door(room: str) -> str:
        """The room behind the door.

        Args:
            room: where you are.
        """
        return open_door(f"another {room}")


def call(room: str) -> dict[str, Any]:
    """A turn that asks the tool."""
    function = {"name": "open_door", "arguments": {"room": room}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def demonstration(room: str, rng: random.Random) -> list[dict[str, Any]]:
    """What somebody careless does: guesses, stops behind the first door, or does it right."""
    draw = rng.random()
    turns = []
    if draw < GUESSED:
        room = rng.choice(ROOMS)
    for _ in range(0 if draw < GUESSED else 1 if draw < GUESSED + STOPPED else 2):
        behind = open_door(room)
        turns += [call(room), {"role": "tool", "name": "open_door", "content": behind}]
        room = behind
    return [*turns, {"role": "assistant", "content": room}]


def prepare(folder: Path, family: str, seed: int = 0, hidden: int = 128, layers: int = 2) -> None:
    """The rows and an untrained model that speaks the family's chat template."""
    from transformers.utils import get_json_schema

    rng = random.Random(seed)
    rooms = rng.sample(ROOMS, len(ROOMS))
    offered = [get_json_schema(open_door)]
    rows = [
        {"prompt": [{"role": "user", "content": f"{room}: two doors on?"}], "answer": open_door(open_door(room))}
        for room in rooms
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pairs = list(zip(rooms, rows, strict=True))[HELD_OUT:]
    shown = [{"messages": [*row["prompt"], *demonstration(room, rng)], "tools": offered} for _ in range(4) for room, row in pairs]
    for name, part in (("held_out", rows[:HELD_OUT]), ("prompts", rows[HELD_OUT:]), ("demonstrations", shown)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tokenizer = tokenizer_of(family, shown)
    model = tiny.model("qwen3", len(tokenizer), hidden=hidden, layers=layers, heads=4, max_length=512, seed=seed)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")


def tokenizer_of(family: str, rows: list[dict[str, Any]]) -> Any:
    """The family's template and special tokens; else a letter, a digit, or a whole line that the template writes is a token."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None, "the chat templates come with trl: pip install trl"
    made = tiny.tokenizer([""], 300)
    made.add_special_tokens({"bos_token": "<|bos|>", "additional_special_tokens": FAMILIES[family]})
    made.chat_template = (Path(spec.origin).parent / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")
    between = re.compile("|".join([*map(re.escape, ["<|bos|>", *FAMILIES[family]]), r"[A-Z]\d"]))
    texts = [str(made.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)) for row in rows[:200]]
    lines = {line for text in texts for part in between.split(text) for line in part.splitlines(keepends=True)}
    made.add_tokens(sorted(line for line in lines if len(line) > 1))
    return made


def main(folder: Path, family: str, seed: int = 0, sft_steps: int = 300, rl_steps: int = 40, tool: Any = open_door) -> Result:
    """Fine-tune and train by GRPO; the figures before and after are in the result."""
    prepare(folder, family, seed)
    shared = {"seed": seed, "chat_template_kwargs": {"enable_thinking": False} if family == "qwen3" else {}}
    tuned = psigrad.train(
        "sft",
        model=folder / "base",
        dataset=str(folder / "demonstrations.jsonl"),
        eval_prompts=0,
        batch_size=32,
        max_steps=sft_steps,
        learning_rate=2e-3,
        warmup_steps=20,
        output_dir=str(folder / "sft"),
        **shared,
    )
    return psigrad.train(
        {"preset": "grpo", "kl": None},
        model=tuned.model,
        dataset=str(folder / "prompts.jsonl"),
        eval_dataset=str(folder / "held_out.jsonl"),
        eval_prompts=HELD_OUT,
        tools=[tool],
        reward="exact",
        max_turns=4,
        max_completion_length=16,
        prompts_per_step=8,
        num_generations=8,
        max_steps=rl_steps,
        learning_rate=5e-4,
        output_dir=str(folder / "grpo"),
        **shared,
    )


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/rooms")
    for name in sys.argv[2:] or FAMILIES:
        found = main(root / name, name)
        for when, figures in (("after SFT ", found.before), ("after GRPO", found.after)):
            mean, low, high = (figures[f"eval/exact/{part}"] for part in ("mean", "low", "high"))
            print(f"{name:9} {when}  {mean:.3f} of the held-out questions are answered rightly [{low:.3f}, {high:.3f}]")
