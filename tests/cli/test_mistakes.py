"""Mistakes in a command: the message says what was given, and there is no traceback."""

from __future__ import annotations

import shlex

import pytest

from psigrad import cli

GRPO = "grpo --model base --dataset train.jsonl --reward exact --max-completion-length 4"
FILES = {"empty.jsonl": "", "mine.py": "other = 1\ndef add(a, b):\n    return a + b\n"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{GRPO} --dataset empty.jsonl", "has no rows; at least one"),
        (f"{GRPO} --reward mine.py:nothing", "': mine.py has no '"),
        (f"{GRPO} algorithm.surogate=clip", "The algorithm has an unknown slot 'surogate"),
        (f"{GRPO} --prompts-per-step 3 --num-minibatches 7", "a minibatch takes whole groups"),
        (f"{GRPO} --tools mine.py:add", "cannot be offered"),
        (f"{GRPO} --top-p 0", "expected above"),
        ("control dqn --env Pendulum-v1", "needs discrete actions, one at a time"),
    ],
)
def test_a_mistake_is_one_message(command, message, job, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in job.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert cli.main(shlex.split(command)) == 2
    error = capsys.readouterr().err
    assert message in error and "More:" not in error and "Traceback" not in error


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    from tiny_jobs import make_job

    return make_job(tmp_path_factory.mktemp("job"))
