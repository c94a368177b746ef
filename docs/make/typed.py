"""Writes psigrad/language/recipes/typed_settings.pyi: what `psigrad.train` takes, by method, for editors and type checkers.

python docs/make/typed.py
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from psigrad.compat.table import TABLE
from psigrad.config.fields import settings_of
from psigrad.config.methods import list_declarations

FILE = Path(__file__).parents[2] / "psigrad" / "language" / "recipes" / "typed_settings.pyi"
GIVEN = ("model", "dataset", "eval_dataset", "reward", "tokenizer", "peft_config", "path")
HEAD = '''"""Settings of `psigrad.train` by their names, one class per kind of training. Written by docs/make/typed.py."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import peft
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_Path = str | os.PathLike[str]
_Dataset = _Path | Iterable[Mapping[str, Any]]
_Reward = str | dict[str, Any] | Callable[..., Any]

class Given(TypedDict, total=False):
    model: _Path | PreTrainedModel
    dataset: _Dataset
    eval_dataset: _Dataset
    tokenizer: _Path | PreTrainedTokenizerBase
    processing_class: _Path | PreTrainedTokenizerBase
    reward: _Reward | Iterable[_Reward]
    peft_config: peft.LoraConfig
    args: Any
'''


def text_of(kind: Any) -> str:
    """A type as it is written; several values may be given as one."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is tuple:
        return f"{text_of(inside[0])} | Sequence[{text_of(inside[0])}]"
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inside))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(text_of, inside)))
    if origin is Callable or "Callable" in str(kind):
        return "Callable[..., Any]"
    if origin is not None:
        return "Mapping[str, Any]"
    return "None" if kind is type(None) else "Any" if kind is Any else kind.__name__


def class_of(settings: type[Any]) -> list[str]:
    """The lines of one class: our names, then TRL's of the same settings."""
    leaves = {dotted.rpartition(".")[2]: text_of(one.type) for dotted, one in settings_of(settings).items()}
    dotted = {name: name.rpartition(".")[2] for name in settings_of(settings)}
    trl = {row.name: leaves[dotted[row.means]] for row in TABLE.values() if row.library == "trl" and row.means in dotted}
    lines = [f"class {settings.__name__.removesuffix('Config')}Settings(Given, total=False):"]
    for name, kind in {**trl, **leaves}.items():
        if name not in GIVEN and name.isidentifier():
            lines.append(f"    {name}: {'_Path' if name == 'output_dir' else kind}")
    return lines


def text() -> str:
    """The whole file."""
    kinds: dict[str, tuple[type[Any], list[str]]] = {}
    for name, method in list_declarations().items():
        kinds.setdefault(method.settings.__name__, (method.settings, []))[1].append(name)
    blocks = [HEAD.rstrip()]
    for settings, methods in kinds.values():
        stem = settings.__name__.removesuffix("Config")
        blocks.append("\n".join(class_of(settings)))
        blocks.append(f"{stem}Method = Literal[\n" + "".join(f'    "{name}",\n' for name in methods) + "]")
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(FILE)], check=False)
