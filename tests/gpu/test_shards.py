"""FSDP2 and NCCL on a GPU, with one process: a run in shards is the run without, and goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_jobs import make_job

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def train(job: Path, out: Path, recipe: str, *given: str) -> list[dict]:
    """The rows of a run by the command line."""
    data = {"grpo": "train", "sft": "train", "dpo": "pairs"}[recipe]
    common = [f"--model={job / 'base'}", f"--dataset={job / data}.jsonl", f"--output-dir={out}", "--device=cuda", "--no-report"]
    common += ["--no-progress", "--eval-prompts=0", "--save-steps=2", "--learning-rate=1e-3", "--lr-scheduler-type=constant"]
    own = (
        ["--reward=exact", "--max-completion-length=6", "--prompts-per-step=4", "--num-generations=4"] if recipe == "grpo" else []
    )
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "psigrad", recipe, *common, *own, *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("recipe", ["grpo", "sft", "dpo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_in_shards_is_the_run_without(job, tmp_path, recipe, dtype):
    plain = train(job, tmp_path / "plain", recipe, "--max-steps=4", f"--dtype={dtype}")
    shards = train(job, tmp_path / "shards", recipe, "--max-steps=4", f"--dtype={dtype}", "--strategy=fsdp")
    close = 2e-3 if dtype == "float32" else 0.2
    for one, other in zip(plain, shards, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=close, abs=close), (one["step"], name)
    assert (tmp_path / "shards" / "model" / "model.safetensors").exists()


def test_a_run_in_shards_goes_on_from_its_checkpoint(job, tmp_path):
    whole = train(job, tmp_path / "whole", "sft", "--max-steps=6", "--strategy=fsdp")
    train(job, tmp_path / "half", "sft", "--max-steps=4", "--strategy=fsdp")
    again = train(job, tmp_path / "half", "sft", "--max-steps=6", "--strategy=fsdp", "--extend")
    assert again[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-3)
