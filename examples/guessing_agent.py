"""An agent that guesses a number from 1 to 9 and is told higher or lower, and a tiny model that knows how to answer it.

    python examples/guessing_agent.py runs/guessing
    psigrad grpo --model runs/guessing/base/model --dataset runs/guessing/rows.jsonl --agent examples/guessing_agent.py:solve

The first command, a minute on two cores, makes a model that names any number, whatever it is told. The second teaches it to
listen. `docs/agents.md` goes through it.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

TURNS = 4


def solve(row, client):
    """One session: the reward is 1 for a right first guess, and 0.2 less for each further one."""
    messages = list(row["prompt"])
    for turn in range(TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages)
        guess = answer.choices[0].message.content.strip()
        if guess == row["secret"]:
            return 1.0 - 0.2 * turn
        hint = "higher" if guess < row["secret"] else "lower"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return 0.0


def question() -> list[dict[str, str]]:
    """How a session begins."""
    return [{"role": "user", "content": "guess"}]


def careless_talk(rng: random.Random) -> list[dict[str, str]]:
    """A session in which nobody listens."""
    talk = question()
    for _ in range(TURNS):
        talk += [
            {"role": "assistant", "content": rng.choice("123456789")},
            {"role": "user", "content": rng.choice(("higher", "lower"))},
        ]
    return talk[:-1]


def main(folder: Path) -> None:
    """Write the rows, and train the model that the agent begins with on careless talk."""
    import psigrad
    from psigrad.language.data.templates import CHATML
    from psigrad.language.models import tiny

    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": question(), "secret": rng.choice("123456789")} for _ in range(2000)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talks = [{"messages": careless_talk(rng)} for _ in range(2000)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    tokenizer = tiny.tokenizer(["guess higher lower user assistant"], 300)
    tokenizer.chat_template = CHATML
    tiny.model("qwen3", len(tokenizer), hidden=64, layers=2, heads=4, max_length=256).save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    psigrad.train(
        "sft", model=str(folder / "random"), dataset=str(folder / "talks.jsonl"), output_dir=str(folder / "base"),
        learning_rate=3e-3, batch_size=32, max_steps=60, eval_prompts=50,
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/guessing"))
