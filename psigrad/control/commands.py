"""The command `psigrad control`, which trains an agent on a Gymnasium environment."""

from __future__ import annotations

from psigrad.cli import flags
from psigrad.control.settings import ControlConfig


def control(arguments: list[str]) -> int:
    """Run `psigrad control`: train on a Gymnasium environment, and return the exit status."""
    # The first word may be the algorithm: psigrad control ppo --env CartPole-v1.
    first = {"algorithm": arguments[0]} if arguments and not arguments[0].startswith("-") and "=" not in arguments[0] else {}
    rest, command = arguments[len(first) :], "control [ALGORITHM]"
    asked = flags.parse(ControlConfig, command, rest, defaults=first)
    from psigrad.control import builder, hyperparameters, run
    from psigrad.records.report import terminal

    known = hyperparameters.settings_for(builder.name_of(asked.algorithm), str(asked.env)) if asked.tuned else {}
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
    terminal.print_result(run.run(flags.parse(ControlConfig, command, rest, defaults={**first, **known})))
    return 0
