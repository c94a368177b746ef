"""The programs that tests start: how each is found, what Debian calls it, and what is left out where it is not.

    python tests/support/machine.py install       what `make test` does first

A test that starts one says so by `@pytest.mark.needs("bubblewrap")`, or takes a fixture of `FIXTURES`. `tests/conftest.py` leaves
it out where the program is missing or does not work, and says at the end how many were, and why. A test that imports one of
`PACKAGES` is left out in the same way where the package is missing, and a test of a family of models where the installed
transformers is older than the family. No test is left out otherwise. With CI=true or
PSIGRAD_TEST_EVERYTHING=1 what is missing fails the run.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
"""Seconds that a program has to show that it works: one that is only slow is there."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass(frozen=True)
class Lack:
    """Why the tests that need a program cannot run here."""

    why: str
    there: bool = False
    """The program is there, and does not work."""
    advice: str = ""

    @property
    def sentence(self) -> str:
        """Why, and what to do."""
        return f"{self.why}; {self.advice}" if self.advice else self.why


@dataclass(frozen=True)
class Need:
    """What some tests need of the machine."""

    tests: str
    """What the tests are of."""
    look: Callable[[], Lack | None]
    packages: tuple[str, ...] = ()
    """Debian's packages that bring it. None: it is a circumstance, such as being root, and fails no run."""


def _runs(*command: str, **given: object) -> str:
    """Nothing where a command ends well, else what it said last."""
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE, **given)  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return "" if done.returncode == 0 else (said or [f"exit status {done.returncode}"])[-1].strip()


def _program(name: str) -> Lack | None:
    return None if shutil.which(name) else Lack(f"no {name} on this machine")


@functools.cache
def browser() -> str | None:
    """The path of a Chromium: the system's, or the one that Playwright brought. Not within `sync_playwright` the first time."""
    if found := next((path for name in BROWSERS if (path := shutil.which(name))), None):
        return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


def _chromium() -> Lack | None:
    if said := _runs(sys.executable, "-m", "playwright", "--version"):
        # its own Node wants a library that comes with a compiler, and else alone
        return Lack(f"Playwright does not start here ({said})", there="libatomic" not in said)
    if (found := browser()) is None:
        return Lack("no Chromium on this machine", advice="apt-get install chromium, or playwright install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = [*BROWSER_FLAGS, "--headless", f"--user-data-dir={folder}", "--dump-dom", "about:blank"]
        said = _runs(found, *page)
    return Lack(f"{found} shows no page here ({said})", there=True) if said else None


def postgres(name: str) -> str | None:
    """Where a program of PostgreSQL's server is: where Debian puts it, or on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


def _postgresql() -> Lack | None:
    if os.environ.get("PSIGRAD_TEST_DATABASES") == "sqlite":
        return Lack("PSIGRAD_TEST_DATABASES=sqlite", there=True)
    if os.environ.get("PSIGRAD_TEST_POSTGRES"):
        return None
    initdb = postgres("initdb")
    if not initdb or not postgres("postgres"):
        return Lack("no PostgreSQL on this machine")
    said = _runs(initdb, "--version")
    return Lack(f"{initdb} does not run here ({said})", there=True) if said else None


def _bubblewrap() -> Lack | None:
    from psigrad.processes.sandbox import tier_of_this_machine

    for name in ("bwrap", "prlimit", *(("setpriv",) if os.geteuid() == 0 else ())):
        if lack := _program(name):
            return lack
    tier = tier_of_this_machine()
    return Lack(tier.why_not.rstrip("."), there=True) if tier.name == "none" else None


NOBODY = 65534


# As root of a user namespace with a single id, as in a rootless container.
ROOTLESS = ("unshare", "--user", "--map-root-user")


def as_nobody(folder: Path, python: str, *command: str, within: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A command by a Python as an ordinary user, behind the command `within`: as root it becomes nobody."""
    paths = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])
    given = {"HOME": str(folder), "PATH": os.environ["PATH"], "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    drop = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"] if os.geteuid() == 0 else []
    return subprocess.run([*drop, *within, python, *command], env=given, cwd=ROOT, capture_output=True, text=True)


@functools.cache
def python_of_nobody() -> tuple[str, str]:
    """A Python by which nobody can run the tests, or none and why: an environment's may lie where only its owner may look."""
    if os.geteuid() != 0:
        return sys.executable, ""
    said = ["?"]
    # setpriv may start what nobody may not: the programs that the sandbox runs are started by nobody
    code = "import subprocess, sys, pytest, psigrad.language.rewards.code; subprocess.run([sys.executable, '-c', ''], check=True)"
    for python in dict.fromkeys((os.path.realpath(sys.executable), f"{sys.base_prefix}/bin/python3", "/usr/bin/python3")):
        ready = as_nobody(Path("/tmp"), python, "-c", code)
        if ready.returncode == 0:
            return python, ""
        said = ready.stderr.strip().splitlines() or said
    return "", said[-1]


