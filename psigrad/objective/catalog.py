"""The methods, each as one declaration, and `resolve`, which turns names and mappings into them.

A preset holds the values of its paper; where TRL's default differs, the comment above says so. Everything is scaled so that the
same learning rate as in TRL applies, with one exception: DR_GRPO divides by a constant that TRL takes from max_completion_length.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from typing import Any

from psigrad.objective import advantage, aggregate, correction, critic, entropy, keep, kl, penalty, ratio, surrogate
from psigrad.objective.advantage import (
    batch_mean,
    gae,
    group_mean,
    leave_one_out,
    moving_average,
    ones,
    reward_to_go,
    total_return,
    whitened,
)
from psigrad.objective.aggregate import fixed_length, sequence_mean, sequence_sum, token_mean
from psigrad.objective.critic import value_loss
from psigrad.objective.keep import has_signal, not_truncated, top_k
from psigrad.objective.kl import KL
from psigrad.objective.penalty import kl_penalty
from psigrad.objective.policy_gradient import PolicyGradient
from psigrad.objective.surrogate import clip, score, truncated_weight

# The whole completion is one action; its reward is the score minus beta times the summed log-ratio to the reference.
REINFORCE = PolicyGradient(batch_mean, ratio.none, score, sequence_sum, kl=KL("reward", "k1", 0.05), name="reinforce")
REINFORCE_MOVING_AVERAGE = replace(REINFORCE, psi=moving_average(0.9), name="reinforce_moving_average")

# Textbook forms for any environment: no reference policy.
REINFORCE_TOTAL_RETURN = PolicyGradient(total_return(), ratio.none, score, sequence_sum, name="reinforce_total_return")
REINFORCE_REWARD_TO_GO = replace(REINFORCE_TOTAL_RETURN, psi=reward_to_go(), name="reinforce_reward_to_go")

# TRL's RLOO: beta 0.05 with k1 in the reward, clip at the level of the completion. On fresh samples the ratio is 1 and the
# gradient is that of the paper, −A·grad log π(y|x).
RLOO = PolicyGradient(leave_one_out, ratio.trajectory, clip(), sequence_mean, kl=KL("reward", "k1", 0.05), name="rloo")

# The paper's GRPO. TRL's defaults differ: beta 0.0 and loss_type "dapo", that is replace(GRPO, kl=None, aggregate=token_mean).
GRPO = PolicyGradient(group_mean(), ratio.token, clip(0.2, 0.2), sequence_mean, kl=KL("loss", "k3", 0.04), name="grpo")

# TRL divides by max_completion_length: set aggregate.n to it for the same scale.
DR_GRPO = PolicyGradient(group_mean(std=False), ratio.token, clip(0.2, 0.2), fixed_length(1024), name="dr_grpo")

# The soft overlong punishment of the paper is a reward function, not a part of the loss.
DAPO = PolicyGradient(group_mean(), ratio.token, clip(0.2, 0.28), token_mean, keep=(has_signal, not_truncated), name="dapo")

GSPO = PolicyGradient(group_mean(), ratio.sequence, clip(3e-4, 4e-4), sequence_mean, name="gspo")
CISPO = PolicyGradient(group_mean(), ratio.token, truncated_weight(5.0), token_mean, name="cispo")

# beta 0.01 as in OpenRLHF, whose authors wrote the paper.
REINFORCE_PP = PolicyGradient(
    whitened(reward_to_go()), ratio.token, clip(), token_mean, kl=KL("reward", "k1", 0.01), name="reinforce_pp"
)

# PPO for language models as InstructGPT and TRL's former PPOTrainer had it: KL to the reference in the reward of each token,
# lambda 1 (Ahmadian et al. 2024 find the bias of a smaller one harmful here), advantages whitened over the batch.
PPO = PolicyGradient(
    whitened(gae(1.0, 1.0)),
    ratio.token,
    clip(0.2, 0.2),
    token_mean,
    kl=KL("reward", "k1", 0.05),
    critic=value_loss(0.1, 0.2),
    name="ppo",
)
PPO_PENALTY = replace(PPO, surrogate=kl_penalty(1.0, 0.01), name="ppo_penalty")

# Rejection fine-tuning: cross-entropy on the best completion of each prompt.
RAFT = PolicyGradient(ones, ratio.none, score, token_mean, keep=(top_k(1),), name="raft")

_SLOTS: dict[str, tuple[ModuleType, ...]] = {
    "psi": (advantage,),
    "ratio": (ratio,),
    "surrogate": (surrogate, penalty),
    "aggregate": (aggregate,),
    "kl": (kl,),
    "keep": (keep,),
    "critic": (critic,),
    "entropy": (entropy,),
    "correction": (correction,),
}
_DEFAULT_PART = {"kl": kl.KL, "critic": critic.value_loss, "entropy": entropy.bonus}
_OPTIONAL = ("kl", "critic", "entropy", "correction")


def names() -> list[str]:
    """Names of the presets."""
    return [value.name for value in globals().values() if isinstance(value, PolicyGradient)]


def resolve(spec: str | Mapping[str, Any] | PolicyGradient) -> PolicyGradient:
    """The method that a specification means.

    A string is a preset's name or "module:object". A mapping starts from a `preset` (or states psi, ratio, surrogate and
    aggregate) and replaces slots: a name, "module:object", {"part": name, parameter: value, …}, or a mapping without "part",
    which changes parameters of the part that is there. `null` empties a slot; `keep` takes a list.
    Errors: ValueError for an unknown name (with the nearest one), parameter or combination.
    """
    if isinstance(spec, PolicyGradient):
        return spec
    if isinstance(spec, str):
        return _preset(spec)
    if not isinstance(spec, Mapping):
        raise ValueError(f"The algorithm is a {type(spec).__name__}; expected a preset's name, a mapping or a PolicyGradient.")
    changes = dict(spec)
    return changed(_preset(changes.pop("preset")) if "preset" in changes else None, changes)


def changed(start: PolicyGradient | None, changes: Mapping[str, Any]) -> PolicyGradient:
    """`start` with other parts, each as `resolve` describes a slot's value; without a start, all four that must be there."""
    parts: dict[str, Any] = {
        "name": str(changes.get("name", start.name + " (changed)" if start and changes else start.name if start else ""))
    }
    for slot, value in changes.items():
        if slot == "name":
            continue
        if slot not in _SLOTS:
            raise ValueError(
                f"The algorithm has an unknown slot {slot!r}; expected preset, name or {', '.join(_SLOTS)}{_near(slot, _SLOTS)}."
            )
        current = None if start is None else getattr(start, slot)
        parts[slot] = tuple(_part("keep", item, None) for item in value or ()) if slot == "keep" else _part(slot, value, current)
    if start is not None:
        return replace(start, **parts)
    missing = [slot for slot in ("psi", "ratio", "surrogate", "aggregate") if slot not in parts]
    if missing:
        raise ValueError(
            f"The algorithm has no preset and no {', '.join(missing)}; expected a preset to start from or all four slots."
        )
    return PolicyGradient(**parts)


