"""One online step stays short enough to follow. `python tools/trace_step.py` lists what these numbers count."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from tiny_jobs import forked

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import trace_step  # noqa: E402

# They may only fall.
FILES, IMPORTS = 45, 14


def test_a_step_passes_through_few_files_and_its_own_imports_little(tmp_path):
    def trace():
        sys.argv = ["trace_step.py"]
        with (tmp_path / "said").open("w") as file, contextlib.redirect_stdout(file):
            trace_step.main()

    assert forked(trace) == 0
    *listed, last = (tmp_path / "said").read_text().splitlines()
    files = [line.split()[1] for line in listed]
    assert f"{len(files)} files" in last
    # from the prompts to the weights, and each only once; the cycle writes what a step returns
    assert {"language/training/online/online_rl.py", "objective/policy_gradient.py", "optim/rules.py"} <= set(files)
    assert not any(file.startswith("records/") for file in files)
    assert len(set(files)) == len(files) <= FILES, "\n".join(files)
    assert trace_step.own_imports() <= IMPORTS


def test_negative_control_every_way_to_import_is_counted(tmp_path):
    source = "import psigrad.a\nimport os, psigrad.b as b\nfrom psigrad.c import d, e\ndef f():\n    from psigrad import g\n"
    (tmp_path / "x.py").write_text(source + "import psigrad_studio\nfrom pathlib import Path\n")
    assert trace_step.own_imports(tmp_path / "x.py") == 4
