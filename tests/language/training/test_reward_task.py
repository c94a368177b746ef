"""The tasks of reward models: they learn which texts and which steps are right, and open in transformers."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from offline_tasks import read
from tiny_jobs import reward_config
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from psigrad import cli
from psigrad.config import Data, Evaluation, Optim, RewardConfig
from psigrad.errors import UserError
from psigrad.language.recipes import reward

pytestmark = pytest.mark.usefixtures("rewards_here")


def trained_reward_model(job, tmp_path, **changes):
    config = reward_config(job, tmp_path / "rm", max_steps=60, save_steps=0)
    return reward.run(replace(config, batch_size=16, optim=Optim(learning_rate=3e-3), **changes))


def test_a_reward_model_learns_and_opens_in_transformers_with_the_same_scores(job, tmp_path):
    result = trained_reward_model(job, tmp_path)
    assert result.before["eval/accuracy"] < 0.8 < 0.9 < result.after["eval/accuracy"]
    assert result.after["eval/accuracy/low"] < result.after["eval/accuracy"] <= result.after["eval/accuracy/high"] + 1e-9
    assert "eval/calibration_error" in result.after
    rows = [{"prompt": r["prompt"], "completion": r[k]} for r in read(job, "pairs")[:3] for k in ("chosen", "rejected")]
    ours = [row["reward"] for row in reward.score_rows(str(result.model), rows)]
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    peer = AutoModelForSequenceClassification.from_pretrained(result.model)
    texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rows]
    theirs = peer(**tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")).logits[:, 0]
    assert ours == pytest.approx(theirs.tolist(), abs=1e-4)
    assert all(a > b for a, b in zip(ours[0::2], ours[1::2], strict=True))


def test_a_process_reward_model_learns_which_steps_are_right(job, tmp_path):
    rows = [
        {"prompt": r["prompt"], "completions": [r["chosen"], r["rejected"]], "labels": [True, False]} for r in read(job, "pairs")
    ]
    config = reward_config(job, tmp_path / "prm", max_steps=60, save_steps=0)
    config = replace(config, process=True, data=Data(dataset=rows), batch_size=16, optim=Optim(learning_rate=3e-3))
    result = reward.run(config)
    assert result.before["eval/accuracy"] < 0.8 < result.after["eval/accuracy"]


def test_score_prints_one_number_per_row_or_writes_them(job, tmp_path, capsys):
    result = trained_reward_model(job, tmp_path)
    assert cli.main(["score", "--model", str(result.model), "--dataset", str(job / "train.jsonl")]) == 0
    printed = capsys.readouterr().out.split()
    assert len(printed) == 32 and all(float(x) for x in printed)
    output = tmp_path / "scores.txt"
    assert cli.main(["score", "--model", str(result.model), "--dataset", str(job / "train.jsonl"), "--output", str(output)]) == 0
    assert output.read_text().split() == printed
    rows = tmp_path / "scored.jsonl"
    assert cli.main(["score", "--model", str(result.model), "--dataset", str(job / "train.jsonl"), "--output", str(rows)]) == 0
    scored = [json.loads(line) for line in rows.read_text().splitlines()]
    given = [json.loads(line) for line in (job / "train.jsonl").read_text().splitlines()]
    assert [f"{row['reward']:.6g}" for row in scored] == printed
    assert [(row["prompt"], row["completion"]) for row in scored] == [(row["prompt"], row["completion"]) for row in given]


def test_rows_that_are_too_long_are_counted_in_the_events(job, tmp_path):
    rows = [*read(job, "pairs"), {"prompt": "say " + "a " * 40, "chosen": " a", "rejected": " b"}]
    config = replace(reward_config(job, tmp_path / "run", max_steps=1), data=Data(dataset=rows), max_length=20)
    config = replace(config, evaluation=Evaluation(eval_prompts=0))
    reward.run(config)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {"longer_than_max_length": 1, "kept": 40}.items() <= next(e for e in events if e["kind"] == "rows_left_out").items()


def test_a_process_reward_model_of_a_model_without_tokens_is_refused(job, tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(job / "base")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=1, **sizes)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    config = reward_config(job, tmp_path / "run")
    config = replace(config, process=True, model=replace(config.model, path=str(tmp_path / "bert")))
    with pytest.raises(UserError, match="cannot score each token"):
        reward.run(config)
    assert isinstance(config, RewardConfig) and not os.path.exists(tmp_path / "run")
