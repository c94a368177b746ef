"""`psigrad.train` as an editor sees it: with every setting by its name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from psigrad.config.fields import settings_of
from psigrad.config.methods import list_declarations

ROOT = Path(__file__).parents[2]
PROGRAM = """
import psigrad
psigrad.train("grpo", model="m", dataset="d", reward="exact", max_steps=3, learning_rate=1e-5, num_generations=4)
psigrad.train("dpo", model="m", dataset="d", lr=1e-5, report_to="wandb", callbacks=[object()], peft_config=None)
psigrad.train()  # a method is missing
reveal_type(psigrad.train)
"""


def mypy(program: Path) -> list[str]:
    """What mypy says of a program, a line each."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", str(program)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()


def pyright(program: Path) -> list[str]:
    """What an editor's checker says. basedpyright is pyright with its node, so that nothing is fetched when it runs."""
    project = program.with_name("pyrightconfig.json")
    project.write_text(json.dumps({"include": [program.name], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "basedpyright", "--project", str(project), "--pythonpath", sys.executable, "--outputjson"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    return [f":{one['range']['start']['line'] + 1}: {one['severity']}: {one['message']}" for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_every_setting_of_every_method_is_a_keyword(checker, tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(PROGRAM)
    said = checker(program)
    assert {re.search(r":(\d+): error", line)[1] for line in said if "error" in line} == {"5"}, said
    offered = {name for line in said if "information" in line or "note" in line for name in re.findall(r"[(, ](\w+): ", line)}
    settings = {dotted.rpartition(".")[2] for method in list_declarations().values() for dotted in settings_of(method.settings)}
    assert settings - {"path"} <= offered  # the model's path is `model`
    assert not offered & {"optim", "run", "data", "no_setting"}