def _nobody() -> Lack | None:
    python, why = python_of_nobody()
    if not python:
        return Lack(
            f"the user nobody cannot run them from {ROOT} ({why})", advice="work in a clone that all may read, as in /srv"
        )
    code = "from psigrad.processes.sandbox import tier_of_this_machine as t; print(t().name, t().why_not)"
    said = as_nobody(Path("/tmp"), python, "-c", code)
    tier, _, why = said.stdout.strip().partition(" ")
    return None if tier == "user" else Lack(why or said.stderr.strip()[-300:])


def _rootless() -> Lack | None:
    python, _ = python_of_nobody()
    if not python:
        return _nobody()
    said = as_nobody(Path("/tmp"), python, "-c", "import os; print(os.geteuid())", within=ROOTLESS)
    return None if said.stdout.strip() == "0" else Lack(said.stderr.strip()[-300:] or "no user namespaces")


def _compiler() -> Lack | None:
    from psigrad.kernels import processor
    from psigrad.kernels.build import compiler

    if processor.forced_level() == "0":
        return Lack(f"{processor.SWITCH}=0", there=True)
    if (found := compiler()) is None:
        return Lack("no C++ compiler on this machine")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "one.cpp"
        source.write_text('#include <cmath>\n#include <omp.h>\nextern "C" int one() { return omp_get_max_threads(); }\n')
        said = _runs(found, "-fopenmp", "-fPIC", "-shared", "-std=c++17", str(source), "-o", f"{folder}/one.so")
    return Lack(f"{found} does not compile here ({said})", there=True, advice="apt-get install g++") if said else None


def _tiles() -> Lack | None:
    from psigrad.kernels import build, processor

    if "x86-64-v4-bf16" not in processor.levels():
        return Lack("this processor has no AVX-512 with bfloat16, which works beside AMX's tiles")
    if lack := _compiler():
        return lack
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "tiles.cpp"
        source.write_text("#include <immintrin.h>\nint main() { _tile_release(); }\n")
        said = _runs(str(build.compiler()), "-mamx-tile", "-mamx-bf16", str(source), "-o", f"{folder}/tiles")
    return Lack(f"{build.compiler()} knows no AMX ({said})", advice="take g++ 11 or clang++ 12, or a later one") if said else None


def _git() -> Lack | None:
    if lack := _program("git"):
        return lack
    said = _runs("git", "ls-files", "--error-unmatch", "pyproject.toml", cwd=ROOT)
    why = f"git does not know the files of {ROOT} ({said})"
    return Lack(why, there=True, advice="work in a clone of your own") if said else None


def _root() -> Lack | None:
    return None if os.geteuid() == 0 else Lack("only root can give files away", advice="run them as root")


def _linux() -> Lack | None:
    return None if sys.platform.startswith("linux") else Lack("only Linux says what a process holds", advice="run them on Linux")


def _node() -> Lack | None:
    return None if shutil.which("node") else Lack("no node on this machine", advice="apt-get install nodejs")


def _mcp() -> Lack | None:
    there = importlib.util.find_spec("mcp") is not None
    return None if there else Lack("the package mcp is not installed", advice="pip install mcp")


def _named(variable: str, what: str) -> Lack | None:
    return None if os.path.exists(os.environ.get(variable, "")) else Lack(f"{variable} names no {what}")


