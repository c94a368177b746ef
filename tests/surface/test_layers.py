"""Imports point down the rooms of docs/architecture.md, and nothing outgrows its size."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import psigrad

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "psigrad"
BESIDE = ("psigrad_extras", "psigrad_serve", "psigrad_studio")
# From top to bottom: a room may import from those behind it. A drawer of a room is named with it.
ROOMS = (
    *("cli", "compat", "control", "language.recipes", "language.training", "language.loading"),
    *("runs", "records.report", "records", "language.rollout", "language.rewards", "processes.workers", "processes.sandbox"),
    *("language.models", "language.data", "kernels", "optim", "processes.parallel", "config", "objective", "tabular"),
)
LEAVES = ("cache_folder", "compiled", "errors", "extras", "importing", "intervals", "paths", "redaction", "seeds")
# Kernels are a plug-in: only models, whose fused decoder is made of them, import them. All others ask `compiled`.
ALLOWED = {room: {*ROOMS[i:], *LEAVES} - ({"tabular", "kernels"} - {room}) for i, room in enumerate(ROOMS)}
ALLOWED["language.models"] |= {"kernels"}
# Control and language are two uses of what is below both.
ALLOWED["control"] -= {room for room in ROOMS if room.startswith("language.")}
# Whoever reads run folders reads files, and nothing else of the library.
ALLOWED |= {
    "records.report": {"records.report", "records", "config", *LEAVES},
    "records": {"records", "config", "language.rollout", *LEAVES},
    # the life of a run, whatever it trains
    "runs": {"runs", "records.report", "records", "processes.parallel", "config", *LEAVES},
    "config": {"config", "objective", *LEAVES},
    "kernels": {"kernels", *LEAVES},
    "objective": {"objective"},
    "tabular": {"tabular"},
    "language.rewards": {
        *("language.rewards", "processes.workers", "processes.sandbox", "language.models", "language.data", "config"),
        *LEAVES,
    },
    "processes.workers": {"processes.workers", "processes.sandbox", *LEAVES},
    "processes.sandbox": {"processes.sandbox", *LEAVES},
}
# Where the core reaches a room of other libraries' words; the packages beside psigrad it reaches by `extras.py` alone. The
# sampler's cache is laid out as the kernels read it.
HOOKS = {"config/load.py": {"compat"}, "language/rollout/samplers/cache.py": {"kernels"}}
ALLOWED |= {leaf: {leaf} for leaf in LEAVES} | {leaf: {leaf, "errors", "paths"} for leaf in ("importing", "extras", "paths")}
ALLOWED |= {"": {*ROOMS, *LEAVES, ""}, "__main__": {"cli", "runs"}, "language": set(), "processes": set()}

MODULES = sorted(PACKAGE.rglob("*.py"))
MODULES_BESIDE = sorted(path for name in BESIDE for path in (ROOT / name).rglob("*.py"))
STUDIES = sorted((ROOT / "studies").rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else room_in(parts)


def room_in(parts: Sequence[str]) -> str:
    """The room of a dotted name, without `psigrad`; a drawer that has rules of its own counts as a room."""
    return next((room for n in (2, 1) if (room := ".".join(parts[:n])) in ROOMS), parts[0])


@functools.cache
def imports_of(source: str) -> set[str]:
    """Every module of ours that a source imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole module: from psigrad.x import y"
            assert node.module
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] in ("psigrad", *BESIDE, "studies")}


def rooms_imported(source: str) -> set[str]:
    """Rooms of the imported modules; what `psigrad` itself offers, as `psigrad.__version__`, is in the room ""."""
    ours = [name for name in imports_of(source) if name.split(".")[0] == "psigrad"]
    rooms = {room_in(name.split(".")[1:]) if "." in name else "" for name in ours} - set(psigrad.__all__)
    return rooms - {"", "language", "processes"}


def test_a_module_imports_only_its_own_room_and_those_below():
    assert len(MODULES) > 200
    names = {path: str(path.relative_to(PACKAGE)) for path in MODULES}
    above = {
        name: rooms_imported(path.read_text()) - ALLOWED[room_of(path)] - HOOKS.get(name, set()) for path, name in names.items()
    }
    assert {name: rooms for name, rooms in above.items() if rooms} == {}


