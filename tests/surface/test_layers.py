"""Imports point down the rooms of docs/architecture.md, and nothing outgrows its size."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "psigrad"
# From top to bottom: a room may import from those behind it.
ROOMS = ("cli", "flags", "recipes", "report", "training", "rollout", "rewards", "models", "data", "objective", "tabular")
LEAVES = ("config", "errors", "seeds")
ALONE = ("objective", "tabular")
# report/ reads run folders, and nothing else of the library.
ALLOWED = {room: {*ROOMS[i:], *LEAVES} - ({"tabular"} - {room}) for i, room in enumerate(ROOMS)}
ALLOWED |= {"report": {"report", *LEAVES}, "objective": {"objective"}, "tabular": {"tabular"}, "rewards": {"rewards", *LEAVES}}
ALLOWED |= {leaf: {leaf} for leaf in LEAVES}
ALLOWED |= {"": {*ROOMS, *LEAVES, ""}, "__main__": {"cli"}}

MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports_of(source: str) -> set[str]:
    """Every module of ours that a source imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name == "psigrad" or name.startswith("psigrad.")}


def rooms_imported(source: str) -> set[str]:
    known = {*ROOMS, *LEAVES, "__main__"}
    return {name.split(".")[1] for name in imports_of(source) if "." in name and name.split(".")[1] in known}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_its_own_room_and_those_below(path):
    room = room_of(path)
    above = rooms_imported(path.read_text()) - ALLOWED[room]
    assert not above, f"{path.relative_to(PACKAGE)} imports {sorted(above)}"


def test_negative_control_an_import_upwards_is_noticed():
    assert rooms_imported("from psigrad.training import loop") - ALLOWED["models"] == {"training"}
    assert rooms_imported("def f():\n    from psigrad import seeds") - ALLOWED["objective"] == {"seeds"}
    assert rooms_imported("import psigrad.recipes.sft as s") - ALLOWED["report"] == {"recipes"}
    assert not rooms_imported("from psigrad.models import tiny") - ALLOWED["training"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_functions_and_classes_stay_small_and_documented(path):
    source = path.read_text()
    tree = ast.parse(source)
    assert source.count("\n") <= 400
    assert ast.get_docstring(tree), "a module without a docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 60, f"{node.name} is too long"
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            public = [n for n in methods if not any(isinstance(d, ast.Name) and d.id == "property" for d in n.decorator_list)]
            assert len(public) <= 10, f"{node.name} has {len(public)} public methods"
    for node in tree.body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        assert not public or ast.get_docstring(node), f"{node.name} has no docstring"
