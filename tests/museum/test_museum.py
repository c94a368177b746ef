"""The museum of silent bugs: psigrad is right in every exhibit, and every faulty formula is rejected."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from museum import __main__ as command
from museum import worlds
from museum.exhibit import LIBRARIES, Refusal, find, load

ROOT = Path(__file__).parents[2]
EXHIBITS = load()


@pytest.mark.parametrize("name", EXHIBITS)
def test_psigrad_computes_the_right_value(name: str) -> None:
    found = find(import_module("museum.adapters.psigrad"), EXHIBITS[name])
    assert found.state == "right", found.note


@pytest.mark.parametrize("name", EXHIBITS)
def test_the_faulty_formula_is_rejected(name: str) -> None:
    item = EXHIBITS[name]
    assert item.accepts(item.case.right) and not item.accepts(item.case.wrong)
    assert not item.accepts([math.nan] * len(item.case.right)) and not item.accepts([*item.case.right, 0.0])
    stub = SimpleNamespace(NOT_APPLICABLE={}, **{item.build.__name__: lambda x: item.case.wrong})
    assert find(stub, item).state == "wrong"


def test_each_exhibit_has_a_derivation_with_its_numbers_and_a_thread() -> None:
    assert len(EXHIBITS) >= 24 and sum(item.psigrad_too for item in EXHIBITS.values()) >= 3
    for item in EXHIBITS.values():
        assert item.title.endswith(".") and len(item.story.split("\n\n")) >= 2 and re.search(r"\d", item.story.split("\n\n")[1])
        assert item.sources and all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source) for source in item.sources), item.name


def test_a_refusal_is_no_value_and_what_does_not_apply_is_not_computed() -> None:
    def refuse(x: SimpleNamespace) -> list[float]:
        raise Refusal("give it a template")

    item = EXHIBITS["unmarked-template"]
    assert find(SimpleNamespace(NOT_APPLICABLE={}, unmarked_template=refuse), item) == ("refuses", "give it a template")
    assert find(SimpleNamespace(NOT_APPLICABLE={"unmarked_template": "no templates"}), item) == ("n/a", "no templates")


def test_only_its_adapter_imports_psigrad() -> None:
    def imported(path: Path) -> set[str]:
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        return {*names, *(node.module or "" for node in nodes if isinstance(node, ast.ImportFrom))}

    files = {path for path in (ROOT / "museum").rglob("*.py") if any(name.startswith("psigrad") for name in imported(path))}
    assert files == {ROOT / "museum" / "adapters" / "psigrad.py"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_adapter_has_each_exhibit_or_a_reason(library: str) -> None:
    adapter = import_module(f"museum.adapters.{library}")
    for item in EXHIBITS.values():
        assert hasattr(adapter, item.build.__name__) != (item.build.__name__ in adapter.NOT_APPLICABLE), item.name
    assert set(adapter.NOT_APPLICABLE) <= {item.build.__name__ for item in EXHIBITS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("library", [name for name in LIBRARIES if name != "psigrad"])
def test_other_libraries_compute_a_value_or_refuse(library: str) -> None:
    adapter = import_module(f"museum.adapters.{library}")
    states = {name: find(adapter, item).state for name, item in EXHIBITS.items()}
    assert "right" in states.values() and "wrong" in states.values(), states


def test_the_command_lists_explains_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(EXHIBITS)
    assert command.main(["--exhibit", "kl-gradient"]) == 0
    said = capsys.readouterr().out
    assert "27/64 ln 2" in said and "https://github.com/OpenRLHF/OpenRLHF/issues/1309" in said
    asked = [sys.executable, "-m", "museum", "--library", "gymnasium", "--exhibit", "reused-array"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "| reused-array | wrong |" in done.stdout and "0 instead of 5" in done.stdout


def test_the_unigram_model_gives_each_token_its_bits() -> None:
    logp = torch.log_softmax(worlds.unigram()(torch.tensor([[worlds.A, worlds.E]])).logits[0], -1)
    torch.testing.assert_close(-logp / worlds.LN2, torch.tensor(worlds.BITS, dtype=torch.float).expand(2, 8))
    assert sum(2.0**-bits for bits in worlds.BITS) == 1
