"""Agents of many kinds, as users write them; the workers that run them import this file."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request


def said(completion) -> str:
    """The text of an answer of openai's client."""
    return completion.choices[0].message.content or ""


def once(row, client):
    """One question; its reward is left to the run."""
    client.chat.completions.create(model="policy", messages=row["prompt"], temperature=0.0, seed=5)


def three_turns(row, client):
    """A conversation that goes on."""
    messages = list(row["prompt"])
    for turn in range(3):
        messages.append({"role": "assistant", "content": said(client.chat.completions.create(model="policy", messages=messages))})
        messages.append({"role": "user", "content": f"again {turn}"})
    return float(len(said_by(messages)) % 7)


def said_by(messages) -> str:
    return "".join(m["content"] for m in messages if m["role"] == "assistant")


def of_row(row, client, base_url, api_key):
    """The agent that the row names."""
    made = globals()[row["agent"]]
    if made is sub_agents:
        return asyncio.run(alone(row))
    return made(row, base_url, api_key) if made is by_hand else made(row, client)


async def alone(row):
    """`sub_agents` with a client of its own."""
    import openai

    async with openai.AsyncOpenAI() as client:
        return await sub_agents(row, client)


async def sub_agents(row, client):
    """Two sub-agents at once, a summary of what they said, and a second try of it."""

    async def ask(*texts: str) -> str:
        messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
        return said(await client.chat.completions.create(model="policy", messages=messages))

    one, two = await asyncio.gather(ask("say b:"), ask("say c:"))
    first = await ask(row["prompt"][0]["content"])
    tries = [await ask(row["prompt"][0]["content"], first, f"{one}{two}") for _ in range(2)]
    return float(sum(map(len, (one, two, *tries))) % 5)


def one_letter(row, client):
    """A question whose answer is as short as the agent wants it."""
    client.chat.completions.create(model="policy", messages=row["prompt"], max_tokens=1)


def gone(row, client):
    """A session that breaks off behind the first answer."""
    client.completions.create(model="policy", prompt=row["prompt"])
    raise RuntimeError("browser gone")


async def helpers(row, client):
    """Two who are asked at once, and a question about what they said; the prompt is text."""

    async def ask(text: str) -> str:
        return said(await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}]))

    both = await asyncio.gather(ask(row["prompt"]), ask("a"))
    last = await ask("".join(both)[:4])
    return len(last) / 10


def by_hand(row, base_url, api_key):
    """No client of anybody's."""
    body = json.dumps({"model": "policy", "messages": row["prompt"]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        return float(len(json.load(answer)["choices"][0]["message"]["content"]))


def troubled(row, client):
    """Asks, and then does what the row says."""
    what = row["what"]
    if what != "mute":
        once(row, client)
    if what == "crash":
        raise ValueError("no idea")
    if what == "exit":
        os._exit(3)
    if what == "hang":
        time.sleep(60)
    if what == "flood":
        while True:
            once(row, client)
    if what == "words":
        return "good"
    return 1.0


if __name__ == "__main__":
    import openai

    given = json.loads(sys.stdin.readline())
    print("thinking aloud")
    print(three_turns(given, openai.OpenAI()))
