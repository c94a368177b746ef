"""A small model learns to use a tool over several turns, in the words of any chat template: python examples/families.py TEMPLATE FOLDER

The shop sells things that have a number. What one costs, only the tool `price` knows. The demonstrations are careless: six in ten
guess a price. Supervised fine-tuning copies that as often as it was shown; GRPO against the true price leaves the guessing off.
Held-out numbers occur in no training data. TEMPLATE is a Jinja file, such as those in trl/chat_templates. What is written to FOLDER
and the commands that go on from there are in docs/tools.md.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from psigrad.language.models import tiny

HELD_OUT, GUESSED = 100, 0.6


def price(item: str) -> int:
    """What an item costs.

    Args:
        item: its number
    """
    return random.Random(item).randrange(10, 100)


def right_price(last_turns: list[str], item: list[str], **columns: Any) -> list[float]:
    """1 where the last number of the policy's last turn is the price."""
    numbers = [re.findall(r"\d+", said) for said in last_turns]
    return [float(found[-1:] == [str(price(what))]) for found, what in zip(numbers, item, strict=True)]


def demonstration(item: str, rng: random.Random) -> list[dict[str, Any]]:
    """A conversation with the tool, or a guess."""
    asked = [{"role": "user", "content": f"What is the price of {item} ?"}]
    if rng.random() < GUESSED:
        return [*asked, {"role": "assistant", "content": f"It costs {rng.randrange(10, 100)}"}]
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": item}}}
    answer = str(price(item))
    return [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "price", "content": answer},
        {"role": "assistant", "content": f"It costs {answer}"},
    ]


def prepare(template: Path, folder: Path, seed: int = 0) -> None:
    """base/ (an untrained model that has the template), demonstrations.jsonl, prompts.jsonl and held_out.jsonl."""
    rng = random.Random(seed)
    items = [f"{n:03d}" for n in range(1000)]
    rng.shuffle(items)
    talks = [demonstration(item, rng) for item in items]
    tools = [get_json_schema(price)]
    rows = {
        "demonstrations": [{"messages": talk, "tools": tools} for talk in talks[HELD_OUT:]],
        "prompts": [{"prompt": talk[:1], "item": item} for talk, item in zip(talks[HELD_OUT:], items[HELD_OUT:], strict=True)],
        "held_out": [{"prompt": talk[:1], "item": item} for talk, item in zip(talks[:HELD_OUT], items[:HELD_OUT], strict=True)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    text = template.read_text(encoding="utf-8")
    special = {"bos_token": "<|begin_of_text|>", "additional_special_tokens": sorted(set(re.findall(r"<\|\w+\|>", text)))}
    empty = tiny.tokenizer([], 260)
    empty.add_special_tokens({"bos_token": special["bos_token"]})
    empty.chat_template = text
    seen = [empty.apply_chat_template(talk, tools=tools, tokenize=False) for talk in talks[HELD_OUT : HELD_OUT + 100]]
    tokenizer = tiny.tokenizer([re.sub(r"<\|\w+\|>", " ", str(words)) for words in seen], 800)
    tokenizer.add_special_tokens(special)
    tokenizer.chat_template = text
    model = tiny.model("qwen3", len(tokenizer), hidden=96, layers=3, max_length=1024, seed=seed)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python examples/families.py TEMPLATE FOLDER")
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))
