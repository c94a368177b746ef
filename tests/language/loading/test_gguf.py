"""`--model FILE.gguf`: the same weights, tokens and template as the folder, for every command that takes a model."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import psigrad
from psigrad import cli
from psigrad.config import Model
from psigrad.language.loading.model_source import convert_to_folder, locate
from psigrad.language.models import tiny

TALK = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    return tiny_gguf.make(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_weights_tokens_and_template_are_those_of_the_folder(made):
    folder, file = made
    place = convert_to_folder(str(file))
    assert convert_to_folder(str(file.parent)) == place, "a folder with one file is that file"
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in (place, folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    words = [AutoTokenizer.from_pretrained(path) for path in (place, folder)]
    one, other = (w.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"] for w in words)
    assert one == other and words[0].eos_token_id == words[1].eos_token_id
    assert "quantization_config" not in json.loads((Path(place) / "config.json").read_text())


def test_grpo_sample_and_eval_take_the_file_and_compute_the_same(made, tmp_path, capsys):
    asked_of = tmp_path / "sums.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 3?"}], "answer": str(n + 3)} for n in range(8)]
    asked_of.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, learnt = [], []
    for name, model in zip(("folder", "file"), made, strict=True):
        common = ["--model", str(model), "--max-completion-length", "6", "--no-progress"]
        answers = tmp_path / f"{name}.jsonl"
        asked = ["--dataset", str(asked_of), "--eval-prompts", "4"]
        assert cli.main(["sample", *common, *asked, "--num-generations-eval", "1", "--output", str(answers)]) == 0
        assert cli.main(["eval", *common, *asked, "--reward", "numeric"]) == 0
        said.append(answers.read_text())
        settings = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 6, "eval_prompts": 0}
        run = psigrad.train(
            "grpo",
            model=model,
            dataset=str(asked_of),
            reward="numeric",
            output_dir=str(tmp_path / name),
            progress=False,
            report=False,
            **settings,
        )
        learnt.append((run.folder / "metrics.jsonl").read_text())
    assert said[0] == said[1] and said[0].count("\n") == 4
    assert learnt[0] == learnt[1] and '"step": 1' in learnt[0]


def test_reward_models_and_critics_of_a_policy_in_codes_are_whole_models(made, tmp_path):
    """What quantize_base says is the policy's base alone: these are folders, or the file with every weight as a number."""
    folder, file = made
    tokenizer = AutoTokenizer.from_pretrained(folder)
    judge = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    rows = [{"prompt": f"What is {n} + 3?"} for n in range(4)]
    short = {"max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "eval_prompts": 0}
    coded = {"model": file, "lora_rank": 2, "quantize_base": "gguf", "reward_model": [str(tmp_path / "judge")]}
    for name, critic in (("folder", {"critic": str(folder)}), ("own", {})):
        quiet = {"output_dir": tmp_path / name, "progress": False, "report": False, "threads": 1}
        done = psigrad.train("ppo", dataset=rows, **coded, **critic, **short, **quiet)
        assert done.history[-1]["step"] == 1 and done.history[-1]["critic/grad_norm"] > 0


@pytest.mark.parametrize("coded", [False, True], ids=["numbers", "codes"])
def test_the_folder_ends_texts_where_the_file_and_its_template_do(coded, tmp_path):
    """The EOS is <|endoftext|>, 0; turns end with <|im_end|>, 3; the file's end of a message is 2."""
    tokenizer = tiny.tokenizer(["What is 2 + 3? 2 + 3 = 5"] * 3, 290)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    network = tiny.model("llama", len(tokenizer), hidden=32, layers=1, heads=4)
    with pytest.MonkeyPatch.context() as patch:
        eos = gguf.GGUFWriter.add_eos_token_id
        patch.setattr(gguf.GGUFWriter, "add_eos_token_id", lambda self, i: (eos(self, i), self.add_eom_token_id(2)))
        file = tiny_gguf.write(network, tokenizer, tmp_path / "chat.gguf")
    place = Path(locate(Model(path=str(file), quantize_base="gguf" if coded else "")))
    told = json.loads((place / "generation_config.json").read_text())
    assert told["eos_token_id"] == [0, 2, 3] and (told["bos_token_id"], told["pad_token_id"]) == (0, 1)
    assert (place / "weights.gguf").exists() == coded and (place / "chat_template.jinja").exists()
