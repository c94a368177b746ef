"""Where the reader of a command's output leaves, as `head` does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow

from psigrad import cli
from psigrad.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["grpo", "--help"], pytest.param(["explain", "grpo"], marks=pytest.mark.slow)]
)
def test_a_reader_who_leaves_is_no_error(arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "psigrad", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    process.stdout.close()  # before anything is written, as `| head -0`
    assert process.stderr.read() == "" and process.wait() == 0


@contextlib.contextmanager
def unheard(monkeypatch):
    """Standard output is a pipe whose reader has left, for the length of the block."""
    shut, pipe = os.pipe()
    os.close(shut)
    with open(pipe, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        yield stream


def test_a_command_whose_reader_leaves_goes_on_to_the_end_of_its_work_and_its_status_says_what_came_of_it(monkeypatch):
    def works(arguments):
        print("begins", flush=True)  # here `head -1` has left
        done.append("to its end")
        if arguments:
            raise UserError("It failed.")
        return 0

    done = []
    monkeypatch.setitem(cli.COMMANDS, "tasks", cli.Command("", works))
    with unheard(monkeypatch) as stream:
        assert cli.main(["tasks"]) == 0 and done == ["to its end"]
        assert cli.main(["tasks", "fails"]) == 2 and sys.stdout is stream


@pytest.mark.parametrize("reader", ["there", "gone"])
def test_a_broken_pipe_that_is_not_our_outputs_is_an_error(reader, monkeypatch):

    def works(arguments):
        print("begins", flush=True)
        shut, pipe = os.pipe()  # to a worker that has died
        os.close(shut)
        with open(pipe, "wb", buffering=0) as worker:
            worker.write(b"work")

    monkeypatch.setitem(cli.COMMANDS, "tasks", cli.Command("", works))
    with unheard(monkeypatch) if reader == "gone" else contextlib.nullcontext(), pytest.raises(BrokenPipeError):
        cli.main(["tasks"])


def test_where_the_shell_has_closed_the_output_a_command_works_all_the_same(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["--version"]) == 0


@pytest.mark.parametrize("arguments", [["explain", "dead_groups"], *slow(["--all"], ["grid"], ["experiment", "psi", "--most…"])])
def test_a_locale_without_our_signs_gets_question_marks(arguments):
    given = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}  # the plainest there is: ASCII
    done = subprocess.run(
        [sys.executable, "-m", "psigrad", *arguments], env=os.environ | given, capture_output=True, text=True, cwd=ROOT
    )
    said = done.stdout + done.stderr
    assert done.returncode == (2 if arguments[0] == "experiment" else 0) and "Traceback" not in said and said.isascii()
    assert "?" in done.stdout or arguments[0] in ("experiment", "explain")
