"""The counting agent of docs/agents.md with Anthropic's client: --agent-command "python examples/agents/count_anthropic.py" """

from __future__ import annotations

import json
import sys

import anthropic

row, client = json.loads(sys.stdin.readline()), anthropic.Anthropic()
messages, last, right = list(row["prompt"]), row["start"], 0
for _ in range(3):
    answer = client.messages.create(model="policy", max_tokens=4, messages=messages)
    number = "".join(block.text for block in answer.content if block.type == "text")
    right += len(number) == 1 and number > last
    last = number
    messages += [{"role": "assistant", "content": number}, {"role": "user", "content": "more"}]
print(right / 3)
