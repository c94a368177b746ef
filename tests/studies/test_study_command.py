"""`psigrad experiment` runs a study where the source checkout is, and otherwise says in a sentence what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from psigrad import cli
from psigrad_extras import experiments
from psigrad_extras.experiments import EXPERIMENTS
from studies.settings import SETTINGS

ROOT = Path(__file__).parents[2]


def test_every_study_has_its_settings_and_a_module_that_does_what_is_asked_of_it():
    assert list(EXPERIMENTS) == list(SETTINGS)
    for one in EXPERIMENTS.values():
        assert all(callable(getattr(one.module, part)) for part in ("check", "run", "tables", "picture")), one.name


def test_a_study_runs_and_leaves_its_figures(tmp_path, capsys):
    assert cli.main(["experiment", "clip", "--low", "0.3", "--out", str(tmp_path)]) == 0
    assert "Gradient of the surrogate" in capsys.readouterr().out
    found = json.loads((tmp_path / "clip.json").read_text())
    assert found["settings"]["low"] == 0.3 and (tmp_path / "clip.png").read_bytes().startswith(b"\x89PNG")


def test_the_help_of_a_study_names_its_settings_without_torch():
    code = "import sys\nfrom psigrad import cli\ntry: cli.main(['experiment', 'length', '--help'])\nexcept SystemExit: pass\n"
    command = [sys.executable, "-c", code + "print('torch' in sys.modules)"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--longest" in out and out.endswith("False\n")


@pytest.mark.parametrize("arguments", [["clip"], ["loopholes", "--seeds", "2"], ["dpo", "--help"]])
def test_without_a_checkout_a_study_is_refused_in_a_sentence(arguments, monkeypatch, capsys):
    monkeypatch.setattr(experiments, "find_checkout", lambda: None)
    assert cli.main(["experiment", *arguments]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith(f"psigrad: {arguments[0]} is a study, and the installed package does not include the studies")
        and said.count("\n") == 1
    )
    assert f"psigrad experiment {arguments[0]}" in said


def test_without_a_checkout_help_still_lists_every_experiment(monkeypatch, capsys):
    monkeypatch.setattr(experiments, "find_checkout", lambda: None)
    assert cli.main(["experiment", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(one.name in out and one.purpose in out for one in EXPERIMENTS.values())


def test_the_checkout_is_beside_the_package_or_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert experiments.find_checkout() == ROOT
    monkeypatch.setattr(experiments, "__file__", str(tmp_path / "site-packages" / "psigrad_extras" / "experiments.py"))
    (tmp_path / "studies").mkdir()
    assert experiments.find_checkout() is None, "a folder of that name alone is somebody else's"
    monkeypatch.chdir(ROOT)
    assert experiments.find_checkout() == ROOT


@pytest.mark.slow
def test_an_installed_package_runs_a_study_in_the_folder_of_a_checkout(tmp_path):
    """As from a wheel: the package lies elsewhere, without `studies` beside it.

    Its heart: test_the_checkout_is_beside_the_package_or_the_current_folder.
    """
    (tmp_path / "site").mkdir()
    for name in ("psigrad", "psigrad_extras"):
        (tmp_path / "site" / name).symlink_to(ROOT / name)
    code = "import sys; from psigrad.cli import main; sys.exit(main(sys.argv[1:]))"
    asked = ["experiment", "clip", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-P", "-c", code, *asked]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "out" / "clip.json").exists(), done.stderr
    elsewhere = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert elsewhere.returncode == 2 and "clip is a study" in elsewhere.stderr, elsewhere.stderr
