"""How often vLLM's sampler takes an honest update of the weights for a missed one, and a missed one for honest.

python benchmarks/vllm_probe.py MODEL [--dtype bfloat16] [--honest 20] [--weights 0] [--rate 1e-3] [--output FILE.jsonl]

Before each update every weight takes a step of `rate` times its size in a random direction, rounded as its type is. In honest
updates all of it is sent. A sabotaged one leaves out one weight, or sends it with the wrong sign; does not pack a tied head
again; or keeps the prefix cache. --weights says how many weights, drawn at random, are sabotaged in both ways; 0: all of them.
One line of JSON for each update goes to the file, which is gone on with; the summary is printed. It needs vLLM.
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

from psigrad.language.models import language_model
from psigrad_extras.vllm.vllm_backend import VLLMSampler

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from vllm_sabotage import switch


def main() -> None:
    """Honest and sabotaged updates in turn, from one engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--honest", type=int, default=20)
    parser.add_argument("--weights", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--output", default="")
    given = parser.parse_args()
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
