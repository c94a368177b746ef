"""Broken and hostile files of models, settings and rows end a start in one sentence, within seconds."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from psigrad import cli

DEEP = '{"a": ' * 100_000 + "1" + "}" * 100_000
CONFIG = {
    "too many layers": lambda held: {**held, "num_hidden_layers": 10**6},
    "a negative size": lambda held: {**held, "hidden_size": -5},
    "a number as text": lambda held: {**held, "rms_norm_eps": "nan"},
    "no heads": lambda held: {**held, "num_attention_heads": 0},
    "a size with a fraction": lambda held: {**held, "hidden_size": 1.5},
    "a type that is a list": lambda held: {**held, "model_type": [1]},
    "a list": lambda held: [1],
    "depth": lambda held: DEEP,
}


@pytest.mark.parametrize("name", CONFIG)
def test_a_broken_configuration_of_a_model_is_a_sentence(name, job, tmp_path, capsys):
    shutil.copytree(job / "base", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    made = CONFIG[name](json.loads(file.read_text()))
    file.write_text(made if isinstance(made, str) else json.dumps(made))
    asked = ["sft", "--model", str(tmp_path / "model"), "--dataset", str(job / "train.jsonl"), "--max-steps", "1"]
    assert cli.main([*asked, "--output-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"could be loaded from '{tmp_path}/model'" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_backtracks_without_end_is_a_sentence(job, tmp_path, capsys):
    """(a+)+$ needs about 2^60 steps for 60 letters and another character; the library stops after 10 million."""
    shutil.copytree(job / "base", tmp_path / "model")
    file, rows = tmp_path / "model" / "tokenizer.json", tmp_path / "rows.jsonl"
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps({**json.loads(file.read_text()), "pre_tokenizer": split}))
    asked = ["sft", "--model", str(tmp_path / "model"), "--dataset", str(rows), "--max-steps", "1", "--eval-prompts", "0"]
    for count, status in ((60, 2), (6, 0)):  # the second is the negative control
        rows.write_text((json.dumps({"prompt": "a" * count + "!", "completion": " b"}) + "\n") * 4)
        start = time.process_time()
        assert cli.main([*asked, "--threads", "1", "--batch-size", "2", "--output-dir", str(tmp_path / "run")]) == status
        assert status == 0 or time.process_time() - start < 10
        said = capsys.readouterr().err
        assert ("cannot encode 'aaa" in said and "retry-limit-in-match over" in said) == (status == 2), said
        assert (tmp_path / "run").exists() == (status == 0)


def test_settings_of_great_depth_are_a_sentence(tmp_path, capsys):
    bombs = {
        "nested too deeply": "a: " + "[" * 100_000,
        "<< merges more than 100,000 keys": "a0: &a0 {x: 1, y: 2, z: 3}\n"
        + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)),
        "has more than 100,000 values": "a0: &a0 [x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
    }
    for why, text in bombs.items():
        (tmp_path / "deep.yaml").write_text(text)
        assert cli.main(["sft", "--config", str(tmp_path / "deep.yaml")]) == 2
        assert why in capsys.readouterr().err


def test_a_dataset_that_never_ends_is_a_sentence(job, tmp_path, capsys):
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("rows.jsonl", "zero.jsonl"):
        asked = ["sft", "--model", str(job / "base"), "--dataset", str(tmp_path / name), "--max-steps", "1"]
        assert cli.main([*asked, "--output-dir", str(tmp_path / "run")]) == 2
        assert "is not a regular file" in capsys.readouterr().err
