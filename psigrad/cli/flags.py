"""Command-line flags, generated from the settings classes: one flag per field. The string below a field is its flag's help text.

`--help` shows the settings that are marked `MAIN`, or all settings if none is marked. `--help-all` always shows all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import itertools
import math
import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from psigrad.compat.entrances import split_flags
from psigrad.compat.foreign_names import load
from psigrad.config import fields, shortcuts
from psigrad.config.fields import MAIN, SEVERAL, find_marked, flag_of, help_of, settings_of, unread_by, unread_settings
from psigrad.config.methods import other_methods
from psigrad.config.nested import names_of, read_value
from psigrad.errors import UserError, nearest

T = TypeVar("T")
_NUMBERS = {int: "N", float: "X"}
# An override: a dotted name of a setting, and a value.
_OVERRIDE = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*=")
_PAIR = re.compile(r"\w[\w.-]*=")
# A number below 0, including -1e-3, which argparse before Python 3.14 reads as a flag.
_NEGATIVE = re.compile(r"-\.?\d")


HELP = {"-h", "--help", "--help-all"}


class Command(NamedTuple):
    """A command: its purpose in one line, and the function that runs it. The function maps arguments to an exit status."""

    purpose: str
    run: Callable[[list[str]], int]


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return True if one of the help flags (`HELP`) is among the arguments."""
    return bool(HELP.intersection(arguments))


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` instead of exiting. Its help text ends with the attribute `last_line`."""

    last_line = ""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)
        self._negative_number_matcher = _NEGATIVE
        if self.add_help:
            self.add_argument("--help-all", action="help", help=argparse.SUPPRESS)

    @property
    def command(self) -> str:
        """The words of the command, such as "psigrad grpo", without placeholders such as FILE, which usage shows."""
        return " ".join(itertools.takewhile(lambda word: word.islower() and word[0].isalpha(), self.prog.split()))

    def format_help(self) -> str:
        return super().format_help() + (f"\n{self.last_line}\n" if self.last_line else "")

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--[\w-]+): (?=')", r"\1 is ", message)
        raise UserError(f"{message[0].upper()}{message[1:]}; `{self.command} --help-all` lists all flags.")


def parse(cls: type[T], command: str, arguments: Sequence[str], defaults: Mapping[str, Any] | None = None, about: str = "") -> T:
    """Return settings of class `cls` from arguments. The help text starts with `about`, or with the docstring of `cls`.

    A setting takes its value from the first of these that has it: flags, overrides (`a.b=c`), the --config file, `defaults`, the
    class.
    """
    parser = _parser(cls, command, defaults or {}, every="--help-all" in arguments, texts=asks_for_help(arguments))
    parser.description = about or parser.description
    arguments = join_columns(arguments, names_of(cls))
    # Overrides are removed first, since a flag with several values would consume an override after it. A column mapping only
    # looks like an override.
    is_override = [bool(_OVERRIDE.match(text)) and before != "--columns" for before, text in itertools.pairwise(["", *arguments])]
    overrides = list(itertools.compress(arguments, is_override))
    others_typed = [text for text, taken in zip(arguments, is_override, strict=True) if not taken]
    flags, others = split_flags(cls, others_typed, _switches(parser), flag_of)
    known, rest = parser.parse_known_args(flags)
    _refuse(rest, parser, "an override like optim.learning_rate=1e-5", cls)
    given = vars(known)
    config = given.pop("config")
    values = _values(cls, given)
    return load(cls, config, overrides, {**values, **others}, defaults)


_HELP: Any = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=110)


def parse_plain(usage: str, arguments: Sequence[str], defaults: Mapping[str, Any], about: str = "") -> dict[str, Any]:
    """Return {name: value} for the arguments of a command that has no settings class. Each name in `defaults` has a flag.

    `usage` is the command with its positional arguments, such as "report RUN [RUN ...]". Their values are the list "names" in the
    result. A flag whose default is a tuple takes several values. A line of `about` such as "--seed: seed of the data" is the help
    text of a flag; all other lines describe the command.
    """
    lines = about.splitlines()
    texts = dict(line.split(": ", 1) for line in lines if line.startswith("--"))
    about = "\n".join(line for line in lines if not line.startswith("--"))
    usage += " [flags]" * bool(defaults)
    parser = _Parser(prog=f"psigrad {usage}", usage=f"psigrad {usage}", description=about, formatter_class=_HELP)
    places = re.findall(r"(\[?)[A-Z][\w.|]*", re.sub(r"--\S+ \S+", "", usage))  # "" for a required one, "[" for an optional one
    if places:
        parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    for name, value in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value, help=texts.get(flag))
            continue
        many: dict[str, Any] = {"nargs": "+", "action": "extend"} if isinstance(value, tuple) else {"default": value}
        shown = _NUMBERS.get(type(value), flag.rpartition("-")[2].upper())
        kind = functools.partial(_number_of, type(value)) if type(value) in _NUMBERS else str
        text = (texts.get(flag, "") + f" (default {value})" * bool(value)).replace("%", "%%")
        parser.add_argument(flag, type=kind, metavar=shown, help=text, **many)
    known, rest = parser.parse_known_intermixed_args(join_columns(arguments))
    _refuse(rest, parser, "a value of one")
    least, most = places.count(""), math.inf if "..." in usage else len(places)
    if places and not least <= len(known.names) <= most:
        raise UserError(f"{usage.split()[0]} got {' '.join(known.names) or 'nothing'}; the usage is {parser.usage}.")
    given = {name: defaults.get(name) if value is None else value for name, value in vars(known).items()}
    # A shell does not expand `--output=~/x`.
    return {name: os.path.expanduser(value) if isinstance(value, str) else value for name, value in given.items()}


def join_columns(arguments: Sequence[str], settings: Container[str] = ()) -> list[str]:
    """Return the arguments with `--columns a=b c=d` joined to `--columns a=b,c=d`.

    If a pair's name is one of `settings`, the pair is an override and is not joined.
    """
    made: list[str] = []
    for text in arguments:
        behind = made[-2:-1] == ["--columns"] or (made[-1:] and made[-1].startswith("--columns="))
        if behind and _PAIR.match(text) and text.partition("=")[0] not in settings:
            made[-1] += f",{text}"
        else:
            made.append(text)
    return made


def parse_known(cls: type[T], command: str, arguments: Sequence[str]) -> tuple[T, list[str]]:
    """Return (settings of class `cls`, all other arguments). The caller passes the other arguments to another command."""
    parser = _Parser(prog=f"psigrad {command}", add_help=False, usage=argparse.SUPPRESS, formatter_class=_HELP)
    _add_flags(parser, cls, command, {}, every=True, texts=asks_for_help(arguments))
    known, rest = parser.parse_known_args(list(arguments))
    if asks_for_help(rest):
        print(parser.format_help())
    return load(cls, flags=_values(cls, vars(known))), rest


def parse_lists(arguments: Sequence[str], *lists: str) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Return (the names before the first flag, {flag: its values} for the flags in `lists`, all other arguments)."""
    names: list[str] = []
    found: dict[str, list[str]] = {name: [] for name in lists}
    rest, current = [], names
    for text in arguments:
        if text in found:
            current = found[text]
        elif _OVERRIDE.match(text) or (text.startswith("-") and not _NEGATIVE.match(text)):
            rest.append(text)
            current = rest
        else:
            current.append(text)
    return names, found, rest


def parse_number(flag: str, text: str, kind: Callable[[str], T]) -> T:
    """Return `text`, the value of `flag`, as a finite number of type `kind` (int or float). Raises `UserError` for other text."""
    try:
        return _number_of(kind, text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{flag} is {error}.") from None


def _number_of(kind: Callable[[str], T], text: str) -> T:
    """Return `text` as a finite number of type `kind`. Raises `ArgumentTypeError` for other text; the caller adds the flag."""
    with contextlib.suppress(ValueError, OverflowError):
        if math.isfinite(found := kind(text)):  # type: ignore[arg-type]
            return found
    raise argparse.ArgumentTypeError(f"{text!r}; expected {'a whole' if kind is int else 'a finite'} number")


def _refuse(rest: Sequence[str], parser: _Parser, expected: str, cls: type[Any] | None = None) -> None:
    """Raise `UserError` for the first of the unknown arguments `rest`, if any. `expected` is what is allowed besides flags."""
    for text in rest:
        if text.startswith("-"):
            flag = text.split("=")[0]
            if cls and (found := other_methods(cls, flag.lstrip("-").replace("-", "_"))):
                raise UserError(f"{parser.command} has no flag {flag}{found}")
            hint = nearest(flag, _switches(parser)) or "."
            raise UserError(f"There is no flag {flag}; `{parser.command} --help-all` lists all flags{hint}")
        raise UserError(f"The argument {text!r} is neither a flag nor {expected}; `{parser.command} --help-all` lists all flags.")


def _switches(parser: _Parser) -> dict[str, bool]:
    """Return {flag: True if it takes no value, else False} for all flags of the parser."""
    return {option: action.nargs == 0 for action in parser._actions for option in action.option_strings}


def _values(cls: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that the user gave, converted to the types of their settings. In `given`, all other flags are None."""
    settings = settings_of(cls)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None:
            setting = settings.get(name)
            found[name] = _read(value, setting.type if setting else None, name)
            if setting and SEVERAL in setting.marks and len(value) == 1:
                (found[name],) = found[name]
    return found


def _read(value: Any, hint: Any, name: str) -> Any:
    """Return `value`, the text given for the setting `name`: unchanged if its type `hint` is str, otherwise parsed as YAML."""
    if isinstance(value, list):
        return [_read(v, get_args(hint)[0] if get_args(hint) else hint, name) for v in value]
    return value if isinstance(value, bool) else read_value(value, hint, name)


def _parser(cls: type[Any], command: str, defaults: Mapping[str, Any], every: bool, texts: bool) -> _Parser:
    """Return the parser of a command with the settings class `cls`. Help lists the settings marked `MAIN`, or all if `every`.

    `defaults` is {setting: a method's default}. `texts` is False if no help will be printed.
    """
    numbers = {name: f"{name}={setting.default}" for name, setting in settings_of(cls).items() if setting.type in _NUMBERS}
    example = "optim.learning_rate=1e-5" if "optim.learning_rate" in numbers else next(iter(numbers.values()), "name=value")
    parser = _Parser(
        prog=f"psigrad {command}",
        description=inspect.getdoc(cls),
        epilog=f"Settings can also be given in a YAML file (--config) or by dotted name: {example}. `psigrad "
        "explain defaults` lists the defaults that differ from those of TRL and Stable-Baselines3.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        usage=f"psigrad {command} [--config FILE] [name.of.setting=value ...] [flags]",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    every = every or not find_marked(cls, MAIN)
    _add_shortcuts(parser, cls, defaults.get("loss") or defaults.get("algorithm", "grpo"), every)
    _add_flags(parser, cls, parser.command.removeprefix("psigrad "), defaults, every, texts)
    if not every:
        parser.last_line = (
            f"These are the settings that matter most. `{parser.command} --help-all` shows all {len(settings_of(cls))}."
        )
    return parser


