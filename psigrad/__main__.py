"""The command line: `psigrad` and `python -m psigrad`."""

from __future__ import annotations

import os
import sys

from psigrad.runs.survival import supervise

# Commands that run until the user ends them, and flags for help. Neither needs a supervised child.
_UNTIL_ENDED = {"studio", "serve", "chat"}
_HELP = {"-h", "--help", "--help-all"}


def start() -> int:
    """Run the command in a supervised child process (see `supervise`), which is forked before any slow import.

    Servers, chat and help run in this process. So do the ranks of a run with several processes: their launcher supervises them.
    """
    arguments = sys.argv[1:]
    alone = not arguments or arguments[0] in _UNTIL_ENDED or _HELP.intersection(arguments) or "WORLD_SIZE" in os.environ
    return _run() if alone else supervise(_run)


def _run() -> int:
    from psigrad.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
