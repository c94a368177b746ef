"""The table of plug-ins (psigrad.control and the packages psigrad_…), and the requirements of pyproject.toml's extras.

The core imports these packages only through this table. Each module is imported on first use, and everything else works without
it.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from psigrad.errors import UserError

DEVELOPERS = ("dev", "types", "peers", "browser", "docs")
"""The extras that only developers of psigrad need."""


class Beside(NamedTuple):
    """A plug-in: its module, the name of its feature for error messages, and the extra of pyproject.toml that it needs."""

    module: str
    purpose: str
    extra: str = ""


BESIDE = {
    "agents": Beside("psigrad_serve.agents.agent_gateway", "An agent asks the policy over HTTP and", "serve"),
    "attack": Beside("psigrad_extras.investigate.attack", "score --attack"),
    "cluster": Beside("psigrad_extras.cluster.ray_placement", "placement.cluster", "cluster"),
    "comparison page": Beside("psigrad_extras.investigate.compare", "compare"),
    "fit": Beside("psigrad_extras.preflight.plan.fit", "run.max_memory"),
    "games": Beside("psigrad_extras.games", "An environment by name"),
    "hub": Beside("psigrad_extras.connect.hub", "The hub"),
    "judges": Beside("psigrad_extras.judges", "The rewards rubric, ranking and ifeval"),
    "likelihood": Beside("psigrad_extras.connect.likelihood", "likelihood"),
    "mcp": Beside("psigrad_extras.connect.mcp_tools", "An MCP server", "mcp"),
    "mcp environment": Beside("psigrad_extras.connect.mcp_environment", "An environment of MCP", "mcp"),
    "openenv": Beside("psigrad_extras.connect.openenv_environment", "An environment of OpenEnv", "openenv"),
    "mesh": Beside("psigrad_extras.mesh.mesh", "tp_size, cp_size or dp_replicate_size above 1"),
    "plan": Beside("psigrad_extras.preflight.plan.plan", "A plan"),
    "sandbox": Beside("psigrad_extras.connect.remote_sandbox", "A sandbox service"),
    "server": Beside("psigrad_extras.connect.openai_server", "--server"),
    "teacher": Beside("psigrad_extras.connect.teacher_server", "A teacher behind a server"),
    "textarena": Beside("psigrad_extras.connect.textarena_environment", "An environment of textarena", "textarena"),
    "text games": Beside("psigrad_extras.text_games", "A game of several seats"),
    "trackers": Beside("psigrad_extras.connect.trackers", "report_to"),
    "verifiers": Beside("psigrad_extras.connect.verifiers_environment", "An environment of verifiers", "verifiers"),
    "vllm": Beside("psigrad_extras.vllm.vllm_backend", "sampler=vllm", "vllm"),
    # The commands of each package, one function each.
    "control": Beside("psigrad.control.commands", "This command"),
    "psigrad_extras": Beside("psigrad_extras.commands", "This command"),
    "psigrad_serve": Beside("psigrad_serve.commands", "This command", "serve"),
    "psigrad_studio": Beside("psigrad_studio.commands", "This command", "studio"),
}


def load(name: str) -> Any:
    """Import the plug-in `name` of the table `BESIDE`. Raises `UserError` if its package or a requirement is not installed."""
    module, purpose, extra = BESIDE[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] == package:
            raise UserError(
                f"{purpose} needs {package}, a part of psigrad that is missing. Run `pip install .` in a checkout of psigrad."
            ) from error
        if not extra:
            raise
        raise not_installed(purpose, error, extra) from error


def find(name: str) -> Any:
    """Import the plug-in `name` of the table `BESIDE`. Return None if its package or a requirement is not installed."""
    try:
        return load(name)
    except UserError:
        return None


def not_installed(purpose: str, error: ImportError, extra: str) -> UserError:
    """Return the error for a feature (`purpose`) that needs the packages of an extra, one of which cannot be imported."""
    return UserError(f"{purpose} needs {error.name}, which cannot be imported ({error}). Run `{install_command(extra)}`.")


@contextlib.contextmanager
def needing(purpose: str, extra: str) -> Iterator[None]:
    """Convert an ImportError in the block to the error of `not_installed`, for the feature `purpose` and its `extra`."""
    try:
        yield
    except ImportError as error:
        raise not_installed(purpose, error, extra) from error


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, such as `pip install 'uvicorn>=0.40'`.

    It names the packages themselves, because psigrad is not on PyPI and the user may have no checkout.
    """
    return shlex.join(["pip", "install", *requirements()[extra]])


def find_extra(package: str) -> str:
    """Return the first extra that installs a package, apart from `DEVELOPERS`; empty if there is none."""
    return next((extra for extra in requirements() if extra not in DEVELOPERS and _installs(extra, package)), "")


def _installs(extra: str, package: str) -> bool:
    """Return True if an extra names a package."""
    wanted = re.sub(r"[-_.]+", "-", package).lower()
    return wanted in (re.split(r"[^\w-]", one)[0].lower() for one in requirements()[extra])


def check_versions() -> None:
    """Raise `UserError` if the installed torch, transformers or peft is older than psigrad requires."""
    for name in ("torch", "transformers", "peft"):
        with contextlib.suppress(metadata.PackageNotFoundError):  # the package, or psigrad itself, was not installed by pip
            needed, found = next(one for one in requirements()[""] if one.startswith(f"{name}>=")), metadata.version(name)
            if [*map(int, re.findall(r"\d+", found)[:2])] < [*map(int, re.findall(r"\d+", needed))]:
                command = shlex.join(["pip", "install", "--upgrade", needed])
                raise UserError(f"psigrad needs {needed}, but {name} {found} is installed. Run `{command}`.")


@cache
def requirements() -> dict[str, list[str]]:
    """Return {extra: requirements}, from the checkout's pyproject.toml or from the installed package's metadata.

    The requirements of psigrad itself have the key "".
    """
    checkout = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(checkout.read_text())["project"] if checkout.is_file() else {}
    if project.get("name") == "psigrad":
        return {"": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {}
    for line in metadata.requires("psigrad") or ():
        requirement, _, marker = line.partition(";")
        match = re.search(r"""extra == ["']([\w-]+)""", marker)
        found.setdefault(match[1] if match else "", []).append(requirement.strip())
    return found


def command(package: str, name: str) -> Callable[[list[str]], int]:
    """Return a command of a plug-in package as a function (arguments -> exit status) that imports the package when called."""

    def run(arguments: list[str]) -> int:
        function, extra = getattr(load(package), name), BESIDE[package].extra
        try:
            status: int = function(arguments)
        except ModuleNotFoundError as error:
            if not (extra and _installs(extra, error.name or "")):
                raise
            raise not_installed("This command", error, extra) from error  # another extra may install the same package
        return status

    return run
