"""Tests on several processes: each runs once, what fails is told, and a worker that dies fails the test that it ran."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import workers

TESTS = {
    "first": "def test_passes(tmp_path): print('not shown')\ndef test_fails(): print('shown'); assert 0\n",
    "second": "import os, signal\ndef test_dies(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_is_never_reached(): pass\n",
    **{f"more{n}": "import warnings\ndef test_warns(): warnings.warn('a word')\n" for n in range(6)},
}


def test_every_file_runs_once_and_a_worker_that_dies_fails_its_test(tmp_path):
    (tmp_path / "conftest.py").write_text("from workers import pytest_addoption, pytest_runtestloop\n")
    for name, text in TESTS.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": str(Path(workers.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--workers",
        "3",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and re.search(r"\b2 failed, 7 passed, 6 warnings\b", done.stdout), done.stdout
    assert "A worker ended while this test ran" in done.stdout and "test_second.py::test_dies" in done.stdout
    assert "shown" in done.stdout and "not shown" not in done.stdout
