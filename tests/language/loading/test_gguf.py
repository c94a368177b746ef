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
from psigrad.language.data.templates import CHATML
from psigrad.language.loading.load_model import load_model
from psigrad.language.loading.model_source import plain_folder
from psigrad.language.models import tiny
from psigrad.language.recipes import sums
from psigrad_extras.connect import likelihood
from psigrad_extras.preflight.bench.inputs import prepare
from psigrad_extras.preflight.bench.workload import Workload

TALK = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny chat model as a folder, and the same as a GGUF file in another folder."""
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = tiny.tokenizer(["What is 2 + 3? 2 + 3 = 5"] * 3, 290, digits_alone=False)
    tokenizer.chat_template = CHATML
    network = tiny.model("llama", len(tokenizer), hidden=32, layers=2, heads=4, seed=3)
    network.save_pretrained(folder / "folder")
    tokenizer.save_pretrained(folder / "folder")
    (folder / "file").mkdir()
    return folder / "folder", tiny_gguf.write(network, tokenizer, folder / "file" / "tiny.gguf")


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
    known = likelihood.everyday(load_model(psigrad.config.Model(path=str(file)), psigrad.config.Run(), None))
    assert sum(item.right for item in known) > 90
