"""What is said of a setting that the method at hand does not have and others do."""

from __future__ import annotations

from typing import Any, get_type_hints

from psigrad.compat.other_names import SAME
from psigrad.config.language import OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.shortcuts import shortcuts_of

# How the methods with these settings are called together.
_FAMILIES: dict[type[Any], str] = {
    SFTConfig: "sft",
    OnlineConfig: "the online methods",
    PreferenceConfig: "the preference methods",
    RewardConfig: "reward",
}
# A setting of others -> what to write where it is none.
_COUNTERPARTS: dict[tuple[type[Any], str], str] = {
    (OnlineConfig, "batch_size"): "the prompts of a step are prompts_per_step",
    (OnlineConfig, "max_length"): "prompts are bounded by max_prompt_length, completions by max_completion_length",
    **{(cls, "prompts_per_step"): "the rows of a step are batch_size" for cls in (SFTConfig, RewardConfig, PreferenceConfig)},
}


def elsewhere(cls: type[Any], name: str) -> str:
    """What is said, after a colon, of a name that is a setting of other methods than those of `cls`; empty where it is none."""
    if cls not in _FAMILIES:
        return ""
    leaf = SAME.get(name, name).rpartition(".")[2]
    if found := _COUNTERPARTS.get((cls, leaf)):
        return f": {found}."
    have = [family for other, family in _FAMILIES.items() if leaf in {*get_type_hints(other), *shortcuts_of(other)}]
    return f": it is a setting of {' and '.join(have)}." if have else ""
