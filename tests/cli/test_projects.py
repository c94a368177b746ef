"""`psigrad init`: each project passes its own tests and trains."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tiny_jobs import forked

from psigrad import cli
from psigrad.cli.begin import KINDS
from psigrad.language.models import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model whose chat template offers tools."""
    place = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny.tokenizer(["What is 10 + 20 * 3? Answer: 70", "Write one line about the sea."], 300)
    tokenizer.chat_template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tiny.model("qwen3", len(tokenizer), hidden=16, layers=1, heads=2, max_length=1024).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def project(request, tmp_path, monkeypatch, capsys):
    assert cli.main(["init", request.param, str(tmp_path / "mine")]) == 0
    assert KINDS[request.param][1] in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "mine")
    return request.param


SMALL = {
    "verifiable": ["--prompts-per-step", "2", "--num-generations", "2", "--max-completion-length", "4", "--eval-prompts", "2"],
    "tools": ["--prompts-per-step", "2", "--num-generations", "2", "--max-completion-length", "4", "--eval-prompts", "2"],
    "preferences": ["--batch-size", "2", "--eval-prompts", "2", "--max-completion-length", "4"],
    "control": ["--total-timesteps", "1024", "--eval-episodes", "2"],
}


def run_its_tests(folder: Path) -> tuple[bool, str]:
    """Whether the project's own tests pass, and what pytest says, in a process that has loaded nothing of other projects."""

    def work() -> None:
        said = os.open(folder.parent / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(folder.parents[1])):
                del sys.modules[name]
        sys.path.insert(0, str(folder))
        # faulthandler waits for a thread that a fork does not have
        without = [f"-pno:{plugin}" for plugin in ("cacheprovider", "timeout", "faulthandler")]
        assert pytest.main(["-q", *without, "--rootdir", str(folder), str(folder)]) == 0

    passed = forked(work) == 0
    return passed, (folder.parent / "said").read_text()


@pytest.mark.parametrize("project", KINDS, indirect=True)
def test_a_project_passes_its_own_tests_and_takes_two_steps(project, model, tmp_path):
    passed, said = run_its_tests(tmp_path / "mine")
    assert passed and " passed" in said, said
    begin = KINDS[project][1].split()[1:]
    steps = [] if project == "control" else ["--model", str(model), "--max-steps", "2", "--eval-steps", "0"]
    assert (
        cli.main([*begin, *steps, *SMALL[project], "--threads", "1", "--no-report", "--output-dir", str(tmp_path / "run")]) == 0
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == (1024 if project == "control" else 2)


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("dqn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("project", ["control"], indirect=True)
def test_the_projects_commands_learn_its_task(project, algorithm, tmp_path):
    """From cell 0 to 7 at (1 − 2·0.1) cells a step, a little slower at the wall: 0.91 on average."""
    assert f"psigrad control {algorithm} --config {algorithm}.yaml" in (tmp_path / "mine" / "README.md").read_text()
    assert cli.main(["control", algorithm, "--config", f"{algorithm}.yaml", "--no-report", "--no-progress"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "mine" / "runs" / algorithm / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/return/mean"] > 0.88 and rows[-1]["eval/episodes"] == 50 and rows[-1]["step"] < 21_000


@pytest.mark.parametrize("project", ["verifiable"], indirect=True)
def test_negative_control_a_broken_reward_fails_the_projects_test(project, tmp_path):
    reward = tmp_path / "mine" / "reward.py"
    reward.write_text(reward.read_text().replace("found[-1] == wanted", "wanted in found"))
    passed, said = run_its_tests(tmp_path / "mine")
    assert not passed and "FAILED" in said and "test_several_answers_are_not_rewarded" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verifable", "x"], "did you mean 'verifiable'"),
        ([], "a kind (verifiable, preferences, tools, control) and optionally a folder"),
        (["tools", "here"], "here holds files that this command did not write"),
        (["tools", "--here"], "a kind"),
    ],
)
def test_a_mistake_is_answered(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "README.md").write_text("mine")
    assert cli.main(["init", *arguments]) == 2
    assert said in capsys.readouterr().err and (tmp_path / "here" / "README.md").read_text() == "mine"


def test_every_template_is_in_the_wheel():
    """setuptools takes what pyproject.toml names."""
    import tomllib

    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["psigrad.cli"]
    found = {path for pattern in patterns for path in (root / "psigrad" / "cli").glob(pattern)}
    kept = {path for path in (root / "psigrad" / "cli" / "templates").rglob("*") if path.is_file()}
    assert found == kept