NEEDS = {
    "bubblewrap": Need("the sandbox", _bubblewrap, ("bubblewrap", "util-linux")),
    "nobody": Need("the sandbox of an ordinary user", _nobody),
    "rootless": Need("the sandbox in a rootless container", _rootless),
    "chromium": Need("pages in a browser", _chromium, ("chromium", "fonts-liberation", "libatomic1")),
    "postgresql": Need("labels on PostgreSQL", _postgresql, ("postgresql",)),
    "compiler": Need("the kernels for a CPU", _compiler, ("g++",)),
    "tiles": Need("the kernels for AMX", _tiles),
    "git": Need("the wheel", _git, ("git",)),
    "curl": Need("programs that ask by curl", lambda: _program("curl"), ("curl",)),
    "node": Need("agents in JavaScript", _node),
    "cookbook": Need("tinker-cookbook", lambda: _named("PSIGRAD_COOKBOOK", "Python that has it (make test-cookbook)")),
    "ifeval": Need("IFEval's published answers", lambda: _named("PSIGRAD_IFEVAL", "folder with them")),
    "mcp": Need("MCP servers", _mcp),
    "root": Need("files of other users", _root),
    "linux": Need("the memory that a process holds", _linux),
}
PACKAGES = {
    "TRL": ("trl",),
    "Stable-Baselines3": ("stable_baselines3",),
    "pymdptoolbox": ("mdptoolbox",),
    "reasoning-gym": ("reasoning_gym",),
    "Gymnasium's Box2D": ("Box2D", "pygame"),
    "the browser": ("playwright", "axe_playwright_python"),
    "the labels": ("sqlalchemy", "zxcvbn", "psycopg"),
    "servers": ("fastapi", "starlette", "uvicorn", "llguidance", "openai", "anthropic", "httpx"),
    "MCP": ("mcp",),
    "the search over settings": ("optuna",),
    "IFEval": ("py3langid",),
    "TensorBoard": ("tensorboard",),
    "the documentation": ("sphinx", "myst_nb", "docutils"),
    "types": ("mypy", "basedpyright"),
}
"""Packages that `make install` installs and `make quick` does not, by what they are for."""
FIXTURES = {"browser": "chromium", "postgres": "postgresql", "postgres_server": "postgresql"}
"""Fixtures that start a program: whoever takes one needs it."""


@functools.cache
def lack(name: str) -> Lack | None:
    """Why a need is not met on this machine; None: it is. Tried, not guessed."""
    need = NEEDS[name]
    found = need.look()
    if found and not found.there and not found.advice and need.packages:
        return replace(found, advice=f"apt-get install {' '.join(need.packages)}")
    return found


def missing_package(said: str) -> str:
    """Return what is left out, and why, if an error says that a package of `PACKAGES` or a family of models is missing; else an
    empty string.

    Where everything is to be tested nothing is left out.
    """
    if (family := re.search(r"Unrecognized model identifier: (\w+)", said)) and not everything():
        return f"the family {family[1]}: transformers {importlib.metadata.version('transformers')} does not have it"
    named = re.search(r"No module named '(\w+)'", said)
    kind = next((kind for kind, names in PACKAGES.items() if named and named[1] in names), "")
    return "" if named is None or not kind or everything() else f"{kind}: {named[1]} is not installed; make install"


def everything() -> bool:
    """Whether a program that is missing fails the run."""
    return os.environ.get("CI", "").lower() in ("true", "1") or os.environ.get("PSIGRAD_TEST_EVERYTHING", "0") not in ("", "0")


def fails(name: str) -> bool:
    """Whether a need that is not met fails its tests."""
    return everything() and bool(NEEDS[name].packages)


def left_out(name: str, count: int, why: str) -> str:
    """What is said at the end of the tests of a need that is not met."""
    done = "failed" if name in NEEDS and fails(name) else "were left out" if count > 1 else "was left out"
    what = NEEDS[name].tests if name in NEEDS else name
    return f"{count} {'tests' if count > 1 else 'test'} of {what} {done}: {why}"


def install() -> int:
    """Install what is missing, as far as that is allowed here. 1 where a run that wants everything lacks something."""
    missing = {name: n.packages for name, n in NEEDS.items() if n.packages and (found := lack(name)) and not found.there}
    if missing:
        packages = [package for each in missing.values() for package in each]
        if os.geteuid() == 0 and shutil.which("apt-get"):
            print(f"Installing by apt-get what some tests start: {', '.join(missing)}. That takes minutes.", flush=True)
            _apt_get(packages)
            lack.cache_clear()
            browser.cache_clear()
        else:
            print("Not installed, as only root can, by apt-get:", ", ".join(missing))
    lacking = {name: found for name, need in NEEDS.items() if need.packages and (found := lack(name))}
    if lacking:
        print("Their tests fail, as everything is to be tested:" if everything() else "Their tests will be left out:")
    for name, found in lacking.items():
        print(f"- {name}: {found.sentence}")
    return int(bool(lacking) and everything())


def _apt_get(packages: Sequence[str]) -> None:
    """All at once, or one by one where one of them cannot be had."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    start = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Install-Recommends=0"]

    def tried(*rest: str) -> str:
        done = subprocess.run([*start, *rest], env=environment, capture_output=True, text=True, errors="replace", check=False)
        said = [line for line in done.stderr.splitlines() if line.startswith("E:")] or done.stderr.splitlines()
        return "" if done.returncode == 0 else (said or ["?"])[0]

    if said := tried("update"):
        print(f"apt-get update failed: {said}", flush=True)
    if tried("install", "--yes", *packages):
        for package in packages:
            if said := tried("install", "--yes", package):
                print(f"apt-get cannot install {package}: {said}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit(__doc__)
    sys.exit(install())