def _preset(name: str) -> PolicyGradient:
    if ":" in name:
        found = _imported(name)
        if not isinstance(found, PolicyGradient):
            raise ValueError(f"{name} is a {type(found).__name__}; expected a PolicyGradient.")
        return found
    presets = {value.name: value for value in globals().values() if isinstance(value, PolicyGradient)}
    if name not in presets:
        raise ValueError(
            f"There is no algorithm {name!r}; expected one of {', '.join(presets)} or module:object{_near(name, presets)}."
        )
    return presets[name]


def _part(slot: str, value: Any, current: Any) -> Any:
    """The part that a slot's value means; `current` is what the preset has there."""
    if value is None and slot in _OPTIONAL:
        return None
    if isinstance(value, str):
        found = _named(slot, value)
        return _built(found, {}) if isinstance(found, type) else found
    if isinstance(value, Mapping):
        parameters = {key: _part("psi", item, None) if key == "psi" else item for key, item in value.items() if key != "part"}
        if "part" in value:
            return _built(_named(slot, value["part"]), parameters)
        if is_dataclass(current) and not isinstance(current, type):
            return _built(type(current), {f.name: getattr(current, f.name) for f in fields(current)} | parameters)
        if slot in _DEFAULT_PART:
            return _built(_DEFAULT_PART[slot], parameters)
    elif callable(value) or isinstance(value, tuple(_DEFAULT_PART.values())):
        return value
    raise ValueError(
        f"Slot {slot} is {value!r}; expected a name, module:object, or a mapping with `part` and its parameters"
        f"{', or null' if slot in _OPTIONAL else ''}."
    )


def _named(slot: str, name: str) -> Any:
    if ":" in name:
        return _imported(name)
    known = {key: getattr(module, key) for module in _SLOTS[slot] for key in module.__all__}
    if name not in known:
        raise ValueError(
            f"Slot {slot} has no part {name!r}; expected one of {', '.join(sorted(known))} or module:object{_near(name, known)}."
        )
    return known[name]


def _built(part: Any, parameters: dict[str, Any]) -> Any:
    """A part with its parameters."""
    label = getattr(part, "__name__", str(part))
    if not (isinstance(part, type) and is_dataclass(part)):
        if parameters:
            raise ValueError(f"{label} takes no parameters and got {', '.join(parameters)}; give its name alone.")
        return part
    allowed = [f.name for f in fields(part)]
    for key in parameters:
        if key not in allowed:
            raise ValueError(f"{label} has no parameter {key!r}; expected {', '.join(allowed) or 'none'}{_near(key, allowed)}.")
    if part is kl.KL and isinstance(parameters.get("coefficient"), Mapping):
        parameters = {**parameters, "coefficient": _part("kl", {"part": "adaptive", **parameters["coefficient"]}, None)}
    try:
        return part(**parameters)
    except TypeError as error:
        raise ValueError(f"{label} got {parameters}; {error}; expected parameters {', '.join(allowed)}.") from error


def _imported(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be imported ({error}); expected module:object; check the name and that Python finds the module."
        ) from error


def _near(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