def test_negative_control_an_import_upwards_is_noticed():
    assert rooms_imported("from psigrad.runs import loop") - ALLOWED["language.models"] == {"runs"}
    assert rooms_imported("def f():\n    from psigrad import seeds") - ALLOWED["objective"] == {"seeds"}
    assert rooms_imported("import psigrad.language.recipes.sft as s") - ALLOWED["records.report"] == {"language.recipes"}
    assert not rooms_imported("from psigrad.language.models import tiny") - ALLOWED["language.training"]
    assert rooms_imported("from psigrad.language.models import tiny") - ALLOWED["control"] == {"language.models"}
    assert rooms_imported("import psigrad.kernels.kernels") - ALLOWED["optim"] == {"kernels"}


def packages_of(source: str) -> set[str]:
    """The packages of ours that a source imports, wherever the import stands."""
    return {name.split(".")[0] for name in imports_of(source)}


def test_the_core_imports_no_package_beside_it():
    assert {str(path): found for path in MODULES if (found := packages_of(path.read_text()) - {"psigrad"})} == {}


ROOMS_OF_THE_CORE = (
    *(
        "objective",
        "optim",
        "kernels",
        "tabular",
        "control",
        "language",
        "runs",
        "records",
        "processes",
        "config",
        "compat",
        "cli",
    ),
)


def test_tests_of_the_core_import_no_package_beside_it():
    tests = [*(ROOT / "tests").glob("*.py"), *(p for room in ROOMS_OF_THE_CORE for p in (ROOT / "tests" / room).rglob("*.py"))]
    assert len(tests) > 150
    assert {str(path): found for path in tests if (found := packages_of(path.read_text()) & {*BESIDE})} == {}
    beside = ROOT / "tests" / "extras" / "test_settings.py"
    assert packages_of(beside.read_text()) & {*BESIDE} == {"psigrad_extras"}, "negative control"


# The gateway and the extras know nothing of the applications above them.
NOT_IN = {"psigrad_extras": {"psigrad_studio"}, "psigrad_serve": {"psigrad_studio"}}


def test_only_the_commands_of_a_package_import_those_of_psigrad():
    assert len(MODULES_BESIDE) > 150
    for path in MODULES_BESIDE:
        source, package = path.read_text(), path.relative_to(ROOT).parts[0]
        assert path.name in ("commands.py", "completion.py") or "cli" not in rooms_imported(source), path
        assert not packages_of(source) & NOT_IN.get(package, set()), path


def test_negative_control_an_import_of_a_package_is_noticed_wherever_it_stands():
    assert packages_of("def f():\n    from psigrad_studio import serve") == {"psigrad_studio"}
    assert packages_of("import psigrad_extras.vllm as v\nimport psigrad.records.rows") == {"psigrad", "psigrad_extras"}
    assert rooms_imported("from psigrad_studio import grid\nfrom psigrad.cli.flags import parse") == {"cli"}


def test_no_package_imports_the_studies():
    for path in [*MODULES, *MODULES_BESIDE]:
        assert not [name for name in imports_of(path.read_text()) if name.startswith("studies")], path
    assert imports_of("from studies.claims import dpo"), "negative control"


def edges_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules that it imports, wherever the import stands."""
    return {name: _targets(name, source, set(sources)) for name, source in sources.items()}


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """A circle of modules that import one another, or nothing."""
    done: set[str] = set()

    def walk(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return []
        for target in sorted(edges[name]):
            if circle := walk(target, [*above, name]):
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(edges) if (circle := walk(name, []))), [])


def _targets(name: str, source: str, modules: set[str]) -> set[str]:
    """Modules that a source imports. `from psigrad.room import module` means the module and not the room's __init__."""
    named = imports_of(source) & modules
    return {m for m in named if not any(other.startswith(f"{m}.") for other in named)} - {name}


