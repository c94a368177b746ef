"""`psigrad.train` is typed: the generated classes are the settings, and a type checker finds what is wrong."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from psigrad.config.fields import settings_of
from psigrad.config.methods import list_declarations

ROOT = Path(__file__).parents[2]
FILE = ROOT / "psigrad" / "language" / "recipes" / "typed_settings.pyi"


def test_the_file_is_what_the_settings_are():
    spec = importlib.util.spec_from_file_location("typed", ROOT / "docs" / "make" / "typed.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    parsed = [ast.dump(ast.parse(source)) for source in (made.text(), FILE.read_text())]
    assert parsed[0] == parsed[1], "run: python docs/make/typed.py"


def test_every_method_and_every_setting_is_offered():
    tree = ast.parse(FILE.read_text())
    classes = {one.name: {line.target.id for line in one.body} for one in tree.body if isinstance(one, ast.ClassDef)}
    offered = {word.value for word in ast.walk(tree) if isinstance(word, ast.Constant)}
    for name, method in list_declarations().items():
        own = classes[method.settings.__name__.removesuffix("Config") + "Settings"] | classes["Given"] | {"path"}
        assert name in offered and {dotted.rpartition(".")[2] for dotted in settings_of(method.settings)} <= own


WRONG = """
import psigrad
psigrad.train("grpo", model="m", dataset="d", reward="exact", max_steps=3, learning_rate=1e-5, num_generations=4)
psigrad.train("dpo", model="m", dataset="d", lr=1e-5, report_to="wandb", callbacks=[object()])
psigrad.train("sft", model="m", dataset="d", max_stepz=3)  # a name that there is not
psigrad.train("sft", model="m", dataset="d", num_generations=3)  # another method's
psigrad.train("grpo", model="m", dataset="d", max_steps="three")  # another type
psigrad.train("grpoo", model="m", dataset="d")  # no method
"""


def mypy(program: Path) -> set[int]:
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", str(program)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    return {int(line.split(":")[1]) for line in found if "error:" in line}


def pyright(program: Path) -> set[int]:
    """As an editor checks it. basedpyright is pyright with its node, so that nothing is fetched when it runs."""
    project = program.with_name("pyrightconfig.json")
    project.write_text(json.dumps({"include": [program.name], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "basedpyright", "--project", str(project), "--pythonpath", sys.executable, "--outputjson"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_type_checker_finds_what_is_wrong_and_nothing_else(checker, tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(WRONG)
    assert checker(program) == {5, 6, 7, 8}
