"""What trains: every method's name, summary, settings class and defaults, known without importing torch.

The methods are declared in `psigrad/objective/` (`Catalog.declare`); here their names, summaries and defaults are read from the
source, since the command line must print help before torch is there. A test holds both equal.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from psigrad.config.language import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.errors import UserError, nearest

TrainingConfig = SFTConfig | RewardConfig | PreferenceConfig | OnlineConfig


class Declaration(NamedTuple):
    """A method as settings know it."""

    summary: str
    settings: type[Any]
    defaults: Mapping[str, Any]
    """What it sets where the user does not, its own name as `algorithm` or `loss` among them."""

    @property
    def online(self) -> bool:
        """Whether it learns from completions that it samples itself."""
        return self.settings is OnlineConfig


# module of psigrad/objective/ -> settings of its methods, and the setting that names them
_DECLARED_IN = {
    "catalog": (OnlineConfig, "algorithm"),
    "online_preference": (OnlineConfig, "algorithm"),
    "preference_catalog": (PreferenceConfig, "loss"),
}


@cache
def declared() -> dict[str, Declaration]:
    """Every training method by name."""
    found = {"sft": Declaration("supervised fine-tuning on completions or conversations", SFTConfig, {})}
    for module, (settings, setting) in _DECLARED_IN.items():
        source = next((Path(__file__).parents[1] / "objective").rglob(f"{module}.py")).read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "declare":
                name, summary = (ast.literal_eval(argument) for argument in call.args[:2])
                defaults = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
                found[name] = Declaration(summary, settings, {setting: name, **defaults})
    found["reward"] = Declaration("a reward model from comparisons, or a process reward model from steps", RewardConfig, {})
    return found


def declaration(name: str) -> Declaration:
    """The method of that name. Raises `UserError` with the nearest one where there is none."""
    if name == "control":
        raise UserError("control is no method of a language model; from Python it is psigrad.control.PPO('CartPole-v1').learn().")
    if name not in declared():
        raise UserError(f"There is no method {name!r}; `psigrad --help` lists them{nearest(name, declared()) or '.'}")
    return declared()[name]


def of_spec(spec: Any) -> Declaration:
    """The declaration that goes with an algorithm: a name, {"preset": name, …}, or an object whose name is a method's.

    An algorithm of the user's own is an online method without defaults.
    """
    name = spec.get("preset", "") if isinstance(spec, Mapping) else spec if isinstance(spec, str) else getattr(spec, "name", "")
    if name in declared():
        found = declared()[name]
        setting = "algorithm" if found.online else "loss"
        return found._replace(defaults={**found.defaults, setting: spec} if setting in found.defaults else found.defaults)
    if isinstance(spec, str) and ":" not in spec:
        declaration(spec)
    return Declaration("", OnlineConfig, {"algorithm": spec})
