"""What the gateway costs: `python benchmarks/serving.py [--pairs 15] [--threads 1]`.

A model of 26 million weights behind the gateway, asked by a client in a process of its own, beside the same prompts,
seeds and lengths sampled in this process, in turn. 32 streams and 32 whole answers at once: tokens a second by the clock, and
processor time of the process that serves. One answer of one token after the other: what a call takes beyond the engine's part.
Medians; the screen, and results/serving.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "serving.json"
AT_ONCE, LENGTH, PROMPT, CALLS = 32, 64, 64, 100


async def ask(host: str, port: int, token: str, body: dict[str, Any]) -> int:
    """A request over a connection of its own; the tokens that came, told by the answer itself."""
    reader, writer = await asyncio.open_connection(host, port)
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
    found = await reader.read()
    writer.close()
    assert found.startswith(b"HTTP/1.1 200"), found[:300]
    if body["stream"]:
        assert b"data: [DONE]" in found
    return int(found.rpartition(b'"completion_tokens":')[2].partition(b",")[0])


async def ask_all(job: dict[str, Any]) -> int:
    """All at once, or one after the other."""
    requests = [ask("127.0.0.1", job["port"], job["token"], body) for body in job["bodies"]]
    if job["together"]:
        return sum(await asyncio.gather(*requests))
    return sum([await one for one in requests])


def client() -> None:
    """The other process: jobs come as lines of JSON, and are answered by (seconds, tokens)."""
    for line in sys.stdin:
        begun = time.perf_counter()
        tokens = asyncio.run(ask_all(json.loads(line)))
        print(json.dumps([time.perf_counter() - begun, tokens]), flush=True)


def timed(work: Callable[[], int]) -> dict[str, float]:
    """Seconds by the clock, of this process's processor time, and tokens."""
    clock, used = time.perf_counter(), time.process_time()
    tokens = work()
    return {"clock": time.perf_counter() - clock, "processor": time.process_time() - used, "tokens": tokens}


def small_model() -> Any:
    """What is served: random weights."""
    from psigrad.language.models import tiny
    from psigrad.language.models.language_model import prepare

    tokenizer = tiny.tokenizer(["the quick brown fox jumps over the lazy dog 0123456789"] * 5, 2048)
    return prepare(tiny.model("qwen3", 2048, hidden=512, layers=8, heads=8, max_length=1024), tokenizer)


def measure(pairs: int, threads: int) -> dict[str, Any]:
    """The figures of each way to ask, in turn."""
    import torch

    from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
    from psigrad.language.rollout.types import Request, SamplingParams
    from psigrad_serve.engine.engine import SamplingEngine
    from psigrad_serve.served import Served
    from psigrad_serve.serving import running

    torch.set_num_threads(threads)
    model = small_model()
    prompts = [[(7 * i + 3 * n) % 250 + 5 for n in range(PROMPT)] for i in range(AT_ONCE)]
    params, sampler = SamplingParams(LENGTH), EmbeddedSampler(model, AT_ONCE)
    with (
        subprocess.Popen(
            [sys.executable, __file__, "--client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
        running(Served(engine := SamplingEngine(model, AT_ONCE), ["it"])) as at,
    ):
        assert other.stdin is not None and other.stdout is not None
        port = int(at.url.rpartition(":")[2])

        def asked(bodies: list[dict[str, Any]], together: bool) -> int:
            job = {"port": port, "token": at.token, "bodies": bodies, "together": together}
            print(json.dumps(job), file=other.stdin, flush=True)
            return int(json.loads(other.stdout.readline())[1])  # type: ignore[union-attr]

        def bodies(count: int, length: int, stream: bool) -> list[dict[str, Any]]:
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            own = {"model": "it", "stream": stream, "max_tokens": length, **usage}
            return [{**own, "prompt": prompts[i % AT_ONCE], "seed": i} for i in range(count)]

        def sampled() -> int:
            requests = [Request(tuple(prompt), (i,)) for i, prompt in enumerate(prompts)]
            return sum(len(made.ids) for (made,) in sampler.sample(requests, params))

        def one_by_one() -> int:
            one = SamplingParams(1)
            return sum(len(engine.submit(prompts[i % AT_ONCE], one, i).result().ids) for i in range(CALLS))

        ways: dict[str, Callable[[], int]] = {
            "in process": sampled,
            "streams": lambda: asked(bodies(AT_ONCE, LENGTH, True), True),
            "whole": lambda: asked(bodies(AT_ONCE, LENGTH, False), True),
            "engine, a call": one_by_one,
            "gateway, a call": lambda: asked(bodies(CALLS, 1, False), False),
            "gateway, a streamed call": lambda: asked(bodies(CALLS, 1, True), False),
        }
        counts = {name: work() for name, work in ways.items()}  # also warms each of them
        assert counts["streams"] == counts["whole"] == counts["in process"], counts
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for turn in range(pairs):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                found[name].append(timed(ways[name]))
        other.stdin.close()
    engine.close()
    weights = sum(p.numel() for p in model.network.parameters())
    return {"weights": weights, "figures": found}


def ratio(found: dict[str, list[dict[str, float]]], name: str, by: str) -> float:
    """Tokens a second of a way over those in process: the median of the pairs."""
    pairs = zip(found[name], found["in process"], strict=True)
    return statistics.median((a["tokens"] / a[by]) / (b["tokens"] / b[by]) for a, b in pairs)


def beyond(found: dict[str, list[dict[str, float]]], name: str, by: str) -> float:
    """Milliseconds of a call beyond the engine's: the median of the pairs."""
    pairs = zip(found[name], found["engine, a call"], strict=True)
    return 1000 * statistics.median((a[by] - b[by]) / CALLS for a, b in pairs)


def main() -> None:
    """Measure, or be the client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", default=str(RESULTS))
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        return client()
    from psigrad.runs.machine import provenance

    made = measure(given.pairs, given.threads)
    found = made["figures"]
    lines = {
        f"{way}, tokens a second beside sampling in process, by the {by}": ratio(found, way, by)
        for way in ("streams", "whole")
        for by in ("clock", "processor")
    }
    lines |= {
        f"{way}, ms beyond the engine, by the {by}": beyond(found, way, by)
        for way in ("gateway, a call", "gateway, a streamed call")
        for by in ("clock", "processor")
    }
    for name, value in lines.items():
        print(f"{value:8.3f}  {name}")
    kept = {"pairs": given.pairs, "threads": given.threads, **provenance("cpu"), "medians": lines, **made}
    Path(given.json).write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
