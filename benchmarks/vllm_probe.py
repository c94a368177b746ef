"""How often vLLM's sampler takes an honest update of the weights for a missed one, and a missed one for honest.

python benchmarks/vllm_probe.py MODEL [--dtype bfloat16] [--honest 20] [--weights 0] [--rate 1e-3] [--output FILE.jsonl]

Before each update every weight takes a step of `rate` times its size in a random direction, rounded as its type is. In honest
updates all of it is sent. A sabotaged one leaves out one weight, or sends it with the wrong sign; does not pack a tied head
again; or keeps the prefix cache. --weights says how many weights, drawn at random, are sabotaged in both ways; 0: all of them.
One line of JSON for each update goes to the file, which is gone on with; the summary is printed. It needs vLLM.

python benchmarks/vllm_probe.py --stand-in 20 [--layers 8] [--engine]

How often the comparison at the start takes an honest engine in bfloat16 for a wrong one, and one with a layer that is 1 % off for
honest. Without --engine and vLLM: the fused kernels stand for the engine, which round elsewhere than transformers' modules. Each
trial has another model of random weights, and another layer off: by noise of 1 % of each matrix, and with all its weights 1 %
larger.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from psigrad.language.models import language_model, tiny
from psigrad.language.models.packing import Rows
from psigrad_extras.vllm import vllm_probe as probes
from psigrad_extras.vllm.vllm_backend import VLLMSampler

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from vllm_sabotage import switch


def main() -> None:
    """Honest and sabotaged updates in turn, from one engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--honest", type=int, default=20)
    parser.add_argument("--weights", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--output", default="")
    parser.add_argument("--stand-in", type=int, default=0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--engine", action="store_true")
    given = parser.parse_args()
    if given.stand_in:
        for kind, found in stand_in(given.stand_in, given.layers, engine=given.engine).items():
            refused = sum(share > 1 for share in found)
            print(f"{kind}: {refused} of {len(found)} refused; {min(found):.2f} to {max(found):.2f} of the bound")
        return
    done = [json.loads(line) for line in Path(given.output).read_text().splitlines()] if Path(given.output).is_file() else []
    model = language_model.load(given.model, dtype=given.dtype)
    wanted = [case for case in cases(model, given) if case not in [one["case"] for one in done]]
    with closing(VLLMSampler(model, 4, service="vllm_sabotage:service")) as sampler:
        for count, case in enumerate(wanted):
            switch(sampler)
            moved = change(model, len(done) + count, given.rate)
            switch(sampler, **({} if case[0] == "honest" else {case[0]: case[1]}))
            begun = time.perf_counter()
            _, wrong, unknown, stale = sampler._transfer()
            row = {"case": case, "wrong": wrong, "unknown": unknown, "stale": stale, "seconds": time.perf_counter() - begun}
            row["moved"] = moved.get(str(case[1]), 1.0)
            done.append(row)
            if given.output:
                with Path(given.output).open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(json.dumps({"model": given.model, "dtype": given.dtype, "rate": given.rate, **summary(done)}, indent=1))


def stand_in(trials: int, layers: int, hidden: int = 128, *, engine: bool = False) -> dict[str, list[float]]:
    """Of each trial the distance from float32 as a share of the bound, of an honest engine and of two wrong ones."""
    found: dict[str, list[float]] = {"honest": [], "noise of 1 %": [], "1 % larger": []}
    tokenizer, sampler = tiny.tokenizer(["hello world 123"] * 5, 280), None
    for trial in range(trials):
        network = tiny.model("qwen3", len(tokenizer), hidden=hidden, layers=layers, heads=4, max_length=512, seed=trial)
        with torch.no_grad():
            for weight in network.parameters():  # at its first weights a model attends to everything alike
                weight.mul_(2.5 if weight.ndim == 2 else 1.0)
        model = language_model.prepare(network.bfloat16(), tokenizer)
        if engine:
            sampler = sampler or VLLMSampler(model, 16)
            sampler.model = model
        probe = probes.written(model, probes.TEXTS, probes.LENGTH)
        exact, allowed = probes.exactly(model, probe)
        rows = Rows(probe, [[False] + [True] * (len(text) - 1) for text in probe])
        layer = model.network.base_model.layers[trial % layers]
        kept = [p.detach().clone() for p in layer.parameters()]
        generator = torch.Generator().manual_seed(trial)
        for kind, shares in found.items():
            with torch.no_grad():
                for p, before in zip(layer.parameters(), kept, strict=True):
                    whole = before.float()
                    noise = whole.pow(2).mean().sqrt() * torch.randn(whole.shape, generator=generator)
                    p.copy_({"honest": whole, "noise of 1 %": whole + 0.01 * noise, "1 % larger": 1.01 * whole}[kind])
                if sampler is not None:
                    sampler.synchronise()
                logp = model.stats(rows)[0].logp if sampler is None else sampler.engine_log_probs(probe)
            shares.append(probes.distance(logp, exact) / (probes.SPREAD * allowed))
        assert sampler is not None or model.decoder is not None, "the stand-in is another way to compute"
    if sampler is not None:
        sampler.close()
    return found


def cases(model: language_model.LanguageModel, given: Any) -> Iterator[list[Any]]:
    """(what is done, to which weight), the honest ones spread among the others."""
    names = [name for name, _ in model.network.named_parameters()]
    if given.weights:
        names = random.Random(0).sample(names, min(given.weights, len(names)))
    others: list[list[Any]] = [[fault, name] for name in names for fault in ("dropped", "negated")]
    others += [["cache", True]] + ([["head", True]] if model.network.config.get_text_config().tie_word_embeddings else [])
    every = max(1, len(others) // max(1, given.honest))
    for place, case in enumerate(others):
        if place % every == 0 and place // every < given.honest:
            yield ["honest", place // every]
        yield case


@torch.no_grad()
def change(model: language_model.LanguageModel, seed: int, rate: float) -> dict[str, float]:
    """A step, so to say; the share of each weight's entries that it changed."""
    generator, moved = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.network.named_parameters():
        before, size = parameter.clone(), float(parameter.float().pow(2).mean().sqrt())
        sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        parameter.add_((rate * size * sign).to(parameter.dtype))
        moved[name] = float((parameter != before).float().mean())
    return moved


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the upper ends of 95 % intervals of rates of which none was seen: 1 − 0.05^(1/n)."""
    honest = [row for row in rows if row["case"][0] == "honest"]
    bad = [row for row in rows if row["case"][0] != "honest" and row["moved"] > 0]
    alarms = [row for row in honest if row["wrong"] or row["unknown"] or row["stale"]]
    missed = [row for row in bad if not (row["wrong"] or row["stale"])]
    right = sum(row["wrong"] == [row["case"][1]] for row in bad if isinstance(row["case"][1], str))
    seconds = sorted(row["seconds"] for row in rows)
    return {
        "honest": len(honest),
        "alarms": len(alarms),
        "alarms_at_most": round(1 - 0.05 ** (1 / len(honest)), 4) if honest and not alarms else None,
        "sabotaged": len(bad),
        "missed": len(missed),
        "missed_at_most": round(1 - 0.05 ** (1 / len(bad)), 4) if bad and not missed else None,
        "named_alone": right,
        "nothing_to_miss": sum(row["moved"] == 0 for row in rows),
        "least_moved": min((row["moved"] for row in bad), default=None),
        "seconds_median": round(seconds[len(seconds) // 2], 2) if seconds else None,
        "not_noticed": [row["case"] for row in missed],
    }


if __name__ == "__main__":
    main()
