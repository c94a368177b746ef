"""Every error of docs/errors.md comes out of its example, and its message names it."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path

import pytest

from psigrad import cli
from psigrad.cli import mathematics as maths

ROOT = Path(__file__).parents[2]
# Where a model or a worker is asked, it takes a second.
MARKED = [
    pytest.param(name, marks=pytest.mark.slow if {"base", "score"} & set(entry["example"].split()) else ())
    for name, entry in maths.mistakes().items()
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    from tiny_jobs import make_job

    return make_job(tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("name", MARKED)
def test_the_example_gives_the_error_and_the_error_names_its_entry(name, job, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in job.iterdir():
        (tmp_path / file.name).symlink_to(file)
    entry = maths.mistakes()[name]
    for file, text in entry.get("files", {}).items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text + "\n" if text else "")
    if "before" in entry:
        assert cli.main(shlex.split(entry["before"])) == 0
    assert cli.main(shlex.split(entry["example"])) == 2
    error = capsys.readouterr().err
    assert error.rstrip().endswith(f" More: psigrad explain {name}.") and "Traceback" not in error, error


def test_explain_prints_an_entry(capsys):
    assert cli.main(["explain", "no-reward"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("No reward was given") and "--reward exact" in said and "psigrad grpo --model base" in said


def test_an_error_without_an_entry_names_none():
    assert maths.name_of_mistake("Something that is nowhere else.") == ""
    assert maths.name_of_mistake("There is no flag --x; `psigrad grpo --help` lists them.") == "unknown-flag"


def test_no_entry_has_the_name_of_a_method_and_the_page_is_up_to_date():
    from psigrad.objective.catalog import METHODS

    assert not set(maths.mistakes()) & set(METHODS) and len(maths.mistakes()) >= 40
    made = runpy.run_path(str(ROOT / "docs" / "make" / "errors.py"))
    assert made["PAGE"].read_text() == made["page"](), "run: python docs/make/errors.py"
    assert all(set(entry) <= {"says", "why", "do", "before", "example", "files"} for entry in maths.mistakes().values())
    assert json.dumps(maths.mistakes())
