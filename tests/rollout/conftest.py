"""The tiny job on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_jobs import make_job


@pytest.fixture(scope="session")
def job(tmp_path_factory) -> Path:
    """base/ (a 30k-parameter model), train.jsonl and held_out.jsonl: repeat the letter you see."""
    return make_job(tmp_path_factory.mktemp("job"))