def _add_shortcuts(parser: _Parser, cls: type[Any], method: Any, every: bool) -> None:
    """Add a flag for each `Shortcut`: a short name for a setting in a part of a training method, such as the clip range.

    Help lists those that apply to `method`: the main ones, or all if `every`.
    """
    known = shortcuts.shortcuts_of(cls)
    group = parser.add_argument_group("parts of the method; `psigrad explain METHOD` shows them all") if known else parser
    for name, short in known.items():
        places = shortcuts.find_values(name, method)
        text: str = argparse.SUPPRESS
        if places and (every or short.main):
            now = ", ".join(
                dict.fromkeys(
                    "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
                    for _, value in places
                )
            )
            text = f"{short.by_path.get(places[0][0], short.help)} (default {now})".replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if short.switch:
            group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            group.add_argument(flag, dest=name, metavar=name.upper(), help=text)


def _add_flags(parser: _Parser, cls: type[Any], command: str, defaults: Mapping[str, Any], every: bool, texts: bool) -> None:
    """Add a flag for each setting, section by section. The arguments are those of `_parser`."""
    groups: dict[str, Any] = {}
    ordered = sorted(settings_of(cls).items(), key=lambda one: not one[0].startswith(("model.", "data.")))
    unread, on_gpu = unread_by(cls, str(defaults.get("algorithm", ""))), fields.device_defaults(cls, "cuda")
    for name, setting in ordered:
        section, _, leaf = name.rpartition(".")
        if section not in groups:
            groups[section] = parser.add_argument_group(section or command)
        group = groups[section]
        names = [*(flag_of(other) for other, stands in unread_settings(cls).items() if stands == name), flag_of(name)]
        text = argparse.SUPPRESS
        if texts and (every or MAIN in setting.marks) and name not in unread:
            about = help_of(cls, name) if every else re.split(r"(?<=[\w)])\. ", help_of(cls, name))[0].rstrip(".") + "."
            text = (about + _choices(setting.type, defaults.get(name, setting.default), on_gpu.get(name))).replace("%", "%%")
        if setting.type is bool:
            group.add_argument(*names, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            several = get_origin(setting.type) is tuple or SEVERAL in setting.marks
            many = {"nargs": "+", "action": "extend"} if several else {}
            group.add_argument(*names, dest=name, metavar=_NUMBERS.get(setting.type, leaf.upper()), help=text, **many)
    for name, instead in unread_settings(cls).items():  # a flag that only disables a feature which the command lacks is allowed
        section, _, leaf = name.rpartition(".")
        if not instead and getattr(getattr(cls(), section), leaf) is True:
            parser.add_argument(
                flag_of(name).replace("--", "--no-", 1), dest=name, action="store_false", default=None, help=argparse.SUPPRESS
            )


def _choices(hint: Any, default: Any, on_gpu: Any) -> str:
    """Return the end of a setting's help text: its defaults, and its permitted values if they are a fixed list of words."""
    words = [str(word) for word in get_args(hint) if word] if get_origin(hint) is Literal else []
    usual = f"default {default}" if on_gpu is None else f"default {default}; on a GPU: {on_gpu}"
    parts = [", ".join(words)] * (len(words) > 1) + [usual] * (default not in ("", (), None))
    return f" ({'; '.join(parts)})" if parts else ""
