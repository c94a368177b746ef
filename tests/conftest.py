"""One thread for every test and for the processes that it starts: the fork of a process whose torch has threads running would
hang, and two processes of two threads each on two cores spend their time waiting for each other. And no example of hypothesis
is too slow: how long one takes depends on what else the machine does.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, and for `psigrad` in a test's own process or in one of its own

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("psigrad", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("psigrad")


@pytest.fixture(scope="session")
def job(tmp_path_factory) -> Path:
    """base/ (a 30k-parameter model), train.jsonl and held_out.jsonl: repeat the letter you see."""
    from tiny_jobs import make_job

    return make_job(tmp_path_factory.mktemp("job"))
