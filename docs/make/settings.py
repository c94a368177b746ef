"""Update the tables of docs/settings.md from psigrad/config/: python docs/make/settings.py"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from psigrad.compat.table import TABLE
from psigrad.compat.trl import AGGREGATES, LINKS, LOSSES
from psigrad.config import EvalConfig, OnlineConfig, PreferenceConfig, RewardConfig, SampleConfig, SFTConfig
from psigrad.config.fields import Mark, Setting, device_defaults, help_of, settings_of
from psigrad.config.methods import list_declarations
from psigrad.config.shortcuts import SHORTCUTS, find_values
from psigrad.control.settings import ControlConfig
from psigrad_extras.defaults import beside

sys.path.append(str(Path(__file__).parent))
from filled import fill

PAGE = Path(__file__).parents[1] / "settings.md"
RECIPES = {
    "sft": SFTConfig,
    "online": OnlineConfig,
    "reward": RewardConfig,
    "preference": PreferenceConfig,
    "eval": EvalConfig,
    "sample": SampleConfig,
    "control": ControlConfig,
}

# The word of each mark, in italics after the meaning.
CHANGES = {
    Mark.FREE: "resume",
    Mark.RECORDED: "recorded",
    Mark.LENGTH: "extend",
    Mark.LIVE: "callback",
}

COLUMNS = "type | default | meaning"


def _beside() -> str:
    """Return the table of defaults beside those of other libraries."""
    rows = [f"| `{name}` | {ours} | {theirs} (`{whose}`) |" for name, ours, theirs, whose in beside()]
    return "\n".join(_table("setting", "psigrad | the other library", rows))


def page() -> str:
    """Return the page with its tables as the code has them."""
    found: dict[str, dict[str, Setting]] = {}
    for recipe, cls in RECIPES.items():
        for name, setting in settings_of(cls).items():
            found.setdefault(name, {})[recipe] = setting
    sections: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for name, uses in found.items():
        sections.setdefault(name.rpartition(".")[0], {}).setdefault(tuple(uses), []).append(name)
    parts: list[str] = []
    for section, groups in sections.items():
        parts += [f"## `{section}.…`" if section else "## Settings without a section", ""]
        large = {recipes: names for recipes, names in groups.items() if len(names) >= 5}
        for recipes, names in large.items():
            parts += [] if len(recipes) == len(RECIPES) else [f"{_commands(recipes)}:", ""]
            parts += _table("setting", COLUMNS, [_row(name, found[name]) for name in names])
        rest = {name: recipes for recipes, names in groups.items() if recipes not in large for name in names}
        if rest:
            parts += ["Only the commands that each row names:", ""] if large else []
            rows = [_row(name, found[name], recipes) for name, recipes in rest.items()]
            parts += _table("setting", COLUMNS, rows)
    return fill(PAGE.read_text(), settings="\n".join(parts), defaults=_beside(), parts=_parts(), names=_others())


def _parts() -> str:
    """Return the table of short names of parts, and the places that they set."""
    places = {
        name: sorted(
            {
                f"`{'algorithm' if d.online else 'loss'}.{place}`"
                for m, d in list_declarations().items()
                for place, _ in find_values(name, m)
            }
        )
        for name in SHORTCUTS
    }
    rows = [f"| `{n}` | {', '.join(places[n])} | {s.help} |" for n, s in SHORTCUTS.items()]
    return "\n".join(_table("short name", "dotted names | meaning", rows))


def _others() -> str:
    """Return the names of other libraries: those of a setting, those with a value, and those that are computed from."""
    names: dict[str, list[str]] = {}
    for row in TABLE.values():
        if row.means:
            names.setdefault(row.means, []).append(f"`{row.name}`")
    meant: dict[str, list[str]] = {}
    for row in TABLE.values():
        for value, new in row.values.items():
            if new and value is not None:  # null is the default
                given = f"`{row.name}={_written(value)}`"
                meant.setdefault(", ".join(f"`{n}={_written(v)}`" for n, v in new.items()), []).append(given)
    for loss, how in AGGREGATES.items():
        meant.setdefault(f"`aggregate={how}`", []).append(f"`loss_type={loss}`")
    for loss, method in LOSSES.items():
        link = f"`loss.link={loss}`" if loss in LINKS else f"`psigrad {method}`"
        meant.setdefault(link, []).append(f"`loss_type={loss}`")
    computed: dict[str, list[str]] = {}
    for row in TABLE.values():
        if row.rule:
            computed.setdefault(row.rule, []).append(f"`{row.name}`")
    return "\n".join(
        [
            "Names of other libraries, and the settings that they set:\n",
            *_table("names", "setting", [f"| {', '.join(given)} | `{means}` |" for means, given in names.items()]),
            "Names that have another meaning with this value:\n",
            *_table("name and value", "what it sets", [f"| {', '.join(given)} | {means} |" for means, given in meant.items()]),
            "Names from which psigrad computes its settings:\n",
            *_table("names", "are converted into", [f"| {', '.join(given)} | {rule} |" for rule, given in computed.items()]),
        ]
    )


def _table(left: str, right: str, rows: list[str]) -> list[str]:
    return [f"| {left} | {right} |", "|---|" + "---|" * len(right.split("|")), *rows, ""]


def _written(value: Any) -> str:
    """Return a value as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else "[]" if value == () else value


