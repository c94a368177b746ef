"""What a machine lacks: installed where that is allowed, else its tests are left out by one door, which says so last."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import machine
import pytest

from psigrad.processes.sandbox import tier_of_this_machine

ROOT = Path(__file__).parents[2]
CASES = """
import pytest

@pytest.mark.needs("curl")
@pytest.mark.parametrize("n", range(3))
def test_of_curl(n): raise AssertionError("it runs")

@pytest.fixture
def browser(): raise AssertionError("it starts")

@pytest.mark.quick
def test_of_a_page(browser): pass

def test_of_another_page_which_is_slow(browser): raise AssertionError("it was not asked for")

def test_that_stands(): pass
"""


def run(folder, source, *, processes=0, also="", **environment):
    """The output of pytest on a file, where there is no program on the path."""
    (folder / "test_cases.py").write_text(source)
    (folder / "torch.py").write_text("def set_num_threads(n): pass")  # the real one takes seconds, and nothing here computes
    paths = os.pathsep.join(map(str, (folder, ROOT, ROOT / "tests", ROOT / "tests" / "support")))
    given = {**os.environ, "CI": "", "PSIGRAD_TEST_EVERYTHING": "", "PYTHONPATH": paths, "PATH": str(folder), "HOME": str(folder)}
    options = (
        f"-p conftest -c {ROOT / 'pyproject.toml'} --workers {processes} -p no:cacheprovider --durations 1 test_cases.py {also}"
    )
    command = [sys.executable, "-m", "pytest", *options.split()]
    done = subprocess.run(command, env={**given, **environment}, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


CURL = "3 tests of programs that ask by curl were left out: no curl on this machine; apt-get install curl"
# Playwright's own Node wants a library that comes with a compiler.
BROWSER = (
    r"1 test of pages in a browser was left out: (no Chromium on this machine; apt-get install chromium, or playwright install "
    r"chromium|Playwright does not start here \(.*libatomic.*\); apt-get install chromium fonts-liberation libatomic1)"
)


def test_the_last_lines_say_what_was_left_out_and_what_would_bring_it(tmp_path):
    status, said = run(tmp_path, CASES, processes=1)
    *_, title, one, two, counts = said.splitlines()
    page, curl = sorted([one, two])
    assert status == 0 and "missing on this machine" in title and curl == CURL and re.fullmatch(BROWSER, page)
    assert "1 passed, 4 skipped" in counts
    assert "another_page" not in said


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"CI": "true"}, {"PSIGRAD_TEST_EVERYTHING": "1"}])
def test_where_everything_is_tested_what_is_missing_fails(tmp_path, asked):
    status, said = run(tmp_path, CASES, **asked)
    assert status == 1 and "1 passed, 1 deselected, 4 errors" in said.splitlines()[-1]
    assert "3 tests of programs that ask by curl failed: no curl on this machine; apt-get install curl" in said


IMPORTS = """
import optuna

def test_a(): raise AssertionError("it runs")
"""
WITHIN = """
def test_b(): import optuna

def test_c(): import no_such_package

def group(*names): raise ExceptionGroup("of 3 cases", [ModuleNotFoundError(f"No module named '{name}'") for name in names])

def test_d(): group("optuna", "fastapi")

def test_e(): group("optuna", "no_such_package")

def test_f(): raise ValueError("Unrecognized model identifier: lfm9. Should contain one of llama, lfm2")
"""


@pytest.mark.parametrize("asked", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_missing_package_of_the_peers_or_a_missing_family_leaves_tests_out_and_any_other_package_fails_them(tmp_path, asked):
    (tmp_path / "optuna.py").write_text("raise ModuleNotFoundError(\"No module named 'optuna'\", name='optuna')")
    (tmp_path / "test_imports.py").write_text(IMPORTS)
    status, said = run(tmp_path, WITHIN, processes=1, also="test_imports.py", PSIGRAD_TEST_EVERYTHING=asked)
    if asked:  # a file that cannot be collected ends the run before its first test
        assert status == 2 and "optuna" in said and "1 error" in said.splitlines()[-1]
    else:
        assert status == 1
        assert "3 tests of the search over settings were left out: optuna is not installed; make install" in said
        assert "1 test of the family lfm9 was left out: transformers 5." in said
        assert "2 failed, 4 skipped" in said.splitlines()[-1] and said.count("No module named 'no_such_package'") >= 2


OTHER_DOORS = """
import pytest

def test_a(): pytest.skip("so")

@pytest.mark.skip
def test_b(): pass

@pytest.mark.xfail
def test_c(): 1 / 0
"""


def test_there_is_no_other_door(tmp_path):
    status, said = run(tmp_path, OTHER_DOORS)
    assert status == 1 and "2 failed, 1 error" in said.splitlines()[-1]
    assert len(re.findall(r"^A test is left out by pytest.mark.needs alone \(", said, re.MULTILINE)) == 3


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A path with nothing on it but an apt-get that notes how it is called, and "installs" fish alone."""
    calls = tmp_path / "calls"
    (tmp_path / "apt-get").write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\ncase "$*" in\n  *zsh*) echo "E: no zsh" >&2; exit 100;;\n'
        f'  *fish) printf "#!/bin/sh\\n" > {tmp_path}/fish; /bin/chmod +x {tmp_path}/fish;;\nesac\n'
    )
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    needs = {name: machine.Need(name, lambda name=name: machine._program(name), (name,)) for name in ("zsh", "fish")}
    monkeypatch.setattr(machine, "NEEDS", {**needs, "root": machine.NEEDS["root"]})
    for name in ("CI", "PSIGRAD_TEST_EVERYTHING"):
        monkeypatch.delenv(name, raising=False)
    machine.lack.cache_clear()
    yield tmp_path
    machine.lack.cache_clear()


def test_root_installs_what_there_is_and_names_the_rest(bare, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert machine.install() == 0
    asked = [line.split("Recommends=0 ")[1] for line in (bare / "calls").read_text().splitlines()]
    assert asked == ["update", "install --yes zsh fish", "install --yes zsh", "install --yes fish"]
    first, *_, title, last = capsys.readouterr().out.splitlines()
    assert "apt-get" in first and "zsh, fish" in first
    assert title == "Their tests will be left out:" and last == "- zsh: no zsh on this machine; apt-get install zsh"


@pytest.mark.parametrize("asked", ["", "1"])
def test_others_install_nothing(bare, monkeypatch, capsys, asked):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PSIGRAD_TEST_EVERYTHING", asked)
    assert machine.install() == int(bool(asked)) and not (bare / "calls").exists()
    said = capsys.readouterr().out.splitlines()
    assert "as only root can" in said[0] and said[-1] == "- fish: no fish on this machine; apt-get install fish"


def test_a_program_that_is_there_and_does_not_work_is_named_as_such(tmp_path, monkeypatch):
    for name in ("bwrap", "prlimit", "setpriv"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'no namespaces here' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    tier_of_this_machine.cache_clear()
    try:
        found = machine.NEEDS["bubblewrap"].look()
    finally:
        tier_of_this_machine.cache_clear()
    assert found.there and "bwrap cannot start here (no namespaces here)" in found.why
