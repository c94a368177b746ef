"""Imports point down the rooms of docs/architecture.md, and nothing outgrows its size."""

from __future__ import annotations

import ast
import functools
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path

import pytest

import psigrad

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "psigrad"
BESIDE = ("psigrad_extras", "psigrad_serve", "psigrad_studio")
# Ring 0 trains, ring 1 runs it; the plug-ins reach both by a protocol. In each, a room may import from those behind it.
RINGS = {
    "plug-ins": (
        *("control", "compat", "language.episodes", "language.rewards"),
        *("processes.workers", "processes.sandbox", "kernels", "tabular"),
    ),
    "ring 1": ("cli", "api", "language.recipes", "language.loading", "runs", "records.report", "records", "language.data"),
    "ring 0": (
        *("language.training", "language.rollout", "language.models", "optim", "processes.parallel", "config", "objective"),
    ),
}
ROOMS = tuple(room for rooms in RINGS.values() for room in rooms)
LEAVES = (*("cache_folder", "compiled", "errors", "extras", "importing", "intervals", "paths", "redaction", "seeds", "step"),)
ALLOWED = {room: {*ROOMS[i:], *LEAVES} for i, room in enumerate(ROOMS)}
# The textbooks, the readers of run folders, and rooms that are of use without the library.
ALLOWED |= {
    "objective": {"objective"},
    "tabular": {"tabular"},
    "config": {"config", "objective", *LEAVES},
    "records.report": {"records.report", "records", "config", *LEAVES},
    "records": {"records", "config", *LEAVES},
    "runs": {"runs", "records.report", "records", "optim", "processes.parallel", "config", *LEAVES},
    "kernels": {"kernels", *LEAVES},
    "compat": {"compat", "config", *LEAVES},
    "control": {
        *("control", "cli", "processes.workers", "runs", "records.report", "records", "optim", "processes.parallel"),
        *("config", "objective"),
        *LEAVES,
    },
    "language.rewards": {
        *("language.rewards", "processes.workers", "processes.sandbox", "language.rollout", "language.data", "config"),
        *LEAVES,
    },
    "processes.workers": {"processes.workers", "processes.sandbox", *LEAVES},
    "processes.sandbox": {"processes.sandbox", *LEAVES},
}
# The doors by which an inner ring imports a plug-in. The models' fused decoder is made of kernels, and the sampler's cache is
# laid out as they read it; recipes put rewards and episodes together; the command line and `psigrad.train` take foreign names.
DOORS = {
    "language.models": {"kernels"},
    "language.rollout": {"kernels"},
    "language.recipes": {"language.rewards", "language.episodes"},
    "cli": {"compat"},
    "api": {"compat"},
}
ALLOWED |= {leaf: {leaf} for leaf in LEAVES} | {
    leaf: {leaf, "errors", "paths"} for leaf in ("importing", "extras", "paths", "step")
}
ALLOWED |= {"": {*ROOMS, *LEAVES, ""}, "__main__": {"cli", "runs"}, "language": {"errors", "extras"}, "processes": set()}

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
        name: rooms_imported(path.read_text()) - ALLOWED[room_of(path)] - DOORS.get(room_of(path), set())
        for path, name in names.items()
    }
    assert {name: rooms for name, rooms in above.items() if rooms} == {}


def loaded_after(*imports: str) -> list[list[Path]]:
    """The files of psigrad that a fresh process has loaded after each of these imports, one after the other."""
    said = "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'psigrad'))"
    code = "\n".join(["import sys", *(f"import {modules}\n{said}" for modules in imports)])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return [[Path(file) for file in line.split()] for line in done.stdout.splitlines()]


def lines_of_code(source: str) -> int:
    """Lines that hold more than a comment or a docstring."""
    tree, texts = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= {*range(node.lineno, node.end_lineno + 1)}
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in empty]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - texts)


def test_importing_the_online_step_loads_ring_0_alone_and_little_of_it():
    language = "psigrad.language"
    needs = ("training.online.annotators.values", "rollout.samplers.embedded", "rewards.reward_pool", "models.hf_attention")
    files, used, recipe = loaded_after(
        f"{language}.training.online.online_rl", ", ".join(f"{language}.{name}" for name in needs), f"{language}.recipes.online"
    )
    rooms = {room_of(file) for file in files} - {"", "language", "processes"}
    assert rooms <= {*RINGS["ring 0"], *LEAVES, "kernels"}
    assert len(files) <= 80 and sum(lines_of_code(file.read_text()) for file in files) <= 10_000
    assert len(used) <= 110, "with what a step of psigrad's sampler and a reward function in Python asks for"
    assert len(recipe) > 120, "negative control: a recipe loads more"


def test_negative_control_an_import_upwards_is_noticed():
    assert rooms_imported("from psigrad.runs import loop") - ALLOWED["language.models"] == {"runs"}
    assert rooms_imported("from psigrad.language.episodes import tools") - ALLOWED["language.training"] == {"language.episodes"}
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
    *("objective", "optim", "kernels", "tabular", "control", "language", "runs", "records", "processes", "config", "compat"),
    "cli",
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
    for ring, rooms in RINGS.items():
        (row,) = re.findall(rf"^\| {ring} \|[^|]*\| ([^|]*) \|$", page, re.MULTILINE)
        assert re.findall(r"`([\w.]+)`", row) == list(rooms), ring


def untested(modules: Sequence[Path], tests: set[Path]) -> list[str]:
    """The modules of ring 0 with 60 lines or more that no test file has the name of, in the folder of their room or below it."""
    rooms, missing = [Path(*room.split(".")) for room in RINGS["ring 0"]], []
    for path in (one.relative_to(PACKAGE) for one in modules if one.name != "__init__.py"):
        (room,) = [one for one in rooms if path.is_relative_to(one)] or [None]
        if room and (PACKAGE / path).read_text().count("\n") >= 60:
            named = [one for one in tests if one.name == f"test_{path.name}" and one.is_relative_to(room)]
            missing += [] if named else [str(path)]
    return missing


def test_a_module_of_ring_0_has_its_tests_in_a_file_of_its_name():
    tests = {path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert untested(MODULES, tests) == []
    assert untested(MODULES, tests - {Path("optim/test_rules.py")}) == ["optim/rules.py"], "negative control"


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
            public = [
                n
                for n in methods
                if not any(isinstance(d, ast.Name) and d.id in ("property", "cached_property") for d in n.decorator_list)
            ]
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
        for name in re.findall(r"^class ([A-Za-z]\w*)", source, re.MULTILINE):
            found.setdefault(f"class {name}", []).append(file)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_modules_and_public_classes_have_names_of_their_own():
    paths = [*MODULES, *MODULES_BESIDE]
    assert not twice({str(path.relative_to(ROOT)): path.read_text() for path in paths})


def test_negative_control_a_name_that_occurs_twice_is_noticed():
    found = twice({"a/x.py": "class A: pass", "b/y.py": "class A: pass\nclass _B: pass", "c/x.py": "class _B: pass"})
    assert set(found) == {"class A", "module x"}
