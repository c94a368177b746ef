"""Tiny models of several architectures and requests to their samplers."""

from __future__ import annotations

import random

import pytest
import torch

from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.rollout.types import Request

ARCHITECTURES = ("qwen3", "llama", "gpt2", "gpt_neox")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer(["hello world 123"] * 5, 280)


@pytest.fixture(scope="module")
def models(tokenizer):
    made = {}
    for name in ARCHITECTURES:
        made[name] = prepare(tiny.model(name, len(tokenizer)), tokenizer)
        with torch.no_grad():  # twice the initial weights: distributions that differ between prompts and tokens
            for p in made[name].network.parameters():
                p.mul_(2)
    return made


@pytest.fixture(scope="module")
def requests_():
    rng = random.Random(0)
    return [
        Request(
            tuple(rng.randrange(5, 260) for _ in range(rng.randint(1, 20))),
            tuple(rng.getrandbits(63) for _ in range(rng.randint(1, 6))),
        )
        for _ in range(9)
    ]
