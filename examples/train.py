"""GRPO from Python: python examples/train.py MODEL PROMPTS.jsonl"""

from __future__ import annotations

import sys

import psigrad


def brevity(completions, **columns):
    return [-len(text) / 100 for text in completions]


if __name__ == "__main__":
    result = psigrad.train("grpo", model=sys.argv[1], dataset=sys.argv[2], reward=["exact", brevity], max_steps=100)
    print(result.after, result.report)
