"""What stands beside the core, by name, in packages of their own: `psigrad_extras`, `psigrad_serve` and `psigrad_studio`.

This table is the core's one way there. Nothing is imported before it is asked for, and without a package the rest works.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from psigrad.errors import UserError


class Beside(NamedTuple):
    """A module beside the core, what people call that which it does, and the extra of pyproject.toml that it needs."""

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
    "trackers": Beside("psigrad_extras.connect.trackers", "report_to"),
    "verifiers": Beside("psigrad_extras.connect.verifiers_environment", "An environment of verifiers", "verifiers"),
    "vllm": Beside("psigrad_extras.vllm.vllm_backend", "sampler=vllm", "vllm"),
    # the commands of each package, one function each
    "psigrad_extras": Beside("psigrad_extras.commands", "This command"),
    "psigrad_serve": Beside("psigrad_serve.commands", "This command", "serve"),
    "psigrad_studio": Beside("psigrad_studio.commands", "This command", "studio"),
}


def load(name: str) -> Any:
    """The module of that name in `BESIDE`. Raises `UserError` where its package, or what that needs, is not installed."""
    module, purpose, extra = BESIDE[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] == package:
            raise UserError(
                f"{purpose} needs {package}, which comes with psigrad and is not here; install all of it: pip install psigrad."
            ) from error
        if not extra:
            raise
        raise UserError(
            f"{purpose} needs {error.name}, which cannot be imported ({error}); install it: pip install 'psigrad[{extra}]'."
        ) from error


def find(name: str) -> Any:
    """As `load`, or None where the package is not there."""
    try:
        return load(name)
    except UserError:
        return None


def command(package: str, name: str) -> Callable[[list[str]], int]:
    """A command of one of the packages: arguments -> exit status."""

    def run(arguments: list[str]) -> int:
        status: int = getattr(load(package), name)(arguments)
        return status

    return run
