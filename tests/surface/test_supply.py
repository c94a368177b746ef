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
    tested = re.search(r"^TESTED := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split(",")
    needed = {*PROJECT["dependencies"], *(one for extra in tested for one in PROJECT["optional-dependencies"][extra])}
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


def packed(folder: Path, **environment: str) -> Path:
    """The wheel as it would be published, made from the files that git knows."""
    source, made = folder / "source", folder / "wheel"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", made, source]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    (found,) = made.glob("psigrad-*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("pure"))


@pytest.fixture
def empty_machine(tmp_path):
    """An environment of its own, with the means to install a wheel and to run commands there. It has no compiler, no git and no
    library of an extra. What psigrad needs is that of this environment: large, and not what is tested.
    """
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    (site,) = (home / "lib").glob("python*/site-packages")
    # the project's own folder comes by another .pth, which a path file does not read
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name in ("reasoning_gym", "starlette", "uvicorn", "fastapi", "optuna"):
        (site / f"{name}.py").write_text(f"raise ModuleNotFoundError('none here', name={name!r})\n")
    given = {"PATH": str(home / "bin"), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def run(*command, said=0, typed=""):
        done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, input=typed, timeout=600)
        assert done.returncode == said, done.stderr
        return done.stdout + done.stderr

    def install(wheel):
        run(home / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
        return home

    return install, run


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


KERNELS = "from psigrad.kernels import build, kernels; print(build.prebuilt(), kernels.kernels())"


@pytest.mark.slow
@pytest.mark.needs("git")
def test_a_new_user_with_the_wheel_alone_trains_and_talks(wheel, empty_machine):
    """Its shorter sibling is tests/language/data/test_spelling.py."""
    install, run = empty_machine
    home = install(wheel)
    where = run("python", "-c", "import psigrad, psigrad_studio; print(psigrad.__file__, psigrad_studio.__file__)")
    assert all(path.startswith(str(home)) for path in where.split()), where
    assert run("psigrad", "--version").strip() == f"psigrad {PROJECT['version']}"
    assert "psigrad demo" in run("psigrad", "--help") or "demo " in run("psigrad", "--help")
    assert "advantage" in run("psigrad", "explain", "grpo").lower()
    said = run("psigrad", "demo", "--sft-steps", "2", "--rl-steps", "1", "--no-progress")
    assert "no C++ compiler was found" in said and re.search(r"^report  /.*/runs/demo/grpo/report\.html$", said, re.MULTILINE)
    rows = ("--dataset", "runs/demo/data/prompts.jsonl", "--max-completion-length", "12")
    assert "failed" not in run("psigrad", "check", "--model", "runs/demo/grpo/model", *rows)
    assert run("psigrad", "chat", "runs/demo/grpo", "--max-tokens", "3", typed="hello\n\n").count("> ") >= 2
    for command, package in (
        (["serve", "runs/demo/grpo"], "uvicorn"),
        (["studio", "runs"], "fastapi"),
        (["tasks"], "reasoning-gym"),
    ):
        said = run("psigrad", *command, said=2)
        assert "Run `pip install " in said and f"'{package}>=" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.needs("git", "compiler")
def test_a_wheel_with_kernels_has_them_where_no_compiler_is(empty_machine, tmp_path):
    """Its shorter sibling is in tests/kernels/test_build.py."""
    install, run = empty_machine
    made = packed(tmp_path, PSIGRAD_PREBUILD="1")
    assert re.fullmatch(rf"psigrad-{PROJECT['version']}-py3-none-linux_\w+\.whl", made.name)
    assert not [name for name in zipfile.ZipFile(made).namelist() if "purelib" in name], "auditwheel refuses those"
    install(made)
    found, kernels = run("python", "-c", KERNELS).split(" ", 1)
    assert found.endswith(".so") and "Kernels object" in kernels
    assert "RMSNorm agrees with PyTorch" in run("psigrad", "doctor")
