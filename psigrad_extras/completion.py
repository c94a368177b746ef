"""`psigrad completion SHELL`: what makes a shell complete commands, flags and their values when Tab is pressed.

The script is whole: it holds every command and flag as they were when it was printed, so that Tab starts no Python.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from psigrad.cli.flags import Command, asks_for_help
from psigrad.config.methods import list_declarations
from psigrad.errors import UserError, nearest


class Flag(NamedTuple):
    """A flag, a line about it, and the words that it takes (empty: any)."""

    name: str
    purpose: str
    values: tuple[str, ...]


class Completions(NamedTuple):
    """A command as Tab offers it: `words` may follow it directly."""

    name: str
    purpose: str
    words: tuple[str, ...]
    flags: tuple[Flag, ...]


_SHELLS = ("bash", "zsh", "fish")
USAGE = f"psigrad completion {'|'.join(_SHELLS)}"
_INSTALL = """
Print what completes psigrad's commands and flags in your shell:

  bash   mkdir -p ~/.local/share/bash-completion/completions
         psigrad completion bash > ~/.local/share/bash-completion/completions/psigrad
  zsh    echo 'source <(psigrad completion zsh)' >> ~/.zshrc      (a line below compinit)
  fish   psigrad completion fish > ~/.config/fish/completions/psigrad.fish

Without the package bash-completion: echo 'source <(psigrad completion bash)' >> ~/.bashrc
Write the file again after an update of psigrad."""


def completion(arguments: Sequence[str], commands: Mapping[str, Command]) -> int:
    """Print the script for one shell. Raises `UserError` for a shell that it does not know."""
    if asks_for_help(arguments):
        print(USAGE + "\n" + _INSTALL)
        return 0
    if len(arguments) != 1:
        raise UserError(f"completion got {len(arguments)} arguments and takes the name of a shell; the usage is {USAGE}.")
    if arguments[0] not in _SHELLS:
        raise UserError(f"completion got {arguments[0]!r}; the usage is {USAGE}{nearest(arguments[0], _SHELLS) or '.'}")
    print(_script(arguments[0], [offer(name, command) for name, command in commands.items()]))
    return 0


def offer(name: str, command: Command) -> Completions:
    """What a command takes, read off its own help, so that no second list can fall behind."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        command.run(["--help-all"])
    usage, _, rest = text.getvalue().partition("\n")
    words = tuple(list_declarations()) if name in ("plan", "explain") else tuple(_choices(usage.removeprefix("usage: "), name))
    if name == "control":
        from psigrad.control.builder import names

        words = tuple(names())
    if name == "explain":
        from psigrad.records.warnings import texts

        words = (*words, *texts(), "defaults")
    flags = {flag.name: flag for flag in _described(rest)}
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text.getvalue()):
        flags.setdefault(flag, Flag(flag, "", ()))
    return Completions(name, command.purpose, words, tuple(flags.values()))


def _choices(usage: str, name: str) -> list[str]:
    """The words of `psigrad NAME a|b|c` in a usage line."""
    match = re.match(rf"psigrad {name} ([\w|-]+\|[\w|-]+)", usage)
    return match[1].split("|") if match else []


def _described(text: str) -> list[Flag]:
    """The flags of argparse's list, each with its text."""
    flags = []
    for part in re.split(r"\n  (?=-)", text)[1:]:
        heading, *below = part.split("\n\n")[0].split("\n")
        names, _, start = heading.partition("  ")
        about = " ".join(" ".join([start, *below]).split())
        values = re.search(r"\(([\w.+-]+(?:, [\w.+-]+)+)(?:; default [^()]*)?\)$", about)
        first = re.split(r"(?<=\w)[.;:] | \(", about)[0].rstrip(".")
        flags += [Flag(f, first, tuple(values[1].split(", ")) if values else ()) for f in re.findall(r"--[a-z][a-z0-9-]*", names)]
    return flags


def _script(shell: str, commands: Sequence[Completions]) -> str:
    """The script for a shell, out of `templates/completion/`."""
    from jinja2 import Environment, PackageLoader

    offers: dict[str, list[str]] = {}  # what is offered -> where; most methods share their flags
    values: dict[str, list[str]] = {}
    for command in commands:
        offers.setdefault(" ".join([*command.words, *(flag.name for flag in command.flags)]), []).append(command.name)
        for flag in command.flags:
            if flag.values:
                values.setdefault(" ".join(flag.values), []).append(f"{command.name}:{flag.name}")
    environment = Environment(loader=PackageLoader("psigrad_extras", "templates/completion"), trim_blocks=True)
    environment.filters |= {"quote": shlex.quote, "fish": _quote_for_fish}
    return environment.get_template(shell).render(commands=commands, offers=offers.items(), values=values.items()).rstrip("\n")


def _quote_for_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
