"""What commands share."""

from __future__ import annotations

from collections.abc import Sequence


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether -h or --help is among the arguments."""
    return "-h" in arguments or "--help" in arguments


def finished(result: object) -> int:
    """Print what came of a run; exit status 0."""
    from psigrad.report import terminal

    terminal.finished(result)
    return 0
