"""Methods are read without torch, which the first computation brings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CATALOGS = "from psigrad.objective import catalog\nfrom psigrad.objective.preferences import preference_catalog\n"
STAND_IN = "from psigrad.objective import batch, lazy_torch\nfrom psigrad.objective.parts import ratio\n"


def said(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()


def test_the_catalogs_and_explain_need_no_torch():
    assert said(f"{CATALOGS}print('torch' in sys.modules)") == "False"
    assert said("import psigrad\npsigrad.explain('grpo', 'dapo')\nprint('torch' in sys.modules)") == "False"


def test_after_the_first_use_every_module_holds_torch_itself():
    """And what torch lacks is missing there, too."""
    code = (
        f"{STAND_IN}first = type(batch.torch).__name__\nratio.torch.float32\nimport torch\n"
        "print(first, all(m.torch is torch for m in (batch, ratio, lazy_torch)))"
    )
    lacking = "print(hasattr(ratio.torch, 'frobnicate'), ratio.torch.__name__)"
    assert said(f"{code}\n{lacking}").split() == ["_LazyTorch", "True", "False", "torch"]


@pytest.mark.slow
def test_torch_imported_before_is_the_same():
    """Its heart: test_after_the_first_use_every_module_holds_torch_itself."""
    assert said(f"import torch\n{STAND_IN}print(ratio.torch.ones is torch.ones, batch.torch is torch)") == "True True"


@pytest.mark.slow
def test_threads_that_use_it_first_at_once_all_get_it():
    """Its heart: test_after_the_first_use_every_module_holds_torch_itself."""
    code = (
        f"{STAND_IN}from concurrent.futures import ThreadPoolExecutor\nstand_in = ratio.torch\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    kinds = set(pool.map(lambda i: stand_in.nn.functional.pad, range(8)))\n"
        "import torch\nprint(kinds == {torch.nn.functional.pad})"
    )
    assert said(code) == "True"


def test_no_group_has_the_id_of_padding_rows():
    import torch

    from psigrad.objective import batch

    assert torch.iinfo(torch.int64).min == batch.EMPTY_ROW
