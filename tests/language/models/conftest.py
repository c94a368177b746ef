"""Small random models of every architecture that the packed forward promises, tied and untied."""

from __future__ import annotations

import random

import pytest

from psigrad.language.models import backbone, probe, tiny
from psigrad.language.models.fused.gpu_parts import GpuParts
from psigrad.language.models.language_model import LanguageModel, prepare
from psigrad.language.models.packing import Groups

ARCHITECTURES = [(name, tied) for name in ("qwen3", "llama", "gpt2", "gpt_neox") for tied in (True, False)]


@pytest.fixture(scope="session")
def tokenizer():
    return tiny.tokenizer(["hello world 123"] * 5, 280)


@pytest.fixture(scope="session", params=ARCHITECTURES, ids=[f"{n}-{'tied' if t else 'untied'}" for n, t in ARCHITECTURES])
def model(request, tokenizer) -> LanguageModel:
    name, tied = request.param
    return prepare(tiny.model(name, len(tokenizer), tied=tied), tokenizer)


@pytest.fixture(scope="session")
def qwen3(tokenizer) -> LanguageModel:
    return prepare(tiny.model("qwen3", len(tokenizer)), tokenizer)


@pytest.fixture(scope="session")
def groups() -> Groups:
    """Three prompts of 5, 9 and 1 tokens with completions of 1 to 12 tokens."""
    rng = random.Random(0)

    def ids(n: int) -> list[int]:
        return [rng.randrange(260) for _ in range(n)]

    return Groups([ids(5), ids(9), ids(1)], [[ids(3), ids(7)], [ids(1), ids(12), ids(4)], [ids(6)]])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The branches of a GPU on the host."""
    monkeypatch.setattr(backbone, "fuse", lambda model, texts, recompute: (None, ""))
    monkeypatch.setattr(probe, "kernels", lambda: "none on a GPU")
    monkeypatch.setattr(GpuParts, "runs", lambda self, x, *weights: self.on)
