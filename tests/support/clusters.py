"""What tests of clusters and launchers share."""

from __future__ import annotations

from pathlib import Path

# By default Ray's workers have a niceness of 15, so beside other programs they get next to nothing of a processor.
PATIENT = {"RAY_worker_niceness": "0"}


def same(one: Path, other: Path) -> None:
    """Assert that two run folders hold the same bytes."""
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
