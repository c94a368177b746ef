"""The sandbox of an ordinary user and of root in a rootless container: the hostile programs again, by a user without rights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import machine
import pytest

pytestmark = pytest.mark.needs("bubblewrap", "nobody")
# One of each kind by an ordinary user; in a rootless container too, and one or two more of each, with `make test-slow`; all of
# them with `make test-faults`.
FEW = "daemon or network or success"
SOME = f"{FEW} or environment or worker or fork or background or secret or equals or FIFO or Unix"
ROOTLESS = pytest.mark.needs("rootless")
WITHIN = [pytest.param((), id="user"), pytest.param(machine.ROOTLESS, id="rootless", marks=ROOTLESS)]


@pytest.fixture
def folder(tmp_path_factory):
    made = Path("/tmp") / f"psigrad-nobody-{os.getpid()}"
    made.mkdir()
    if os.geteuid() == 0:
        os.chown(made, machine.NOBODY, machine.NOBODY)
    yield made
    shutil.rmtree(made)


def judged(folder: Path, names: str, within: tuple[str, ...]) -> None:
    python, _ = machine.python_of_nobody()
    options = ["-q", "-p", "no:cacheprovider", "-m", "not long", "--basetemp", str(folder / "t")]
    options += ["-k", names] if names else []
    done = machine.as_nobody(folder, python, "-m", "pytest", *options, "tests/processes/sandbox/test_hostile.py", within=within)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize(
    "within", [pytest.param((), id="user"), pytest.param(machine.ROOTLESS, id="rootless", marks=[ROOTLESS, pytest.mark.slow])]
)
def test_hostile_programs_get_nowhere_by_an_ordinary_user(folder, within):
    judged(folder, FEW, within)


@pytest.mark.slow
@pytest.mark.parametrize("within", WITHIN)
def test_more_hostile_programs_get_nowhere_by_an_ordinary_user(folder, within):
    judged(folder, SOME, within)


@pytest.mark.long
@pytest.mark.parametrize("within", WITHIN)
def test_all_hostile_programs_get_nowhere_by_an_ordinary_user(folder, within):
    judged(folder, "", within)
