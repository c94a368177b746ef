"""`psigrad experiment`: what it prints, what it writes, and what it says to mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import asdict

import pytest

from psigrad import cli
from psigrad.config.load import load
from psigrad_extras import experiments as experiment
from studies import clip
from studies.settings import BiasSettings, ClipSettings, PsiSettings

SMALL = {
    "psi": ["--seeds", "2", "--episodes", "64", "--batch", "4"],
    "bias": ["--seeds", "2", "--episodes", "600", "--world", "grid"],
    "clip": [],
}


@pytest.fixture(scope="module", params=SMALL)
def shown(request, tmp_path_factory):
    """(name, folder, printed) of one run of each."""
    folder = tmp_path_factory.mktemp(request.param) / "made" / "here"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("COLUMNS", "80")
        assert cli.main(["experiment", request.param, *SMALL[request.param], "--out", str(folder)]) == 0
    return request.param, folder, printed.getvalue()


def test_it_prints_a_table_that_fits_and_names_its_files(shown):
    name, folder, printed = shown
    assert f"figures {folder / name}.json" in printed and f"picture {folder / name}.png" in printed
    assert "…" not in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if not line.startswith(("figures", "picture")))


def test_the_figures_are_json_and_the_picture_is_drawn(shown):
    name, folder, printed = shown
    found = json.loads((folder / f"{name}.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG") and (folder / f"{name}.png").stat().st_size > 20_000
    assert found["settings"]["out"] == str(folder)
    key = "target" if name == "bias" else "name"
    assert {row[key] for row in found["rows"]} and all(row[key] in printed for row in found["rows"])


@pytest.mark.parametrize("name", ["psi", "bias"])
def test_the_same_settings_give_the_same_figures(name, tmp_path):
    cls, given = (
        experiment.find(name).settings,
        {"psi": {"episodes": 64, "batch": 4}, "bias": {"episodes": 500, "world": "grid"}}[name],
    )
    settings = load(cls, flags={"seeds": 2, "out": str(tmp_path), **given})
    one, two = (asdict(experiment.find(name).module.run(settings)) for _ in range(2))
    assert one == two


def test_settings_reach_the_experiment(tmp_path, capsys):
    changed = ["--high", "0.5", "--higher", "0.75", "--bound", "4", "--cap", "2"]
    assert cli.main(["experiment", "clip", *changed, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "ρ > 1.5" in printed and "ρ > 1.75" in printed and "ρ < 0.8, ρ > 4" in printed and "ρ > 1.2" not in printed
    assert [row.pushes[3] for row in clip.run(ClipSettings(cap=2.0)).rows if row.name == "CISPO"] == [2.0, -2.0]


MISTAKES = {
    "no name": ([], "experiment got no name; the usage is psigrad experiment psi|bias|clip"),
    "unknown name": (["clipp"], "There is no experiment 'clipp'; expected one of psi, bias, clip, .*; did you mean 'clip'"),
    "unknown flag": (["psi", "--seed", "1"], "There is no flag --seed; .* did you mean '--seeds'"),
    "no seeds": (["psi", "--seeds", "0"], "seeds is 0; expected at least 1"),
    "one episode": (["psi", "--episodes", "16"], "episodes is 16; expected at least two batches of 16"),
    "batch of one": (["psi", "--batch", "1"], "batch is 1; expected at least 2"),
    "discount": (["psi", "--discount", "1.5"], "discount is 1.5; expected a number above 0"),
    "noise": (["psi", "--critic-error", "-1"], "critic_error is -1; expected"),
    "world": (["bias", "--world", "gird"], "There is no world 'gird'; expected walk or grid; did you mean 'grid'"),
    "few episodes": (["bias", "--episodes", "30", "--seeds", "1"], "raise --episodes to about 380"),
    "clip": (["clip", "--low", "1.5"], "clip has low=1.5"),
    "a file for a folder": (["clip", "--out", "{file}"], "file is a file; choose a new or an empty folder as --out"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_a_sentence(case, tmp_path, capsys):
    arguments, said = MISTAKES[case]
    (tmp_path / "file").write_text("")
    arguments = [text.format(file=tmp_path / "file" / "sub") for text in arguments]
    if "--out" not in arguments and arguments and arguments[0] in SMALL:
        arguments += ["--out", str(tmp_path / "out")]
    assert cli.main(["experiment", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists() or case == "few episodes"  # only the run itself finds out


def test_help_names_the_experiments_and_every_setting_without_torch():
    code = """
import sys
from psigrad.cli import main
for name in ([], ["psi"], ["bias"], ["clip"]):
    try:
        main(["experiment", *name, "--help"])
    except SystemExit:
        pass
print("torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("False\n")
    for cls in (PsiSettings, BiasSettings, ClipSettings):
        assert all(f"--{name.replace('_', '-')}" in out for name in asdict(cls()))
    assert all(e.purpose in out for e in experiment.EXPERIMENTS.values())
    exact, trained = ([one.name for one in few] for few in experiment.groups().values())
    assert exact == ["psi", "bias", "clip"] and len(exact) + len(trained) == len(experiment.EXPERIMENTS)
