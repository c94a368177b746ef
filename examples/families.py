"""A small model learns to use a tool over several turns, in the words of any chat template:
python examples/families.py TEMPLATE FOLDER

Customers ask what things cost, and the tool `price` knows. The demonstrations are careless: four in ten guess. Supervised
fine-tuning copies that as often as it was shown; GRPO against the true price leaves the guessing off. TEMPLATE is a Jinja file,
such as those in trl/chat_templates. What is written to FOLDER and the commands that go on from there are in docs/tools.md.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from psigrad.language.models import tiny

HELD_OUT, GUESSED = 40, 0.4
PRICES = {"apples": 3, "pears": 4, "plums": 5, "figs": 7}
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Lea", "Max", "Nora", "Otto", "Pia"]
NAMES += ["Quinn", "Rosa", "Sam", "Tess", "Uma", "Vic", "Wim", "Xena", "Yves", "Zoe"]


def price(item: str) -> int:
    """What an item costs.

    Args:
        item: what is bought
    """
    return PRICES[item]


def right_price(last_turns: list[str], item: list[str], **columns: Any) -> list[float]:
    """1 where the last number of the policy's last turn is the price."""
    numbers = [re.findall(r"\d+", said) for said in last_turns]
    return [float(found[-1:] == [str(price(what))]) for found, what in zip(numbers, item, strict=True)]


def demonstration(name: str, item: str, rng: random.Random) -> list[dict[str, Any]]:
    """A conversation with the tool, or a guess."""
    asked = [{"role": "user", "content": f"{name} wants {item} . What is the price?"}]
    if rng.random() < GUESSED:
        return [*asked, {"role": "assistant", "content": f"It costs {rng.randrange(10)}"}]
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
    asked = list(itertools.product(NAMES, PRICES))
    rng.shuffle(asked)
    talks, items = [demonstration(name, item, rng) for name, item in asked], [item for _, item in asked]
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
    model = tiny.model("qwen3", len(tokenizer), hidden=64, layers=2, max_length=1024, seed=seed)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python examples/families.py TEMPLATE FOLDER")
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))
