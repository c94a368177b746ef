"""Build algorithms and losses of `psigrad.objective` from settings. A setting is a name, "module:object" or a mapping of parts.

The parts of a policy gradient fill its slots (`SLOTS`): for example, `gae` fills psi, the slot for advantages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from psigrad.errors import UserError, kind_of, nearest
from psigrad.importing import imported
from psigrad.objective import PolicyGradient, catalog
from psigrad.objective import explain as describe
from psigrad.objective.parts import advantage, aggregate, critic, group_advantage, off_policy, ratio, surrogate
from psigrad.objective.preferences import preference_catalog
from psigrad.objective.preferences.preference_loss import KahnemanTversky, OnlinePreference, Preference

T = TypeVar("T")
Spec = str | Mapping[str, Any] | PolicyGradient
LossSpec = str | Mapping[str, Any] | Preference | KahnemanTversky

SLOTS = ("psi", "ratio", "surrogate", "aggregate", "kl", "keep", "critic", "entropy", "correction")
# Slot -> the parts that may fill it, by name.
PARTS: dict[str, dict[str, Any]] = {
    "psi": {name: getattr(module, name) for module in (advantage, group_advantage) for name in module.__all__},
    "surrogate": {name: getattr(module, name) for module in (surrogate, off_policy) for name in module.__all__},
}
for module in (ratio, aggregate, critic, preference_catalog):
    PARTS |= {slot: {part.__name__: part for part in parts} for slot, parts in module.PARTS.items()}
DEFAULT_PART = {"kl": ratio.KL, "critic": critic.value_loss, "entropy": critic.bonus}
PRESETS: dict[str, Any] = {
    name: method.algorithm
    for methods in (catalog.METHODS, preference_catalog.ONLINE_METHODS, preference_catalog.METHODS)
    for name, method in methods.items()
}
_BOUNDS = ("high", "cap", "bound", "limit", "delta")  # where infinity means "no bound"
_OPTIONAL = ("kl", "critic", "entropy", "correction")


def resolve(spec: Spec) -> PolicyGradient:
    """Return the policy gradient that a setting describes.

    A string is a preset's name, "module:object" or "file.py:object". A mapping {"preset": name, slot: part, …} replaces
    the parts in some slots (`SLOTS`) of a preset. A mapping without a preset needs psi, ratio, surrogate and aggregate.
    A part is a name, "module:object" or {"part": name, parameter: value, …}. Without "part", a mapping changes parameters of
    the preset's part. None removes an optional part. The slot `keep` takes a list of filters.
    Raises `UserError` for an unknown name or parameter, and `ValueError` for parts that conflict.
    """
    if isinstance(spec, PolicyGradient | str):
        return _with_numbers(_preset(spec) if isinstance(spec, str) else spec)
    if not isinstance(spec, Mapping):
        raise UserError(f"The algorithm is {kind_of(spec)}; expected a preset's name, a mapping or a PolicyGradient.")
    changes = dict(spec)
    return change(_preset(changes.pop("preset")) if "preset" in changes else None, changes)


def change(start: PolicyGradient | None, changes: Mapping[str, Any]) -> PolicyGradient:
    """Return `start` with some parts replaced. Without a start, `changes` must have psi, ratio, surrogate and aggregate.

    `changes` is {slot: part}, with each part in one of the forms that `resolve` lists.
    """
    parts: dict[str, Any] = {"name": f"{start.name} (changed)" if start and changes else start.name if start else ""}
    for slot, value in changes.items():
        if slot == "name":
            parts["name"] = str(value)
        elif slot not in SLOTS:
            hint = nearest(slot, SLOTS) or "."
            raise UserError(f"The algorithm has no setting {slot!r}; expected one of preset, name, {', '.join(SLOTS)}{hint}")
        elif slot == "keep":
            parts[slot] = tuple(_part("keep", item, None) for item in value or ())
        else:
            parts[slot] = _part(slot, value, None if start is None else getattr(start, slot))
    if start is None and (missing := [slot for slot in ("psi", "ratio", "surrogate", "aggregate") if slot not in parts]):
        raise UserError(
            f"The algorithm has no preset and no {', '.join(missing)}; expected a preset, or psi, ratio, surrogate and aggregate."
        )
    return _with_numbers(PolicyGradient(**parts) if start is None else replace(start, **parts))


def resolve_loss(spec: LossSpec) -> Preference | KahnemanTversky:
    """Return the preference loss that a setting describes: a preset's name, {"preset": name, field: value, …}, or a loss object.

    A `score` or `link` is a name in `preference_catalog.PARTS`, "module:object" or {"part": name, parameter: value, …}.
    The default preset is dpo.
    """
    if isinstance(spec, Preference | KahnemanTversky):
        return _with_numbers(spec)
    if not isinstance(spec, str | Mapping):
        raise UserError(f"The preference loss is {kind_of(spec)}; expected a name, a mapping or a Preference.")
    changes = {"preset": spec} if isinstance(spec, str) else dict(spec)
    start: Any = _look_up(changes.pop("preset", "dpo"), preference_catalog.METHODS, "preference loss").algorithm
    names = {f.name for f in fields(start)}
    for name, value in changes.items():
        if name not in names:
            raise UserError(
                f"The loss {start.name} has no field {name!r}; expected one of {', '.join(sorted({'preset', *names}))}."
            )
        if name in preference_catalog.PARTS:
            changes[name] = _part(name, value, getattr(start, name))
    found: Preference | KahnemanTversky = replace(
        start, **{"name": f"{start.name} (changed)" if changes else start.name, **changes}
    )
    return _with_numbers(found)


def resolve_online(spec: Spec | OnlinePreference) -> PolicyGradient | OnlinePreference:
    """Return the method of an online run: a policy gradient, or a preference loss on the run's own samples.

    A preference loss is given as "online_dpo" or {"preset": "online_dpo", "loss": …}.
    """
    if isinstance(spec, OnlinePreference):
        return _with_numbers(spec)
    changes = {"preset": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    if changes.pop("preset", "") not in preference_catalog.ONLINE_METHODS:
        return resolve(spec)
    loss = resolve_loss(changes.pop("loss", "dpo"))
    if changes or isinstance(loss, KahnemanTversky):
        known = ", ".join(name for name in preference_catalog.METHODS if name != "kto")
        raise UserError(f"online_dpo has no {', '.join(changes) or 'loss kto'}; its only setting is `loss`, one of {known}.")
    return OnlinePreference(loss, f"online_{loss.name}")


def explain(spec: Spec | LossSpec | OnlinePreference, other: Spec | LossSpec | None = None) -> str:
    """Return the formula that a method minimises, part by part. With two methods, return the differences between them.

    Each method may be a name, a mapping as in the settings, or an object.
    """
    return describe.explain(_resolve_any(spec), None if other is None else _resolve_any(other))


def _resolve_any(spec: Any) -> PolicyGradient | OnlinePreference | Preference | KahnemanTversky:
    name = spec.get("preset") if isinstance(spec, Mapping) else spec
    losses = preference_catalog.METHODS
    if isinstance(spec, Preference | KahnemanTversky) or (isinstance(name, str) and name in losses):
        return resolve_loss(spec)
    if isinstance(name, str) and ":" not in name:
        _look_up(name, {**catalog.METHODS, **preference_catalog.ONLINE_METHODS, **losses}, "method")
    return resolve_online(spec)


def _with_numbers(part: T) -> T:
    """Return a method or a part unchanged. Raises `UserError` for a number in it that must be finite but is not."""
    for name in [f.name for f in fields(part)]:  # type: ignore[arg-type]
        value = getattr(part, name)
        if isinstance(value, float) and not math.isfinite(value) and not (value > 0 and name in _BOUNDS):
            raise UserError(f"{type(part).__name__} has {name}={value}; expected a finite number.")
        for inner in value if isinstance(value, tuple) else (value,):
            if is_dataclass(inner) and not isinstance(inner, type) and type(inner).__module__.startswith("psigrad."):
                _with_numbers(inner)
    return part


def _preset(name: str) -> PolicyGradient:
    if ":" not in name:
        return _look_up(name, catalog.METHODS, "algorithm", " or module:object").algorithm
    found = imported(name, "algorithm")
    if not isinstance(found, PolicyGradient):
        raise UserError(f"{name} is {kind_of(found)}; expected a PolicyGradient.")
    return found


def _part(slot: str, value: Any, current: Any) -> Any:
    """Return the part for `slot` that a user's `value` describes. `current` is the part that the slot has so far, or None."""
    if value is None and slot in _OPTIONAL:
        return None
    if isinstance(value, str):
        found = _find_part(slot, value)
        return _build(found, {}) if isinstance(found, type) else found
    if isinstance(value, Mapping):
        inside = None if "part" in value else current
        parameters = {key: _inner(key, item, inside) for key, item in value.items() if key != "part"}
        if "part" in value:
            return _build(_find_part(slot, value["part"]), parameters)
        if is_dataclass(current) and not isinstance(current, type):
            return _build(type(current), {f.name: getattr(current, f.name) for f in fields(current)} | parameters)
        if slot in DEFAULT_PART:
            return _build(DEFAULT_PART[slot], parameters)
    elif callable(value) or isinstance(value, tuple(DEFAULT_PART.values())):
        return value
    raise UserError(
        f"algorithm.{slot} is {value!r}; expected a name, module:object, or a mapping with `part` and its parameters"
        f"{', or null' if slot in _OPTIONAL else ''}."
    )


