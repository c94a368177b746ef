"""The agent of docs/agents.md. The policy must count up: the reward is the share of digits larger than the previous one."""

from __future__ import annotations


def solve(row, client):
    messages, last, right = list(row["prompt"]), row["start"], 0
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages)
        number = answer.choices[0].message.content
        right += len(number) == 1 and number > last
        last = number
        messages += [{"role": "assistant", "content": number}, {"role": "user", "content": "more"}]
    return right / 3  # the reward
