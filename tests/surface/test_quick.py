"""A quicker start reads transformers' folder of models once, a line of each file, and leaves transformers as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from types import ModuleType

import pytest
from transformers.utils import import_utils

from psigrad.recipes import quick

LOOK = """
import contextlib, gc, json, sys
from collections import Counter
from psigrad.recipes.quick import quick_imports
opened = Counter()
sys.addaudithook(lambda event, args: opened.update([str(args[0])]) if event == "open" else None)
{before}
with {quick}:
    import transformers.models
    from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils import import_utils
models = transformers.models
read = Counter(times for path, times in opened.items() if "/transformers/models/" in path and path.endswith(".py"))
print(json.dumps({{
    "reads": max(times for times, files in read.items() if files > 100),
    "modules": sorted(models._modules),
    "classes": models._class_to_module,
    "names": {{name: sorted(members) for name, members in models._import_structure.items()}},
    "all": sorted(transformers._class_to_module.items()),
    "own": [import_utils.fetch__all__.__name__, import_utils.create_import_structure_from_path.__module__],
    "cache": getattr(import_utils.create_import_structure_from_path, "cache_parameters", dict)(),
    "finders": len(sys.meta_path),
    "collects": gc.isenabled(),
}}))
"""


@cache
def started(context: str, before: str = "") -> dict:
    """What a process of its own finds after its imports in that context."""
    code = LOOK.format(quick=context, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def plain(before: str = "") -> dict:
    return started("contextlib.nullcontext()", before)


@pytest.mark.parametrize("before", ["", "import torch"])
def test_every_file_is_read_once_and_says_the_same(before):
    quicker = started("quick_imports()", before)
    assert quicker["reads"] == 1
    assert len(quicker["classes"]) > 1000
    assert {**quicker, "reads": 0} == {**plain(), "reads": 0}
    assert quicker["own"] == ["fetch__all__", "transformers.utils.import_utils"]


def test_negative_control_transformers_by_itself_reads_them_twice():
    assert plain()["reads"] == 2


@pytest.mark.parametrize("before", ["import transformers", "import transformers.models"])
def test_what_is_imported_already_stays_as_it_is(before):
    assert started("quick_imports()", before) == plain(before)


TEXTS = [
    "",
    "import torch\n",
    '__all__ = ["A", "B"]',
    '__all__ = ["A"]\n',
    'x = 1\n__all__ = ["A", "B"]\ny = 2\n',
    'class A: ...\n\n\n__all__ = [\n    "A",\n    "B",\n]\n',
    '__all__ = ["Old"]\nclass A: ...\n__all__ = [\n    "A",\n]\n',
    '__all__ = ["A"]\nif x:\n    __all__ = ["B"]\n',
    'if x:\n    __all__ = ["B"]\n',
    '"""About __all__."""\n__all__ = ["A"]\n# __all__ is above',
    '__all__ = ["A"]\n\x0c__all__ = ["B"]\n',
    '\x0c__all__ = ["B"]\n',
    '__all__ = ["A"]\u2028__all__ = ["B"]',
    '__all__ = [\n    "A",\n    "B",',
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_names_are_those_of_the_whole_file(text):
    seen: list[str] = []
    reader = ModuleType("reader")

    def whole(read: str) -> list[str]:
        seen.append(read)
        return import_utils.fetch__all__(read)

    reader.fetch__all__ = whole
    with ExitStack() as changes:
        quick._quicken(reader, changes)
        assert reader.fetch__all__(text) == import_utils.fetch__all__(text)
    assert reader.fetch__all__ is whole
    assert text.endswith(seen[0])
    assert len(seen[0]) == len(text) or "\n__all__" in text


def test_a_version_that_reads_otherwise_is_left_alone():
    reader = ModuleType("reader")
    reader.create_import_structure_from_path = only = dict
    with ExitStack() as changes:
        quick._quicken(reader, changes)
        assert reader.create_import_structure_from_path is only
        assert not hasattr(reader, "fetch__all__")
