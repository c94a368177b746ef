"""Command-line flags out of the settings themselves: one flag per field, its help the string under the field."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from psigrad.cli.common import flag_of
from psigrad.config import shortcuts
from psigrad.config.load import load, split_flags
from psigrad.config.methods import declaration, other_methods
from psigrad.config.nested import read_value
from psigrad.errors import UserError, nearest
from psigrad.preflight.settings import PlanConfig

__all__ = ["divided", "flag_of", "listed", "names_and_output", "number", "parse", "plain", "planned", "whole_number"]

T = TypeVar("T")
# Settings that may be one name or several.
_SEVERAL = ("data.dataset", "data.eval_dataset")
# What an override looks like: a dotted name of a setting, and a value.
_OVERRIDE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*=")


class _Parser(argparse.ArgumentParser):
    """argparse that raises our one-sentence error."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}; `{self.prog} --help` lists what there is.")


def parse(cls: type[T], command: str, arguments: Sequence[str], defaults: Mapping[str, Any] | None = None) -> T:
    """Settings from `--config FILE`, `a.b=c` overrides and flags.

    Flags beat overrides, overrides beat the file, the file beats `defaults`, those beat the class's own. Prints help and exits on
    --help. Raises `UserError` on anything unknown, with the nearest known name.
    """
    parser = _parser(cls, command, defaults or {})
    # taken out first: a flag with several values would swallow an override that follows it
    overrides = [text for text in arguments if _OVERRIDE.match(text)]
    flags, others = split_flags(cls, [text for text in arguments if not _OVERRIDE.match(text)], _switches(parser), flag_of)
    known, rest = parser.parse_known_args(flags)
    _refuse(rest, parser, "an override like optim.learning_rate=1e-5", cls)
    given = vars(known)
    config = given.pop("config")
    types = {name: hint for name, hint, _ in _fields(cls)}
    values = {name: _typed(value, types.get(name)) for name, value in given.items() if value is not None}
    values |= {name: values[name][0] for name in _SEVERAL if name in values and len(values[name]) == 1}
    return load(cls, config, overrides, {**values, **others}, defaults)


