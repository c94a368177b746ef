"""What psigrad is installed with: locked by hash, named with its licence, and whole in a wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import lock  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_lock_has_every_pinned_package_with_its_hashes():
    text = lock.LOCK.read_text()
    assert lock.pinned(text) == lock.pinned(lock.CONSTRAINTS.read_text())
    entries = re.split(r"\n(?=[A-Za-z0-9])", text)[1:]
    assert len(entries) == len(lock.pinned(text))
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]
    assert "--hash=sha256:" + lock.TORCH_CPU in next(e for e in entries if e.startswith("torch=="))


def test_a_locked_install_builds_psigrad_with_what_is_locked():
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "--no-deps" in line and "--editable" in line]
    assert "--no-build-isolation" in line, "else pip fetches the newest setuptools, without a hash"
    backend = re.match(r"[\w-]+", tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"][0])
    assert backend is not None and backend[0] in lock.pinned(lock.LOCK.read_text())


def test_every_dependency_is_locked():
    needed = {
        *PROJECT["dependencies"],
        *(d for e in ("dev", "studio", "control", "docs") for d in PROJECT["optional-dependencies"][e]),
    }
    names = {lock.normalised(re.match(r"[A-Za-z0-9_.-]+", one)[0]) for one in needed}
    assert names <= lock.pinned(lock.LOCK.read_text()).keys()


def test_notices_and_bill_of_materials_are_those_of_what_is_installed():
    found = lock.packages()
    assert len(found) > 100 and all(p.licence and p.home.startswith("http") for p in found)
    assert lock.NOTICES.read_text() == lock.notices(found), "run: python tools/lock.py"
    assert lock.SBOM.read_text() == lock.bill_of_materials(found), "run: python tools/lock.py"
    content = json.loads(lock.SBOM.read_text())
    locked, vendored = lock.LOCK.read_text(), {name for name, *_ in lock.VENDORED}
    for component in content["components"]:
        assert bool(component["hashes"]) is (component["name"] not in vendored), component["name"]
        assert all(f"--hash=sha256:{entry['content']}" in locked for entry in component["hashes"])
    assert content["bomFormat"] == "CycloneDX" and len({c["bom-ref"] for c in content["components"]}) == len(found)


def test_what_is_vendored_is_named_with_its_licence():
    folders = {p.parent for p in (ROOT / "psigrad_studio" / "static").glob("vendor/*/*")}
    assert {f.name.lower() for f in folders} == {name.lower() for name, *_ in lock.VENDORED}
    assert all((f / "LICENSE").exists() for f in folders)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel as it would be published, made from the files that git knows."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(made),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = made.glob("psigrad-*.whl")
    return found


@pytest.mark.needs("git")
def test_the_wheel_holds_all_that_is_read_at_run_time(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("psigrad", "psigrad_extras", "psigrad_studio", "psigrad_serve"):
        for file in (ROOT / package).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert file.relative_to(ROOT).as_posix() in names, f"{file} is not in the wheel"
    licences = [name for name in names if name.endswith(("LICENSE", "THIRD_PARTY_NOTICES.md")) and "dist-info" in name]
    assert len(licences) == 2
    assert not [name for name in names if name.startswith(("tests/", "docs/", "tools/", "benchmarks/", "studies/"))]


@pytest.mark.slow
@pytest.mark.needs("git", "compiler")
def test_the_wheel_works_outside_of_the_repository(wheel, tmp_path):
    """In an environment of its own. The other packages are those of this one: they are large, and not what is tested."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    (site,) = (home / "lib").glob("python*/site-packages")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    # the project's own folder comes by another .pth, which a path file does not read
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    given = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(python, "-c", "import psigrad, psigrad_studio; print(psigrad.__file__, psigrad_studio.__file__)")
    assert all(path.startswith(str(home)) for path in where.split()), where
    assert run("psigrad", "--version").strip() == f"psigrad {PROJECT['version']}"
    assert "advantage" in run("psigrad", "explain", "grpo").lower()
    assert (
        run(python, "-c", "from psigrad.language.models.native.kernels import kernels; print(isinstance(kernels(), str))").strip()
        == "False"
    )
    assert "--port" in run("psigrad", "studio", "--help")
