"""The training methods by name, each with its summary, settings class and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from psigrad.config.fields import types_of
from psigrad.config.language import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.shortcuts import shortcuts_of
from psigrad.errors import UserError, nearest
from psigrad.objective import catalog
from psigrad.objective.catalog import Method
from psigrad.objective.preferences import preference_catalog

TrainingConfig = SFTConfig | RewardConfig | PreferenceConfig | OnlineConfig


class Declaration(NamedTuple):
    """A training method as a command: its settings class, its defaults and its one-line summary."""

    summary: str
    settings: type[Any]
    defaults: Mapping[str, Any]
    """The settings that the method changes by default, including its own name as `algorithm` or `loss`."""

    @property
    def online(self) -> bool:
        """True if the method learns from completions that it samples itself."""
        return self.settings is OnlineConfig


@cache
def list_declarations() -> dict[str, Declaration]:
    """Return every training method by name."""
    online: dict[str, Method[Any]] = {**catalog.METHODS, **preference_catalog.ONLINE_METHODS}
    return {
        "sft": Declaration("supervised fine-tuning on completions or conversations", SFTConfig, {}),
        **{name: Declaration(m.summary, OnlineConfig, {"algorithm": name, **m.defaults}) for name, m in online.items()},
        **{
            name: Declaration(m.summary, PreferenceConfig, {"loss": name, **m.defaults})
            for name, m in preference_catalog.METHODS.items()
        },
        "reward": Declaration("a reward model from comparisons, or a process reward model from steps", RewardConfig, {}),
    }


def declaration(name: str) -> Declaration:
    """Return the training method of that name. If no method has the name, raise `UserError` with the nearest name."""
    if name == "control":
        raise UserError(
            "control is not a method for language models; from Python use psigrad.control.PPO('CartPole-v1').learn()."
        )
    if name not in list_declarations():
        raise UserError(f"There is no method {name!r}; `psigrad --all` lists them{nearest(name, list_declarations()) or '.'}")
    return list_declarations()[name]


def of_spec(spec: Any) -> Declaration:
    """Return the declaration of an algorithm, given as a name, as {"preset": name, …} or as an object with a `name`.

    A custom algorithm, such as "module:name", counts as an online method.
    """
    name = spec.get("preset", "") if isinstance(spec, Mapping) else spec if isinstance(spec, str) else getattr(spec, "name", "")
    if name in list_declarations():
        found = list_declarations()[name]
        setting = "algorithm" if found.online else "loss"
        return found._replace(defaults={**found.defaults, setting: spec} if setting in found.defaults else found.defaults)
    if isinstance(spec, str) and ":" not in spec:
        declaration(spec)
    return Declaration("", OnlineConfig, {"algorithm": spec})


# The common name of the methods with these settings.
_FAMILIES: dict[type[Any], str] = {
    SFTConfig: "sft",
    OnlineConfig: "the online methods",
    PreferenceConfig: "the preference methods",
    RewardConfig: "reward",
}
# (Name of a settings class, a setting that it lacks) -> the setting to use instead.
_COUNTERPARTS: dict[tuple[str, str], str] = {
    ("OnlineConfig", "batch_size"): "prompts_per_step sets the prompts of a step",
    ("OnlineConfig", "max_length"): "max_prompt_length limits prompts, max_completion_length completions",
    **{(f"{name}Config", "prompts_per_step"): "batch_size sets the rows of a step" for name in ("SFT", "Reward", "Preference")},
    **{("ControlConfig", name): "total_timesteps sets the length of a run" for name in ("max_steps", "num_train_epochs")},
}


def other_methods(cls: type[Any], name: str) -> str:
    """Return a hint on the setting `name`, which `cls` lacks: its replacement, or the methods that have it, or ""."""
    leaf = name.rpartition(".")[2]
    if counterpart := _COUNTERPARTS.get((cls.__name__, leaf)):
        return f": {counterpart}."
    if cls not in _FAMILIES:
        return ""
    have = [family for other, family in _FAMILIES.items() if leaf in {*types_of(other), *shortcuts_of(other)}]
    return f": it is a setting of {' and '.join(have)}." if have else ""