def plain(command: str, arguments: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of a command that has no settings class."""
    parser = _Parser(prog=f"psigrad {command}", allow_abbrev=False)
    for name, value in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(flag, type=type(value), default=value, help=f"(default {value})")
    known, rest = parser.parse_known_args(list(arguments))
    _refuse(rest, parser, "a value of one")
    return vars(known)


def divided(cls: type[T], command: str, arguments: Sequence[str]) -> tuple[T, list[str]]:
    """(settings of class `cls`, all other arguments), for a command that takes another's flags besides its own."""
    parser = _Parser(prog=f"psigrad {command}", allow_abbrev=False, add_help=False, usage=argparse.SUPPRESS)
    _add_flags(parser, cls, command)
    known, rest = parser.parse_known_args(list(arguments))
    if {"-h", "--help"} & set(rest):
        print(parser.format_help())
    types = {name: hint for name, hint, _ in _fields(cls)}
    values = {name: _typed(value, types[name]) for name, value in vars(known).items() if value is not None}
    values |= {name: values[name][0] for name in _SEVERAL if name in values and len(values[name]) == 1}
    return load(cls, flags=values), rest


def planned(arguments: Sequence[str]) -> tuple[Any, PlanConfig]:
    """(settings of the method that the first argument names, what its plan is told). Prints help and exits on --help."""
    usage = (
        "psigrad plan METHOD [--memory 24GB] [--devices N] [--prompt-length N] [--completion-length N] [--json] "
        "[METHOD's settings]"
    )
    name = next((text for text in arguments[:1] if not text.startswith("-")), "")
    if not name and {"-h", "--help"} & set(arguments):
        print(f"{usage}\n\nPeak memory, batch arithmetic and speed of a run, from the model's configuration alone.")
        raise SystemExit(0)
    if not name:
        raise UserError(f"plan got no method; the usage is {usage}.")
    method = declaration(name)
    asked, rest = divided(PlanConfig, f"plan {name}", arguments[1:])
    return parse(method.settings, f"plan {name}", rest, defaults=method.defaults), asked


def listed(arguments: Sequence[str], *lists: str) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """(leading names, the values behind each of the flags `lists`, all other arguments)."""
    names: list[str] = []
    found: dict[str, list[str]] = {name: [] for name in lists}
    rest, current = [], names
    for text in arguments:
        if text in found:
            current = found[text]
        elif text.startswith("-") or _OVERRIDE.match(text):
            rest.append(text)
            current = rest
        else:
            current.append(text)
    return names, found, rest


def number(flag: str, text: str) -> float:
    """The number in one value of a flag."""
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{flag} has {text!r}; expected numbers.") from None


def whole_number(flag: str, text: str) -> int:
    """The number in one value of a flag."""
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{flag} has {text!r}; expected whole numbers.") from None


def names_and_output(command: str, arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Names, and the value of `--output`, of a command that takes nothing else."""
    parser = _Parser(prog=f"psigrad {command}", allow_abbrev=False)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--output", metavar="FILE")
    known, rest = parser.parse_known_args(list(arguments))
    _refuse(rest, parser, "a name")
    return known.names, known.output


def _refuse(rest: Sequence[str], parser: _Parser, expected: str, cls: type[Any] | None = None) -> None:
    """A `UserError` for the first argument that the parser did not know."""
    for text in rest:
        if text.startswith("-"):
            flag = text.split("=")[0]
            if cls and (found := other_methods(cls, flag.lstrip("-").replace("-", "_"))):
                raise UserError(f"There is no flag {flag} of {parser.prog}{found}")
            hint = nearest(flag, _options(parser)) or "."
            raise UserError(f"There is no flag {flag}; `{parser.prog} --help` lists them{hint}")
        raise UserError(f"The argument {text!r} is neither a flag nor {expected}; `{parser.prog} --help` lists what there is.")


def _switches(parser: _Parser) -> dict[str, bool]:
    """Flag -> whether it is given without a value."""
    return {option: action.nargs == 0 for action in parser._actions for option in action.option_strings}


def _options(parser: _Parser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _typed(value: Any, hint: Any) -> Any:
    """Text stays text where the setting is one; everything else is read as YAML: 1e-5, true, {part: clip}."""
    if isinstance(value, list):
        return [_typed(v, get_args(hint)[0] if get_args(hint) else hint) for v in value]
    return value if isinstance(value, bool) else read_value(value, hint)


def _fields(cls: type[Any]) -> list[tuple[str, Any, Any]]:
    """(dotted name, type, default) of every setting."""
    hints, found = _hints(cast(Any, cls)), []
    blank = cls()
    for f in dataclasses.fields(cls):
        default = getattr(blank, f.name)
        if dataclasses.is_dataclass(hints[f.name]):
            found += [(f"{f.name}.{name}", hint, value) for name, hint, value in _of(default)]
        else:
            found.append((f.name, hints[f.name], default))
    return found


def _of(instance: Any) -> list[tuple[str, Any, Any]]:
    hints = _hints(cast(Any, type(instance)))
    return [(f.name, hints[f.name], getattr(instance, f.name)) for f in dataclasses.fields(instance)]


def _parser(cls: type[Any], command: str, defaults: Mapping[str, Any] | None = None) -> _Parser:
    parser = _Parser(
        prog=f"psigrad {command}",
        description=inspect.getdoc(cls),
        epilog="Settings may also stand in a YAML file (--config) or be given by dotted name: optim.learning_rate=1e-5.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        usage=f"psigrad {command} [--config FILE] [name.of.setting=value ...] [flags]",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    _add_shortcuts(parser, cls, (defaults or {}).get("loss") or (defaults or {}).get("algorithm", "grpo"))
    _add_flags(parser, cls, command)
    return parser


def _add_shortcuts(parser: _Parser, cls: type[Any], method: Any) -> None:
    """A flag for every part of the algorithm that has a name; those that this method lacks are refused with a sentence."""
    known = shortcuts.shortcuts_of(cls)
    group = parser.add_argument_group("parts of the method; `psigrad explain` shows them all") if known else parser
    for name, short in known.items():
        places = shortcuts.find_places(name, method)
        text: str = argparse.SUPPRESS
        if places:
            now = ", ".join(
                dict.fromkeys(
                    "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
                    for _, value in places
                )
            )
            text = f"{short.help} (default {now})".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if short.switch:
            group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            group.add_argument(flag, dest=name, metavar=name.upper(), help=text)


def _add_flags(parser: _Parser, cls: type[Any], command: str) -> None:
    """A flag for every setting, section by section."""
    groups: dict[str, Any] = {}
    for name, hint, default in _fields(cls):
        section, _, leaf = name.rpartition(".")
        group = groups.setdefault(section, parser.add_argument_group(section or command))
        flag = flag_of(name)
        text = (_help(cls, name) + _values(hint, default)).replace("%", "%%")
        if hint is bool:
            group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            many = {"nargs": "+"} if get_origin(hint) is tuple or name in _SEVERAL else {}
            action = {"action": "extend"} if many else {}
            group.add_argument(flag, dest=name, metavar=leaf.upper(), help=text, **many, **action)


def _values(hint: Any, default: Any) -> str:
    """What a setting may be, where that is one of a few words, and what it is unless it is given."""
    words = [str(word) for word in get_args(hint) if word] if get_origin(hint) is Literal else []
    parts = [", ".join(words)] * (len(words) > 1) + [f"default {default}"] * (default not in ("", (), None))
    return f" ({'; '.join(parts)})" if parts else ""


def _help(cls: type[Any], name: str) -> str:
    """The string under a field in the source of its class."""
    for part in name.split(".")[:-1]:
        cls = _hints(cast(Any, cls))[part]
    leaf = name.split(".")[-1]
    return next((docs[leaf] for base in cls.__mro__ if leaf in (docs := _field_docs(cast(Any, base)))), "")


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _field_docs(cls: type[Any]) -> dict[str, str]:
    if not dataclasses.is_dataclass(cls):
        return {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs
