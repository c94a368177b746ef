"""The folder of a run where a model is expected: the model in it is named."""

from __future__ import annotations

import json

import pytest

from psigrad import cli
from psigrad.errors import UserError
from psigrad.language.loading.model_source import check_path


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints, and nothing in it that a loader would take."""
    for name in ("checkpoints/step-00000002", "checkpoints/step-00000010", "checkpoints/step-00000011"):
        (tmp_path / "run" / name).mkdir(parents=True)
        if not name.endswith("11"):  # this one is in shards
            (tmp_path / "run" / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": {"path": "base"}}))
    return tmp_path / "run"


def test_the_trained_model_is_named_else_the_newest_checkpoint(run):
    newest = run / "checkpoints" / "step-00000010"
    for given in (run, run / "checkpoints"):
        with pytest.raises(UserError, match=rf"'{given}' is the folder of a run, not of a model; give '{newest}'\.$"):
            check_path(str(given))
    check_path(str(newest))
    (run / "model").mkdir()
    (run / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=rf"\(the reference\) is the folder of a run, not of a model; give '{run}/model'\.$"):
        check_path(str(run), "the reference")
    check_path(str(run / "model"))


def test_a_run_of_transformers_is_one_too(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match=r"give '.*checkpoint-10'\.$"):
        check_path(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))  # save_model puts the model beside them
    check_path(str(tmp_path))


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "--reward", "exact", "--model"],
        ["check", "--model"],
        ["plan", "grpo", "--model"],
        ["plan", "grpo", "--lora-rank", "4", "--model"],
        ["score", "--reward", "exact", "--tokenizer"],
    ],
)
def test_every_command_says_so(command, run, capsys):
    rows = run.parent / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "completion": "b", "answer": "b"}) + "\n")
    assert cli.main([*command, str(run), "--dataset", str(rows)]) == 2
    assert f"give '{run / 'checkpoints' / 'step-00000010'}'." in capsys.readouterr().err
