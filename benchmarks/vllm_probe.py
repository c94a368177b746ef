"""How often vLLM's sampler takes rounding for a missed update, and a missed update for rounding.

python benchmarks/vllm_probe.py MODEL [--dtype bfloat16] [--honest 5] [--sabotaged 20]

Each honest check follows a change of all weights by noise of a hundredth of their size. Each sabotaged one leaves out one weight,
drawn at random. Prints JSON. It needs vLLM.
"""

from __future__ import annotations

import argparse
import json
import random

import torch

from psigrad.errors import UserError
from psigrad.models import language_model
from psigrad.rollout import vllm_backend
from psigrad.rollout.vllm_backend import VLLMSampler


def main() -> None:
    """Honest checks, then sabotaged ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--honest", type=int, default=5)
    parser.add_argument("--sabotaged", type=int, default=20)
    given = parser.parse_args()
    model = language_model.load(given.model, dtype=given.dtype)
    sampler = VLLMSampler(model, 4)
    alarms, bounds, gaps = 0, [], []
    for k in range(given.honest):
        change(model, k)
        try:
            sampler._check_route()
        except UserError:
            alarms += 1
        bounds.append(sampler._bound)
        gaps.append(sampler.gap())
    names = [name for name, _ in model.network.named_parameters()]
    found: list[dict[str, object]] = []
    for name in random.Random(0).sample(names, min(given.sabotaged, len(names))):
        found.append({"left_out": name, "said": sabotaged(sampler, name)})
        sampler._update()
    missed = [one for one in found if not one["said"]]
    right = sum(str(one["left_out"]) in str(one["said"]) for one in found)
    summary = {"honest": given.honest, "alarms": alarms, "sabotaged": len(found), "missed": len(missed), "named_right": right}
    print(
        json.dumps({"model": given.model, "dtype": given.dtype, **summary, "gaps": gaps, "bounds": bounds, "not_noticed": missed})
    )


@torch.no_grad()
def change(model: language_model.LanguageModel, seed: int) -> None:
    """A step, so to say: noise on every weight."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.network.parameters():
        size = float(parameter.float().std()) / 100 if parameter.numel() > 1 else 0.0
        parameter.add_((size * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))


def sabotaged(sampler: VLLMSampler, left_out: str) -> str:
    """What the check says of an update without this weight; empty where it says nothing."""
    named = torch.nn.Module.named_parameters
    whole = vllm_backend.backbone.merged

    class Partial:
        def __init__(self, network: torch.nn.Module) -> None:
            self.network = network

        def named_parameters(self) -> object:
            return (pair for pair in named(self.network) if pair[0] != left_out)

    vllm_backend.backbone.merged = lambda network, adapter: Partial(whole(network, adapter))  # type: ignore[assignment,return-value]
    try:
        sampler._check_route()
    except UserError as error:
        return str(error)
    finally:
        vllm_backend.backbone.merged = whole
    return ""


if __name__ == "__main__":
    main()
