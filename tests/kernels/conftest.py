"""A tokenizer for the models whose products are compared."""

from __future__ import annotations

import pytest

from psigrad.language.models import tiny


@pytest.fixture(scope="session")
def tokenizer():
    return tiny.tokenizer(["hello world 123"] * 5, 280)
