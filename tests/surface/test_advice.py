"""Advice in messages: every `psigrad COMMAND` and `--flag` that a message names exists, and the command takes the flag."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from psigrad import cli

ROOT = Path(__file__).parents[2]
PACKAGES = ("psigrad", "psigrad_extras", "psigrad_serve", "psigrad_studio")
COMMAND = re.compile(r"`psigrad ([a-z][a-z-]+)\b([^`]*)`|\bpsigrad ([a-z][a-z-]+)((?: --[a-z][a-z-]+(?: \S+)?)+)")
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z]*(?:-[a-z0-9]+)*)\b(?!=?\{)")
# Flags of psigrad itself and of every command's help, and those of other programs: torchrun, docker, llama-server, xcode-select,
# pg_dump and pg_restore.
OTHERS = {"version", "help-all", "flag", "nproc-per-node", "security-opt", "cap-add", "jinja", "install", "format", "clean"}


@cache
def strings() -> list[tuple[str, str]]:
    """What `_strings` finds, once."""
    return list(_strings())


def _strings() -> Iterator[tuple[str, str]]:
    """(place, text) of every string of the packages that is no docstring, with … for what is filled in, and of the YAML texts."""
    for file in (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))):
        tree, name = ast.parse(file.read_text()), file.relative_to(ROOT)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
        inner: set[int] = set()
        for node in ast.walk(tree):
            place = f"{name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                inner |= {id(part) for part in node.values}
                yield place, "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | inner:
                yield place, node.value
    for name in ("psigrad/records/alerts.yaml",):
        for key, entry in yaml.safe_load((ROOT / name).read_text()).items():
            yield from ((f"{name}:{key}", str(entry.get(part, ""))) for part in ("says", "why", "do"))


@cache
def flags_of(command: str) -> frozenset[str]:
    """The flags that the whole help of a command names."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        cli.main([command, "--help-all"])
        cli.main([command, "--help"])
    if "METHOD" in said.getvalue():
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            cli.main([command, "grpo", "--help-all"])
    found = {flag.removeprefix("no-") for flag in re.findall(r"--(?:\[no-\])?([a-z][a-z0-9-]*)", said.getvalue())}
    return frozenset(found)


def refused(text: str) -> list[str]:
    """The commands that a text names and that do not exist, and the flags that its command does not take."""
    found = []
    for one, behind, other, flags in COMMAND.findall(text):
        command = one or other
        if command not in cli.COMMANDS:
            found += [command] if one else []
            continue
        found += [
            f"{command} --{flag}" for flag in FLAG.findall(behind or flags) if flag.removeprefix("no-") not in flags_of(command)
        ]
    return found


def test_every_command_that_a_message_names_exists_and_takes_the_flags() -> None:
    texts = strings()
    assert sum(bool(COMMAND.search(text)) for _, text in texts) > 30
    assert {place: wrong for place, text in texts if (wrong := refused(text))} == {}


def test_every_flag_that_a_message_names_is_one_of_some_command() -> None:
    known = frozenset().union(*(flags_of(command) for command in cli.COMMANDS)) | OTHERS
    named = {flag.removeprefix("no-"): place for place, text in strings() if " " in text for flag in FLAG.findall(text)}
    assert len(named) > 80
    assert {place: flag for flag, place in named.items() if flag not in known} == {}


@pytest.mark.parametrize("text", ["take `psigrad scoree`", "`psigrad score --no-such skip` says", "psigrad sft --bad-row skip"])
def test_negative_control_wrong_advice_is_found(text: str) -> None:
    assert len(refused(text)) == 1
    assert refused("`psigrad score --bad-rows skip` and psigrad sft --bad-rows skip, or psigrad has none") == []
