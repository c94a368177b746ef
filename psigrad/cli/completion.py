"""`psigrad completion SHELL`: what makes a shell complete commands, flags and their values when Tab is pressed.

The script is whole: it holds every command and flag as they were when it was printed, so that Tab starts no Python.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from psigrad.cli.flags import asks_for_help
from psigrad.config.methods import declared
from psigrad.errors import UserError, nearest


class Runnable(Protocol):
    """What is asked of a command: its line in the help, and a function that prints its own help for `--help-all`."""

    @property
    def purpose(self) -> str:
        """A line."""

    @property
    def run(self) -> Callable[[list[str]], int]:
        """Arguments -> exit status."""


class Flag(NamedTuple):
    """A flag, a line about it, and the words that it takes (empty: any)."""

    name: str
    purpose: str
    values: tuple[str, ...]


class Shown(NamedTuple):
    """A command as Tab offers it: `words` may follow it directly."""

    name: str
    purpose: str
    words: tuple[str, ...]
    flags: tuple[Flag, ...]


USAGE = "psigrad completion bash|zsh|fish"
_INSTALL = """
Print what completes psigrad's commands and flags in your shell:

  bash   mkdir -p ~/.local/share/bash-completion/completions
         psigrad completion bash > ~/.local/share/bash-completion/completions/psigrad
  zsh    echo 'source <(psigrad completion zsh)' >> ~/.zshrc      (a line below compinit)
  fish   psigrad completion fish > ~/.config/fish/completions/psigrad.fish

Without the package bash-completion: echo 'source <(psigrad completion bash)' >> ~/.bashrc
Write the file again after an update of psigrad."""


def completion(arguments: Sequence[str], commands: Mapping[str, Runnable]) -> int:
    """Print the script for one shell. Raises `UserError` for a shell that it does not know."""
    if asks_for_help(arguments):
        print(USAGE + "\n" + _INSTALL)
        return 0
    if len(arguments) != 1:
        raise UserError(f"completion got {len(arguments)} arguments and takes the name of a shell; the usage is {USAGE}.")
    if arguments[0] not in _SCRIPTS:
        raise UserError(f"completion got {arguments[0]!r}; the usage is {USAGE}{nearest(arguments[0], _SCRIPTS) or '.'}")
    print(_SCRIPTS[arguments[0]]([shown(name, command) for name, command in commands.items()]))
    return 0


def shown(name: str, command: Runnable) -> Shown:
    """What a command takes, read off its own help, so that no second list can fall behind."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        command.run(["--help-all"])
    usage, _, rest = text.getvalue().partition("\n")
    words = tuple(declared()) if name in ("plan", "explain") else tuple(_choices(usage.removeprefix("usage: "), name))
    if name == "control":
        from psigrad.control.builder import names

        words = tuple(names())
    flags = {flag.name: flag for flag in _described(rest)}
    for found in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text.getvalue()):
        flags.setdefault(found, Flag(found, "", ()))
    return Shown(name, command.purpose, words, tuple(flags.values()))


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


def _bash(commands: Sequence[Shown]) -> str:
    cases: dict[str, list[str]] = {}  # what is offered -> where; most methods share their flags
    values: dict[str, list[str]] = {}
    for command in commands:
        offered = " ".join([*command.words, *(flag.name for flag in command.flags)])
        cases.setdefault(offered, []).append(command.name)
        for flag in command.flags:
            if flag.values:
                values.setdefault(" ".join(flag.values), []).append(f"{command.name}:{flag.name}")
    names = shlex.quote(" ".join([*(c.name for c in commands), "--help", "--version"]))
    return "\n".join(
        [
            "# completion of psigrad for bash",
            "_psigrad() {",
            "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=",
            "  COMPREPLY=()",
            "  if ((COMP_CWORD == 1)); then",
            f'    COMPREPLY=($(compgen -W {names} -- "$current"))',
            "    return",
            "  fi",
            '  case "$command:$before" in',
            *_cases(values),
            "  esac",
            '  if [[ -z $words && ($current == -* || $COMP_CWORD -eq 2) ]]; then case "$command" in',
            *_cases(cases),
            "  esac; fi",
            "  # where nothing is offered bash completes files, as -o default asks below",
            '  [[ -z $words ]] || COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _psigrad psigrad",
        ]
    )


def _cases(places: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"    {'|'.join(where)}) words={shlex.quote(words)} ;;" for words, where in places.items()]


def _zsh(commands: Sequence[Shown]) -> str:
    def pair(name: str, purpose: str) -> str:
        return shlex.quote(name.replace(":", r"\:") + ":" + purpose)

    cases = []
    for command in commands:
        cases.append(f"    {command.name})")
        cases.append(f"      words=({' '.join(map(shlex.quote, command.words))})")
        cases.append(f"      flags=({' '.join(pair(f.name, f.purpose) for f in command.flags)})")
        cases += [f"      [[ $before == {f.name} ]] && values=({' '.join(f.values)})" for f in command.flags if f.values]
        cases.append("      ;;")
    names = " ".join(pair(c.name, c.purpose) for c in commands)
    return "\n".join(
        [
            "#compdef psigrad",
            "# completion of psigrad for zsh",
            "_psigrad() {",
            "  local current=${words[CURRENT]} before=${words[CURRENT-1]} command=${words[2]}",
            f"  local -a commands=({names})",
            "  if ((CURRENT == 2)); then _describe command commands; return; fi",
            "  local -a words flags values",
            '  case "$command" in',
            *cases,
            "  esac",
            "  if (($#values)); then compadd -- $values; return; fi",
            "  ((CURRENT == 3 && $#words)) && compadd -- $words",
            "  if [[ $current == -* ]]; then _describe flag flags; else _files; fi",
            "}",
            "compdef _psigrad psigrad",
        ]
    )


def _fish(commands: Sequence[Shown]) -> str:
    lines = ["# completion of psigrad for fish"]
    for command in commands:
        lines.append(f"complete -c psigrad -n __fish_use_subcommand -f -a {command.name} -d {_fish_quoted(command.purpose)}")
    for command in commands:
        here = f"complete -c psigrad -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{here} -a {_fish_quoted(' '.join(command.words))}")
        for flag in command.flags:
            values = f" -x -a {_fish_quoted(' '.join(flag.values))}" if flag.values else ""
            about = f" -d {_fish_quoted(flag.purpose)}" if flag.purpose else ""
            lines.append(f"{here} -l {flag.name[2:]}{values}{about}")
    return "\n".join(lines)


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
