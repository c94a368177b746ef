"""A quicker start reads transformers' folder of models once, and leaves transformers as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

LOOK = """
import contextlib, gc, json
from pathlib import Path
from psigrad.recipes.quick import quick_imports
{before}
with {quick}:
    import transformers.models
    from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils import import_utils
misses = import_utils.create_import_structure_from_path.cache_info().misses
models = transformers.models
folders = sum(1 for entry in Path(models.__file__).parent.iterdir() if entry.is_dir() and entry.name != "__pycache__")
print(json.dumps({{
    "reads": misses / folders,
    "modules": sorted(models._modules),
    "classes": models._class_to_module,
    "names": {{name: sorted(members) for name, members in models._import_structure.items()}},
    "own": import_utils.define_import_structure.__module__,
    "collects": gc.isenabled(),
}}))
"""
WITHOUT_A_CACHE = """
from transformers.utils import import_utils
import_utils.define_import_structure = import_utils.define_import_structure.__wrapped__
"""


@cache
def started(quick: str, before: str = "") -> dict:
    """What a process of its own finds after its imports in the context `quick`."""
    code = LOOK.format(quick=quick, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def plain() -> dict:
    return started("contextlib.nullcontext()")


@pytest.mark.parametrize("before", ["", "import torch", "import transformers"])
def test_the_folder_is_read_once_and_says_the_same(before):
    quick = started("quick_imports()", before)
    assert quick["reads"] < 1.1
    assert len(quick["classes"]) > 1000
    assert {**quick, "reads": 0} == {**plain(), "reads": 0}
    assert quick["own"] == "transformers.utils.import_utils"


def test_negative_control_transformers_by_itself_reads_it_twice():
    assert plain()["reads"] > 1.9


@pytest.mark.parametrize("before", ["import transformers.models", WITHOUT_A_CACHE], ids=["read already", "without a cache"])
def test_where_transformers_has_it_otherwise_nothing_is_changed(before):
    assert {**started("quick_imports()", before), "reads": 0} == {**plain(), "reads": 0}
    assert started("quick_imports()", before)["reads"] > 1.9
