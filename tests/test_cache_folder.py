"""Where things are kept that can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from psigrad.cache_folder import cache_folder

PACKAGES = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOME": "/home/ann"}, "/home/ann/.cache/psigrad/models"),
        ({"HOME": "/home/ann", "XDG_CACHE_HOME": "/scratch"}, "/scratch/psigrad/models"),
        ({"HOME": "/home/ann", "XDG_CACHE_HOME": "/scratch", "PSIGRAD_CACHE": "/fast/ours"}, "/fast/ours/models"),
        ({"HOME": "/home/ann", "XDG_CACHE_HOME": "", "PSIGRAD_CACHE": ""}, "/home/ann/.cache/psigrad/models"),
    ],
)
def test_the_nearest_variable_says_where(monkeypatch, variables, expected):
    for name in ("XDG_CACHE_HOME", "PSIGRAD_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder("models") == Path(expected)


def test_rows_models_and_kernels_are_all_kept_there():
    sources = [path for name in ("psigrad", "psigrad_extras") for path in (PACKAGES / name).rglob("*.py")]
    users = {path.relative_to(PACKAGES).as_posix() for path in sources if "import cache_folder" in path.read_text()}
    assert {"psigrad/language/loading/model_source.py", "psigrad/kernels/build.py"} < users
    asking = {path.relative_to(PACKAGES).as_posix() for path in sources if 'environ.get("XDG_CACHE_HOME")' in path.read_text()}
    assert asking == {"psigrad/cache_folder.py"}
