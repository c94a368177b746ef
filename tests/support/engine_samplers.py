"""A tiny model, requests of it, and what the stand-in for vLLM's engine writes to them."""

from __future__ import annotations

import torch
from engine_stand_in import completion

from psigrad.language.models import tiny
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.models.lora import Lora
from psigrad.language.rollout.types import Request, SamplingParams

REQUESTS = [Request((5, 6, 7), (1, 2)), Request((8, 9), (3,)), Request((10, 11, 12, 13), (4, 5, 6))]
PARAMS = SamplingParams(max_tokens=6)


def a_model(lora: Lora | None = None) -> LanguageModel:
    torch.manual_seed(0)
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    return prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=1, heads=2), tokenizer, lora=lora)


def nudge(model: LanguageModel) -> None:
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.mul_(1.1)


def expected(model: LanguageModel) -> list[list[tuple[int, ...]]]:
    """What the stand-in samples with the weights of the model."""
    held = {name: p.detach().numpy() for name, p in model.network.named_parameters()}
    return [[completion(held, r.prompt_ids, seed, PARAMS.max_tokens) for seed in r.seeds] for r in REQUESTS]


def ids(groups) -> list[list[tuple[int, ...]]]:
    return [[c.ids for c in group] for group in groups]