def test_no_modules_import_one_another_in_a_circle():
    sources = {}
    for path in [*MODULES, *MODULES_BESIDE]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    assert len(sources) == len(MODULES) + len(MODULES_BESIDE)
    edges = edges_of(sources)
    assert not (found := cycle_in(edges)), " -> ".join(found)


@pytest.mark.parametrize(
    "back",
    [
        "import psigrad.a",
        "from psigrad import a",
        "from psigrad.a import name",
        "def f():\n    from psigrad import a",
        "if TYPE_CHECKING:\n    from psigrad.a import Name",
    ],
)
def test_negative_control_a_circle_is_noticed_however_it_is_closed(back):
    sources = {"psigrad.a": "from psigrad import b", "psigrad.b": "import psigrad.c", "psigrad.c": back}
    assert cycle_in(edges_of(sources)) == ["psigrad.a", "psigrad.b", "psigrad.c", "psigrad.a"]
    assert not cycle_in(edges_of(sources | {"psigrad.c": "import os"}))


def test_negative_control_relative_imports_and_unknown_rooms_are_noticed():
    with pytest.raises(AssertionError, match="name the whole module"):
        imports_of("from . import loop")
    assert rooms_imported("import psigrad.attic") - ALLOWED["language.models"] == {"attic"}


def test_the_page_shows_every_room_and_the_order_of_imports():
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page.split("```\npsigrad/\n")[1].split("```")[0]
    shown = set(re.findall(r"^  (?:  )?(\S+?)/? ", tree, re.MULTILINE))
    folders = {path.name for path in PACKAGE.iterdir() if any(path.rglob("*.py"))}
    assert folders <= shown
    order = page.split("Imports only point down this list")[1].split("```")[1].split()
    assert order == list(ROOMS)


def faults_of_size(source: str) -> list[str]:
    """What is too long, has too many public methods, or says nothing of itself."""
    tree, found = ast.parse(source), []
    if source.count("\n") > 500:
        found.append("the file is too long")
    if not ast.get_docstring(tree):
        found.append("a module without a docstring")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 60:
            found.append(f"{node.name} is too long")
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            public = [n for n in methods if not any(isinstance(d, ast.Name) and d.id == "property" for d in n.decorator_list)]
            if len(public) > 10:
                found.append(f"{node.name} has {len(public)} public methods")
    for node in tree.body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        public = public and not any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
        if public and not ast.get_docstring(node):
            found.append(f"{node.name} has no docstring")
    return found


def test_files_functions_and_classes_stay_small_and_documented():
    faults = {str(path): faults_of_size(path.read_text()) for path in [*MODULES, *MODULES_BESIDE, *STUDIES]}
    assert len(faults) > 400 and {path: found for path, found in faults.items() if found} == {}


def test_negative_control_what_is_large_or_says_nothing_is_noticed():
    body = "".join(f"    def m{i}(self): pass\n" for i in range(11))
    source = "def f():\n" + "    x = 1\n" * 60 + "class C:\n" + body + "\n" * 440
    said = ["the file is too long", "a module without a docstring", "f is too long", "C has 11 public methods"]
    assert faults_of_size(source) == [*said, "f has no docstring", "C has no docstring"]
    property_of_it = body.replace("    def m0", "    @property\n    def m0")
    assert faults_of_size(f'"""M."""\n\n\nclass C:\n    """C."""\n\n{property_of_it}') == []


def twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Names of modules and of public classes that occur more than once, with the files."""
    found: dict[str, list[str]] = {}
    for file, source in sources.items():
        if Path(file).stem not in ("__init__", "__main__", "commands", "settings"):
            found.setdefault(f"module {Path(file).stem}", []).append(file)
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(f"class {node.name}", []).append(file)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_modules_and_public_classes_have_names_of_their_own():
    paths = [*MODULES, *MODULES_BESIDE]
    assert not twice({str(path.relative_to(ROOT)): path.read_text() for path in paths})


def test_negative_control_a_name_that_occurs_twice_is_noticed():
    found = twice({"a/x.py": "class A: pass", "b/y.py": "class A: pass\nclass _B: pass", "c/x.py": "class _B: pass"})
    assert set(found) == {"class A", "module x"}
