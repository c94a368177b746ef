"""A step's trajectories on several processes, and the bytes that each is sent of them."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import reward_view
from psigrad.language.rollout.collectors import Completions, ScoredRollout
from psigrad.language.rollout.scoring import Scored
from psigrad.language.rollout.types import Completion, Prompt, SamplingParams
from psigrad.language.training.online.batching import assign_micro_batches, inputs_of, to_batch
from psigrad.language.training.online.figures import UpdateResult, collection_metrics, rollout_rows
from psigrad.processes.parallel import world as worlds
from psigrad.processes.parallel.world import ALONE, World
from psigrad.step import Clock

PARAMS = SamplingParams(max_tokens=1)


class Written:
    """A sampler of completions that depend on their seeds alone; half of them are drawn from a filtered distribution."""

    def __init__(self, tokens: int, central: bool = False) -> None:
        self.tokens, self.central = tokens, central

    def steps(self, requests, params, cache=None):
        for place, request in enumerate(requests):
            yield [(place, [self.completion(seed) for seed in request.seeds])]

    def completion(self, seed: int) -> Completion:
        rng = np.random.default_rng(seed)
        count = int(rng.integers(self.tokens // 2, self.tokens + 1))
        ids = tuple(rng.integers(0, 150_000, count).tolist())
        logps = tuple((-rng.random(count, dtype=np.float32)).tolist())
        drawn = logps if seed % 2 else tuple(x / 2 for x in logps)
        return Completion(ids, logps, drawn, "stop" if seed % 3 else "length", seed)


def letters(tokenizer, ids) -> str:
    """Four letters a token."""
    return "".join(f"{i % 10_000:04d}" for i in ids)


class Lengths:
    """Scores by length."""

    def begin(self):
        found = []
        return SimpleNamespace(
            add=lambda samples: found.extend(Scored(float(len(ids) % 7)) for ids in samples.completion_ids),
            poll=lambda: None,
            results=lambda: found,
        )


def prompts_of(count: int, tokens: int) -> list[Prompt]:
    texts = [f"prompt {n}" for n in range(count)]
    return [Prompt(n, tuple(range(n, n + tokens)), Row(text, prompt=text)) for n, text in enumerate(texts)]


def collected(
    world: World, prompts: list[Prompt], size: int, tokens: int, central: bool, clock: Clock | None = None, complete: bool = False
) -> list:
    collector = Completions(Written(tokens, central), partial(letters, None))
    rollout = ScoredRollout(collector, Lengths(), reward_view(), world, complete)
    return rollout(prompts, PARAMS, size, lambda i, k: i * size + k, version=0, clock=clock)


def count_bytes(world: World) -> Counter:
    """What this process is sent by others, by the method."""
    found: Counter = Counter()

    def watch(name, sent):
        if (method := getattr(worlds.Ranks, name, None)) is None:
            return

        def watched(self, value):
            got = method(self, value)
            found[name] += sent(got)
            return got

        setattr(worlds.Ranks, name, watched)

    others = lambda got: [part for rank, part in enumerate(got) if rank != world.rank]  # noqa: E731
    watch("broadcast", lambda got: len(pickle.dumps(got)) if world.rank else 0)
    watch("all_gather", lambda got: sum(len(pickle.dumps(part)) for part in others(got)))
    watch("exchange", lambda got: sum(map(len, others(got))))
    return found


def share(world: World, folder: str, count: str, size: str, length: str, central: str = "") -> None:
    """Collect, plan the passes of a step, read what this process computes, and make the rows; all as one process does alone."""
    prompts, shape = prompts_of(int(count), 64), (int(size), int(length), bool(central))
    sent = count_bytes(world)
    rows = collected(world, prompts, *shape)
    groups = [rows[i : i + shape[0]] for i in range(0, len(rows), shape[0])]
    batch = to_batch(groups)
    micros = assign_micro_batches(world, batch, batch.present, 4 * shape[1])
    inputs = [inputs_of(batch, micro) for micro, _ in micros]
    trained = dict(sent)
    holding = SimpleNamespace(trajectories=rows, groups=groups)
    outcome = UpdateResult({}, {}, [0.5] * len(rows))
    written = rollout_rows(world, prompts, holding, outcome, 1, 2) if hasattr(world, "exchange") else []

    whole = collected(ALONE, prompts, *shape)
    alone = [whole[i : i + shape[0]] for i in range(0, len(whole), shape[0])]
    truth = to_batch(alone)
    for name in ("mask", "reward", "logp_old", "logp_sampler", "group"):
        assert torch.equal(getattr(batch, name), getattr(truth, name)), name
    for (micro, _), own in zip(micros, inputs, strict=True):
        right = inputs_of(truth, micro)
        assert [[*map(tuple, g)] for g in own.completions] == [[*map(tuple, g)] for g in right.completions]
        assert [*map(tuple, own.prompts)] == [*map(tuple, right.prompts)]
    assert collection_metrics(rows, shape[0]) == collection_metrics(whole, shape[0])
    if world.rank == 0 and hasattr(world, "exchange"):
        held = SimpleNamespace(trajectories=whole, groups=alone)
        assert json.dumps(written) == json.dumps(rollout_rows(ALONE, prompts, held, outcome, 1, 2))
    mine = sum(len(ids) for own in inputs for group in own.completions for ids in group)
    lengths = [(len(t.completion.ids), t.completion.logprobs is t.completion.sampling_logprobs) for t in whole]
    told = {
        "tokens": sum(length for length, _ in lengths),
        "numbers": sum(length if same else 2 * length for length, same in lengths),
        "own": mine,
        "rows": len(whole),
        "sent": sum(trained.values()),
    }
    Path(folder, f"{world.rank}.json").write_text(json.dumps(told))
