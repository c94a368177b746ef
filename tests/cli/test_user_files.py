"""No command writes into a folder of the user's: models, checkpoints of other libraries, adapters and plain files stay."""

from __future__ import annotations

import json
import shutil

import pytest

import psigrad
from psigrad import cli
from psigrad.errors import UserError

DATA = ["--model", "{job}/base", "--dataset", "{job}/train.jsonl", "--max-steps", "1"]
# command -> its arguments before the name of the folder
FOLDER = {
    "sft": [*DATA, "--output-dir"],
    "grpo": [*DATA, "--reward", "exact", "--output-dir"],
    "reward": [*DATA[:2], "--dataset", "{job}/pairs.jsonl", "--output-dir"],
    "dpo": [*DATA[:2], "--dataset", "{job}/pairs.jsonl", "--output-dir"],
    "control": ["ppo", "--env", "CartPole-v1", "--output-dir"],
    "compare": ["grpo", "rloo", *DATA, "--eval-dataset", "{job}/held_out.jsonl", "--reward", "exact", "--output-dir"],
    "sweep": ["sft", *DATA, "--search", "learning_rate:1e-6..1e-4", "--trials", "1", "--output-dir"],
    "demo": ["--output-dir"],
    "experiment": ["clip", "--out"],
    "export": ["{job}/base", "--to", "merged", "--output"],
    "merge": ["{job}/base", "--output"],
    "init": ["verifiable"],
    "serve": ["{job}/base", "--threads", "1", "--state"],
}
# command -> its arguments before the name of a file
FILE = {
    "eval": ["--model", "{job}/base", "--dataset", "{job}/train.jsonl", "--reward", "exact", "--output"],
    "sample": ["--model", "{job}/base", "--dataset", "{job}/train.jsonl", "--output"],
    "score": ["--dataset", "{job}/train.jsonl", "--reward", "exact", "--output"],
    "pairs": ["--dataset", "{job}/train.jsonl", "--output"],
    "report": ["{run}", "--output"],
    "replay": ["{run}", "--step", "1", "--output"],
    "judge-report": ["{job}/train.jsonl", "--model", "m", "--base-url", "http://localhost:1", "--output"],
    "from-trl": ["{job}/trl.py", "--output"],
}
KINDS = ("model", "checkpoint-10", "adapter", "thesis")


@pytest.fixture
def theirs(job, tmp_path, request):
    """A folder that psigrad did not make, and a file in it."""
    folder = tmp_path / request.param
    if request.param == "thesis":
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "rows.csv").write_text("prompt,answer\n")
        (folder / "thesis.tex").write_text("x")
        return folder, folder / "thesis.tex"
    shutil.copytree(job / "base", folder)
    if request.param == "checkpoint-10":
        (folder / "trainer_state.json").write_text("{}")
        return folder, folder / "trainer_state.json"
    if request.param == "adapter":
        (folder / "config.json").rename(folder / "adapter_config.json")
        return folder, folder / "adapter_config.json"
    return folder, folder / "config.json"


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def words(command, given, last, job, run=""):
    return [command, *(word.format(job=job, run=run) for word in given), str(last)]


@pytest.mark.parametrize("theirs", KINDS, indirect=True)
@pytest.mark.parametrize("command", FOLDER)
def test_a_folder_that_psigrad_did_not_make_is_refused_and_unchanged(command, theirs, job, capsys):
    folder, _ = theirs
    before = content(folder)
    assert cli.main(words(command, FOLDER[command], folder, job)) == 2
    assert "holds files that this command did not write" in capsys.readouterr().err
    assert content(folder) == before


@pytest.mark.parametrize("theirs", KINDS[1:], indirect=True)
@pytest.mark.parametrize("command", FILE)
def test_a_file_that_exists_is_no_output(command, theirs, job, tmp_path, capsys):
    folder, file = theirs
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"recipe": "sft", "format": 1}')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    before = content(folder)
    assert cli.main(words(command, FILE[command], file, job, run)) == 2
    assert f"{file} exists" in capsys.readouterr().err
    assert content(folder) == before


@pytest.mark.parametrize("theirs", KINDS[:1], indirect=True)
def test_a_model_is_not_trained_into_its_own_folder(theirs, job):
    folder, _ = theirs
    before = content(folder)
    with pytest.raises(UserError, match="holds files"):
        psigrad.train("sft", model=str(folder), dataset=str(job / "train.jsonl"), output_dir=str(folder), max_steps=1)
    assert content(folder) == before


def test_negative_control_what_a_command_wrote_is_its_own(job, tmp_path):
    """A page is drawn again, an experiment runs again, and an empty folder takes a project."""
    asked = words("experiment", ["clip", "--out"], tmp_path / "figures", job)
    assert [cli.main(asked), cli.main(asked)] == [0, 0]
    (tmp_path / "project" / ".git").mkdir(parents=True)
    assert cli.main(words("init", ["verifiable"], tmp_path / "project", job)) == 0
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "sft", "format": 1}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    drawn = ["report", str(tmp_path), "--output", str(tmp_path / "page.html")]
    assert [cli.main(drawn), cli.main(drawn)] == [0, 0]