# Parameters of a part that are parts themselves -> the slot whose names they take.
INNER = {"psi": "psi", "returns": "psi", "surrogate": "surrogate"}


def _inner(name: str, value: Any, outer: Any) -> Any:
    """Return the part that `value` describes if the parameter `name` of `outer` holds a part. Otherwise return `value`."""
    return value if name not in INNER or value is None else _part(INNER[name], value, getattr(outer, name, None))


def _find_part(slot: str, name: str) -> Any:
    return imported(name, f"part {slot}") if ":" in name else _look_up(name, PARTS[slot], slot, " or module:object")


def _build(part: Any, parameters: Mapping[str, Any]) -> Any:
    """Return an instance of the dataclass `part`, or the function `part` itself. Raises `UserError` for unknown parameters."""
    label = getattr(part, "__name__", str(part))
    if not (isinstance(part, type) and is_dataclass(part)):
        if parameters:
            raise UserError(f"{label} takes no parameters, but got {', '.join(parameters)}; give its name alone.")
        return part
    allowed = [f.name for f in fields(part)]
    for key in parameters:
        if key not in allowed:
            hint = nearest(key, allowed) or "."
            raise UserError(f"{label} has no parameter {key!r}; expected {', '.join(allowed) or 'none'}{hint}")
    if part is ratio.KL and isinstance(parameters.get("coefficient"), Mapping):
        parameters = {**parameters, "coefficient": _part("kl", {"part": "adaptive", **parameters["coefficient"]}, None)}
    try:
        return part(**parameters)
    except TypeError as error:
        raise UserError(f"{label} got {parameters} ({error}); expected the parameters {', '.join(allowed)}.") from error


def _look_up(name: Any, choices: Mapping[str, T], kind: str, also: str = "") -> T:
    if name not in choices:
        raise UserError(
            f"There is no {kind} {name!r}; expected one of {', '.join(choices)}{also}{nearest(str(name), choices) or '.'}"
        )
    return choices[name]
