"""Paths are found once, at the start: code of the user that changes the folder changes nothing, and `~` is the home folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import psigrad
from psigrad import cli
from psigrad.config import SFTConfig
from psigrad.config.load import load, to_dict
from psigrad.errors import UserError

WANDERS = """
import os
os.chdir("/")

def reward(completions, **columns):
    os.chdir("/")
    return [float(len(one)) for one in completions]

class Wanders:
    def __init__(self):
        os.chdir("/")

    def on_train_begin(self, *given, **more):
        os.chdir("/")

    on_step_begin = on_step_end = on_log = on_evaluate = on_save = on_train_end = on_train_begin
"""
SMALL = {"max_steps": 2, "max_completion_length": 4, "save_steps": 1, "eval_prompts": 4, "threads": 1}
SMALL |= {"progress": False, "report": False}


@pytest.fixture
def project(job, tmp_path, monkeypatch):
    """A folder that is the current one and the home, with links to the job."""
    for name in ("base", "train.jsonl"):
        (tmp_path / name).symlink_to(job / name)
    (tmp_path / "mine.py").write_text(WANDERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("output", ["runs/a", "~/runs/a"])
def test_code_that_changes_the_folder_changes_no_path(output, project, monkeypatch):
    given = {"reward": "mine.py:reward", "callbacks": ["mine.py:Wanders"], "output_dir": output, "lora_rank": 2}
    result = psigrad.train("grpo", model="base", dataset="~/train.jsonl", num_generations=2, prompts_per_step=2, **given, **SMALL)
    assert os.getcwd() == str(project) and result.folder == project / "runs" / "a"
    monkeypatch.chdir("/")
    assert [row["step"] for row in result.history if "loss" in row or "reward" in row] == [1, 2]
    assert len(result.tokenizer()) and result.load().num_parameters()
    assert {path.name for path in project.iterdir()} - {"__pycache__", ".cache"} == {"base", "train.jsonl", "mine.py", "runs"}


def test_settings_are_recorded_as_they_were_typed(project):
    config = load(SFTConfig, flags={"model.path": "base", "data.dataset": ["train.jsonl:0.5", "org/name"], "output_dir": "~/new"})
    assert config.model.path == str(project / "base") and config.run.output_dir == str(project / "new")
    assert list(config.data.dataset) == [f"{project}/train.jsonl:0.5", "org/name"], "a name that is no file stays"
    made = to_dict(config)
    assert (made["model"]["path"], made["run"]["output_dir"]) == ("base", "~/new")
    assert made["data"]["dataset"] == ["train.jsonl:0.5", "org/name"]


def test_a_name_that_no_file_system_takes_is_a_sentence(project, capsys):
    asked = ["sft", "--model", "base", "--dataset", "train.jsonl", "--output-dir", "ä" * 128]
    assert cli.main(asked) == 2
    assert "has 256 bytes" in capsys.readouterr().err
    (project / "gone").symlink_to("nowhere")
    for name, said in {
        "a\0b": "has a NUL",
        "gone": "gone is a link to nothing",
        "train.jsonl/x": "train.jsonl is a file",
    }.items():
        assert cli.main([*asked[:-1], name]) == 2
        assert said in capsys.readouterr().err
    asked[-1] = "x" * 255
    with pytest.raises(UserError, match="255"):
        load(SFTConfig, flags={"output_dir": "y" * 256})
    assert load(SFTConfig, flags={"output_dir": asked[-1]}).run.output_dir == asked[-1]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--model", "nowhere/path", "--dataset", "train.jsonl"],
        ["--model", "base", "--dataset", "nowhere.jsonl"],
        ["--model", "base", "--dataset", "train.jsonl", "--columns", "question=prompt"],
    ],
)
@pytest.mark.parametrize("output", [[], ["--output-dir", "runs/a"], ["--output-dir", "empty"]])
def test_a_start_that_is_refused_leaves_no_folder(wrong, output, project, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (project / "empty").mkdir()
    before = sorted(project.rglob("*"))
    assert cli.main(["grpo", *wrong, "--reward", "exact", *output]) == 2
    assert capsys.readouterr().err
    assert sorted(path for path in project.rglob("*") if "__pycache__" not in path.parts) == before


def test_negative_control_a_run_that_began_leaves_its_folder(project):
    (project / "fails.py").write_text("class Fails:\n    def on_step_end(self, *given, **more):\n        raise ValueError\n")
    asked = ["sft", "--model", "base", "--dataset", "train.jsonl", "--callbacks", "fails.py:Fails", "--output-dir", "runs/a"]
    assert cli.main([*asked, "--max-steps", "2"]) == 2
    assert Path("runs/a/checkpoints/step-00000001").is_dir()
