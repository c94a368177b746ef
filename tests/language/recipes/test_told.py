"""What a run says at its start: that sequences are padded, that the model is never told of its tools."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny_jobs import online_config
from tiny_rewards import add, lengths
from transformers import AutoModelForCausalLM, MambaConfig

from psigrad.config import Model
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import CHATML, describe_rewrites
from psigrad.language.models import language_model, tiny
from psigrad.language.recipes import online
from psigrad.records.read import load
from psigrad.records.report.facts import facts

OFFERS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
TALK = [{"role": "user", "content": "2 + 3?"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "sum", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("template", "row", "ignored"),
    [
        (CHATML, Row("x", prompt=TALK, columns={"tools": [TOOL]}), True),
        (OFFERS, Row("x", prompt=TALK, columns={"tools": [TOOL]}), False),
        (CHATML, Row("x", prompt=TALK), False),
        (CHATML, Row("x", prompt="2 + 3?", columns={"tools": [TOOL]}), False),
    ],
)
def test_a_template_without_words_for_tools_is_noticed(template, row, ignored):
    tokenizer = tiny.tokenizer(["2 + 3?"] * 5, 280)
    tokenizer.chat_template = template
    assert bool([note for note in describe_rewrites(tokenizer, row) if note.startswith("tools are listed")]) == ignored


@pytest.mark.usefixtures("rewards_here")
@pytest.mark.parametrize(("template", "told"), [(CHATML, 1), (OFFERS, 0)])
def test_a_run_says_so_once(template, told, job, tmp_path, capsys):
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps({"prompt": TALK, "answer": "5"}) + "\n" for _ in range(4)))
    tokenizer = tiny.tokenizer(["2 + 3?"] * 5, 280)
    tokenizer.chat_template = template
    tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, max_length=1024).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = online_config(job, tmp_path / "run", max_steps=1)
    config = replace(config, model=Model(path=str(tmp_path / "model")), tools=(add,), max_turns=1, reward=(lengths,))
    online.run(
        replace(
            config,
            data=replace(config.data, dataset=str(data), eval_dataset=""),
            evaluation=replace(config.evaluation, eval_prompts=0),
        )
    )
    assert capsys.readouterr().err.count("tools are listed in the system prompt") == told


def test_a_padded_model_is_told(job, tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 4}
    AutoModelForCausalLM.from_config(MambaConfig(**sizes, bos_token_id=None, eos_token_id=0, pad_token_id=1)).save_pretrained(
        tmp_path / "model"
    )
    tiny.tokenizer(["say a:"] * 5, 280).save_pretrained(tmp_path / "model")
    config = online_config(job, tmp_path / "run", max_steps=1)
    online.run(replace(config, model=Model(path=str(tmp_path / "model"))))
    assert capsys.readouterr().err.count("Sequences are padded, not packed") == 1
    said = dict(facts(load(tmp_path / "run")))["Slower"]
    assert said.startswith("Sequences are padded, not packed, which takes two to five times") and "MambaForCausalLM" in said
    online.run(online_config(job, tmp_path / "packed", max_steps=1))
    assert "padded" not in capsys.readouterr().err
    # nothing, or that there is no compiler
    assert "padded" not in dict(facts(load(tmp_path / "packed"))).get("Slower", "")


@pytest.mark.parametrize(
    ("padded", "unfused", "said"),
    [
        ("", "", ""),
        ("a reason", "", "Sequences are padded, not packed, which takes two to five times the time and memory: a reason."),
        ("", "a reason", "Layers run in transformers' modules, not fused, which takes up to twice the time: a reason."),
    ],
)
def test_what_a_slower_way_costs_is_said(padded, unfused, said, job):
    model = language_model.load(str(job / "base"))
    model.why_padded, model.why_unfused = padded, unfused
    assert model.slow_reason == said
