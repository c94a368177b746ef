"""What commands share."""

from __future__ import annotations

from collections.abc import Sequence

# The one field whose flag has another name: `--model PATH` is what every user types.
_RENAMED = {"model.path": "model"}


def flag_of(name: str) -> str:
    """The flag of a setting: "optim.learning_rate" -> "--learning-rate"."""
    return "--" + _RENAMED.get(name, name.rpartition(".")[2]).replace("_", "-")


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether -h or --help is among the arguments."""
    return "-h" in arguments or "--help" in arguments


def finished(result: object) -> int:
    """Print what came of a run; exit status 0."""
    from psigrad.records.report import terminal

    terminal.finished(result)
    return 0
