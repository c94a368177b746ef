"""The tokenizer of the tiny models that are trained in memory."""

from __future__ import annotations

import pytest

from psigrad.language.models import tiny


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer(["say a: b"], 270)
