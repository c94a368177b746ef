"""The tiny job on disk, and one torch thread: forks of a process with torch's threads running would hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_jobs import make_job

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def job(tmp_path_factory) -> Path:
    """base/ (a 30k-parameter model), train.jsonl and held_out.jsonl: repeat the letter you see."""
    return make_job(tmp_path_factory.mktemp("job"))
