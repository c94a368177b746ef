"""Sampling beside llama.cpp, with the same weights in the same precision: `make bench-llama-cpp MODEL=PATH`.

Both are asked for the same completions at once, in turn, in one process: psigrad's sampler in one call, llama.cpp by its server's
slots, as many as there are sequences, from as many threads. Every sequence has a prompt of its own, both draw from the whole
softmax at temperature 1, and a model's end of text counts for neither. Tokens per second include the prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xllamacpp

from psigrad.config import Run
from psigrad.intervals import over_seeds
from psigrad.language.loading.model_source import plain_folder
from psigrad.language.models import language_model
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad.runs.machine import prepare_torch, provenance
from psigrad_extras.connect import exporting

PROMPT = 64
STORED = {"float32": "f32", "bfloat16": "bf16"}
Sample = Callable[[list[list[int]], int, int], int]


def ours(folder: str, dtype: str) -> Sample:
    """(prompts, tokens, seed) -> tokens sampled, by psigrad."""
    model = language_model.load(folder, dtype=dtype)
    sampler = EmbeddedSampler(model)

    def sample(prompts: list[list[int]], tokens: int, seed: int) -> int:
        requests = [Request(tuple(ids), (seed + place,)) for place, ids in enumerate(prompts)]
        steps = sampler.steps(requests, SamplingParams(tokens), None)
        return sum(len(one.ids) for step in steps for _, found in step for one in found)

    return sample


def theirs(file: Path, sequences: int, threads: int, tokens: int) -> Sample:
    """The same by llama.cpp."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_parallel = str(file), sequences
    settings.n_ctx = sequences * (PROMPT + tokens + 64)
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"], "repeat_penalty": 1.0}

    def sample(prompts: list[list[int]], tokens: int, seed: int) -> int:
        def one(place: int) -> int:
            asked: dict[str, Any] = {"prompt": prompts[place], "max_tokens": tokens, "ignore_eos": True, "seed": seed + place}
            found = server.handle_completions({**plain, **asked, "cache_prompt": False})
            return int((found if isinstance(found, dict) else json.loads(found))["usage"]["completion_tokens"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            return sum(pool.map(one, range(len(prompts))))

    return sample


def rate(sample: Sample, prompts: list[list[int]], tokens: int, seed: int) -> float:
    """Tokens per second."""
    begin = time.perf_counter()
    return sample(prompts, tokens, seed) / (time.perf_counter() - begin)


def main() -> None:
    """Print a line for each count of sequences, as it is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", choices=STORED)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    prepare_torch(Run(threads=given.threads))
    folder = plain_folder(given.model)
    print(provenance("cpu")["processor"], given.dtype, f"{given.threads} threads", flush=True)
    mine, rng = ours(folder, given.dtype), random.Random(0)
    with tempfile.TemporaryDirectory() as room:
        file = exporting.run(folder, "gguf", str(Path(room) / "out"), STORED[given.dtype]).path
        for sequences in given.sequences:
            other = theirs(file, sequences, given.threads, given.tokens)
            rates = []
            for turn in range(given.rounds + 1):  # the first warms both up
                prompts = [[rng.randrange(100, 10000) for _ in range(PROMPT)] for _ in range(sequences)]
                rates.append(tuple(rate(sample, prompts, given.tokens, 1000 * turn) for sample in (mine, other)))
            (own, _, _), (beside, _, _) = (over_seeds([pair[side] for pair in rates[1:]]) for side in (0, 1))
            mean, low, high = over_seeds([a / b for a, b in rates[1:]])
            print(f"{sequences:3} sequences: psigrad {own:7.1f} tokens/s, llama.cpp {beside:7.1f}: "
                  f"{mean:.2f} times [{low:.2f}, {high:.2f}]", flush=True)  # fmt: skip
            del other


if __name__ == "__main__":
    main()
