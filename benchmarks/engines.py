"""Sampling speed of psigrad and of llama.cpp or vLLM, with the same weights in the same precision.

`make bench-llama-cpp MODEL=PATH` or `make bench-vllm MODEL=PATH` run the benchmark. The engines sample the same numbers of tokens
in alternation, with the same number of threads: psigrad and vLLM (compiled, its default) in one call, llama.cpp by its server
with a slot for each sequence. Each sequence has a different prompt. Both engines sample from the full softmax at temperature 1,
and continue after an end of text. Tokens per second count sampled tokens; the time includes the prompts.

With --dtype q4_0 or q8_0 both engines read the same weights in this format from a GGUF file. psigrad samples with a LoRA adapter
of rank 8 on them, llama.cpp without an adapter.

Before the timing, each engine continues every prompt greedily. The number of equal tokens up to the first difference is printed.
In bfloat16 rounding decides near-ties, so continuations diverge sooner or later.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from psigrad.config import Model, Run
from psigrad.intervals import over_seeds
from psigrad.language.loading import load_model
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Request, SamplingParams
from psigrad.runs.machine import prepare_torch, provenance
from psigrad_extras.connect import exporting

PROMPT = 64
GREEDY = 16  # greedy tokens that are compared
STORED = {"float32": "f32", "bfloat16": "bf16", "q8_0": "q8_0", "q4_0": "q4_0"}
Prompts = Sequence[list[int]]
Sample = Callable[[Prompts, int, int, float], list[list[int]]]


def stored(folder: str, room: Path, dtype: str) -> str:
    """Write the model as a GGUF file into `room`, and return its path."""
    return str(exporting.run(folder, "gguf", str(room / dtype), STORED[dtype]).path)


def ours(folder: str, room: Path, dtype: str, threads: int) -> Sample:
    """Return psigrad's function (prompts, tokens, seed, temperature) -> completions."""
    settings = Model(path=folder, dtype=dtype)
    if dtype.startswith("q"):
        settings = Model(path=stored(folder, room, dtype), dtype="bfloat16", quantize_base="gguf", lora_rank=8)
    model = load_model.load_model(settings, Run(threads=threads), None)
    sampler = EmbeddedSampler(model)

    def sample(prompts: Prompts, tokens: int, seed: int, temperature: float) -> list[list[int]]:
        requests = [Request(tuple(ids), (seed + place,)) for place, ids in enumerate(prompts)]
        made: dict[int, list[int]] = {}
        for step in sampler.steps(requests, SamplingParams(tokens, temperature), None):
            for place, found in step:
                made[place] = [token for one in found for token in one.ids]
        return [made[place] for place in range(len(prompts))]

    return sample


def by_llama_cpp(folder: str, room: Path, dtype: str, sequences: int, threads: int, tokens: int) -> Sample:
    """Return the same function for llama.cpp."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = stored(folder, room, dtype)
    settings.n_parallel, settings.n_ctx = sequences, sequences * (PROMPT + tokens + 64)
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "samplers": ["temperature"], "repeat_penalty": 1.0, "ignore_eos": True}

    def sample(prompts: Prompts, tokens: int, seed: int, temperature: float) -> list[list[int]]:
        def one(place: int) -> list[int]:
            asked: dict[str, Any] = {"prompt": prompts[place], "max_tokens": tokens, "seed": seed + place, "cache_prompt": False}
            if temperature == 0:
                asked["logprobs"] = 1  # only with log-probs, which take time, does llama.cpp return token ids
            found = server.handle_completions({**plain, **asked, "temperature": temperature})
            made = found if isinstance(found, dict) else json.loads(found)
            if temperature > 0:
                return [-1] * int(made["usage"]["completion_tokens"])
            return [token["id"] for token in made["choices"][0]["logprobs"]["content"]]

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, range(len(prompts))))

    return sample


def by_vllm(folder: str, room: Path, dtype: str, sequences: int, threads: int, tokens: int) -> Sample:
    """Return the same function for vLLM, whose engine is a separate process. No prompt is repeated, so it has no prefix cache."""
    os.environ.update(OMP_NUM_THREADS=str(threads), VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    import vllm

    engine = vllm.LLM(
        folder,
        dtype=dtype,
        max_model_len=PROMPT + tokens,
        max_num_seqs=sequences,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        generation_config="vllm",
        disable_log_stats=True,
    )

    def sample(prompts: Prompts, tokens: int, seed: int, temperature: float) -> list[list[int]]:
        # with a seed per request, vLLM would sample one request at a time
        drawn = vllm.SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False)
        found = engine.generate([{"prompt_token_ids": ids} for ids in prompts], drawn, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    return sample


ENGINES = {"llama.cpp": by_llama_cpp, "vllm": by_vllm}


def rate(sample: Sample, prompts: Prompts, tokens: int, seed: int) -> float:
    """Return the sampled tokens per second."""
    begin = time.perf_counter()
    made = sample(prompts, tokens, seed, 1.0)
    seconds = time.perf_counter() - begin
    assert [len(ids) for ids in made] == [tokens] * len(prompts), "completions of another length"
    return tokens * len(prompts) / seconds


def in_common(a: Prompts, b: Prompts) -> tuple[int, int]:
    """Return the number of equal tokens before the first difference, summed over completions, and the number of all tokens."""
    same = 0
    for one, two in zip(a, b, strict=True):
        same += next((at for at, (x, y) in enumerate(zip(one, two, strict=True)) if x != y), len(one))
    return same, sum(map(len, a))


def main() -> None:
    """Print a line for each number of sequences as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--beside", default="llama.cpp", choices=ENGINES)
    parser.add_argument("--dtype", default="bfloat16", choices=STORED)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if given.beside == "vllm" and given.dtype.startswith("q"):
        parser.error("vLLM reads no GGUF files here; choose --dtype float32 or bfloat16")
    prepare_torch(Run(threads=given.threads))
    folder = convert_to_folder(given.model)
    print(provenance("cpu")["processor"], given.dtype, f"{given.threads} threads", flush=True)
    rng = random.Random(0)

    def drawn(count: int) -> Prompts:
        return [[rng.randrange(100, 10000) for _ in range(PROMPT)] for _ in range(count)]

    for sequences in given.sequences:
        with tempfile.TemporaryDirectory() as room:
            mine = ours(folder, Path(room) / "ours", given.dtype, given.threads)
            other = ENGINES[given.beside](folder, Path(room), given.dtype, sequences, given.threads, given.tokens)
            prompts = drawn(sequences)
            same, of = in_common(*(sample(prompts, GREEDY, 0, 0.0) for sample in (mine, other)))
            rates = []
            for turn in range(given.rounds + 1):  # the first round is a warm-up
                prompts = drawn(sequences)
                rates.append(tuple(rate(sample, prompts, given.tokens, 1000 * turn) for sample in (mine, other)))
            (own, _, _), (beside, _, _) = (over_seeds([pair[side] for pair in rates[1:]]) for side in (0, 1))
            mean, low, high = over_seeds([a / b for a, b in rates[1:]])
            print(f"{sequences:3} sequences: psigrad {own:7.1f} tokens/s, {given.beside} {beside:7.1f}: "
                  f"{mean:.2f} times [{low:.2f}, {high:.2f}]; {same} of {of} greedy tokens are equal", flush=True)  # fmt: skip
            del mine, other


if __name__ == "__main__":
    main()
