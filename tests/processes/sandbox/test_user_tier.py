"""The sandbox as an ordinary user has it: the hostile programs again, by a user without rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import psigrad

ROOT = Path(psigrad.__file__).parents[1]
NOBODY = 65534
# One or two of each kind; all of them with `make test-faults`.
SOME = "environment or daemon or fork or background or secret or network or success or equals or checker"


def as_nobody(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command by this machine's own Python: that of an environment may lie where only its owner may look."""
    paths = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])
    given = {"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    drop = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    python = "/usr/bin/python3" if os.geteuid() == 0 else sys.executable
    return subprocess.run(
        [*(drop if os.geteuid() == 0 else []), python, *command], env=given, cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture
def folder(tmp_path_factory):
    made = Path("/tmp") / f"psigrad-nobody-{os.getpid()}"
    made.mkdir()
    if os.geteuid() == 0:
        os.chown(made, NOBODY, NOBODY)
    yield made
    shutil.rmtree(made)


def judged(folder: Path, names: str) -> None:
    ready = as_nobody(folder, "-c", "import pytest, psigrad.language.rewards.code")
    if ready.returncode:
        pytest.skip(f"nobody can't run the tests here: {(ready.stderr.strip().splitlines() or ['?'])[-1]}")
    tier = as_nobody(
        folder, "-c", "from psigrad.processes.sandbox import tier_of_this_machine as t; print(t().name, t().why_not)"
    )
    assert tier.stdout.startswith("user"), tier.stdout + tier.stderr
    options = ["-q", "-p", "no:cacheprovider", "-n", "0", "--basetemp", str(folder / "t"), *(["-k", names] if names else [])]
    done = as_nobody(folder, "-m", "pytest", *options, "tests/processes/sandbox/test_hostile.py")
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_hostile_programs_get_nowhere_by_an_ordinary_user(folder):
    judged(folder, SOME)


@pytest.mark.long
def test_all_hostile_programs_get_nowhere_by_an_ordinary_user(folder):
    judged(folder, "")
