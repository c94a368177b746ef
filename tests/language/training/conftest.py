"""What is trained: the tokenizer of tiny models in memory, and the model of a job."""

from __future__ import annotations

import pytest

from psigrad.language.models import language_model, tiny


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer(["say a: b"], 270)


@pytest.fixture(scope="module")
def model(job):
    return language_model.load(str(job / "base"))
