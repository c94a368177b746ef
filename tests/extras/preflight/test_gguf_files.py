"""A GGUF file is planned, timed and asked as the folder is that it was made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gguf
import torch
from timed.inputs import prepare
from timed.workload import Workload
from transformers import AutoModelForCausalLM

import psigrad
from psigrad import cli
from psigrad.language.loading.load_model import load_model
from psigrad_extras import sums
from psigrad_extras.connect import likelihood


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    return tiny_gguf.make(tmp_path_factory.mktemp("gguf"))


def test_plan_and_bench_take_the_file_and_a_folder_with_it(made, tmp_path, capsys):
    train, _ = sums.prepare(tmp_path)
    told = []
    for model in (made[0], made[1], made[1].parent):
        plan = ["plan", "grpo", "--model", str(model), "--dataset", str(train), "--reward", "numeric"]
        assert cli.main([*plan, "--memory", "8GB", "--max-steps", "3"]) == 0
        # but for the speed, which is measured and never twice the same
        told.append(capsys.readouterr().out.partition("\nspeed")[0].splitlines())
    assert told[0] == told[1] == told[2] and any(line.startswith("lengths") and "the first" in line for line in told[0]), told[0]
    work = Workload("tiny", "", prompts=1, generations=2, prompt_tokens=4, completion_tokens=4)
    prepare(work, str(made[1]), tmp_path / "work")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "work" / "model", made[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "its own weights are timed, not random ones"


@pytest.mark.long
def test_a_real_file_knows_what_everybody_knows(tmp_path):
    """SmolLM2-135M-Instruct, from the package index."""
    known = likelihood.everyday(load_model(psigrad.config.Model(path=str(sums.smollm2(tmp_path))), psigrad.config.Run(), None))
    assert sum(item.right for item in known) > 90