def _commands(recipes: tuple[str, ...]) -> str:
    """Return the commands that have a setting, in words."""
    if recipes == tuple(RECIPES):
        return "All commands"
    if recipes == tuple(RECIPES)[:4]:
        return "Only training"
    return "Not control" if recipes == tuple(RECIPES)[:6] else f"Only {', '.join(recipes)}"


def _row(name: str, uses: dict[str, Setting], only: tuple[str, ...] = ()) -> str:
    """Return one line of a table. It names the commands whose type, default or meaning differs."""
    first = next(iter(uses.values()))
    unequal: dict[str, list[str]] = {}
    for r, one in uses.items():
        unequal.setdefault(_default(one.default), []).append(r)
    others = [f"{value} ({', '.join(of)})" for value, of in list(unequal.items())[1:]]
    kind = _kind(first.annotated)
    unlike = [r for r, one in uses.items() if _kind(one.annotated) != kind]
    kinds = [f"{_kind(uses[unlike[0]].annotated)} ({', '.join(unlike)})"] if unlike else []
    on_gpu = next((found[name] for r in uses if name in (found := device_defaults(RECIPES[r], "cuda"))), None)
    if on_gpu is not None:
        others.append(f"{_default(on_gpu)} (training on a GPU)")
    default = ", ".join([_default(first.default), *others])
    meanings: dict[str, list[str]] = {}
    for r in uses:
        meanings.setdefault(help_of(RECIPES[r], name).replace("<", "&lt;"), []).append(r)
    if len(meanings) > 1:
        about = " ".join(f"{', '.join(commands)}: {text}" for text, commands in meanings.items())
    else:
        about = next(iter(meanings)) + (f" {_commands(only)}." if only else "")
    about += "".join(f" *{word}*" for mark, word in CHANGES.items() if mark in first.marks)
    return f"| `{name}` | {', '.join([kind, *kinds])} | {default} | {about} |"


def _kind(hint: Any) -> str:
    """Return a type in words, with its range."""
    if get_origin(hint) is Annotated and hint.__origin__ is Any:
        return "str or mapping"
    if hasattr(hint, "__metadata__"):
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        ranges = [one for one in hint.__metadata__ if is_dataclass(one) and not hasattr(one, "func")]
        bounds = [(signs[k], v) for one in ranges for k, v in asdict(one).items() if v != float("inf")]
        return " ".join(filter(None, [_kind(hint.__origin__), ", ".join(f"{sign} {value}" for sign, value in bounds)]))
    if get_origin(hint) is tuple:
        return f"list of {_kind(get_args(hint)[0])}"
    values = get_args(hint)
    if type(None) in values:
        return f"{_kind(values[0])} or null"
    if values and all(isinstance(value, str | bool) for value in values):
        return ", ".join(f"`{value if isinstance(value, str) and value else json.dumps(value)}`" for value in values)
    words = {bool: "bool", str: "str", int: "int", float: "float"}
    return words.get(hint, "str or mapping" if str in values else "any" if hint is not Any else "str or mapping")


def _default(value: Any) -> str:
    if value in ("", (), None):
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    items = value if isinstance(value, tuple) else (value,)
    return ", ".join(f"`{item}`".replace("\n", r"\n") for item in items)  # a line break would end the row of the table


if __name__ == "__main__":
    PAGE.write_text(page())
