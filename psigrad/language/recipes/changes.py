"""Settings that callbacks change while a run is under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from psigrad.errors import UserError, nearest
from psigrad.language.training.loss_sums import SETTING
from psigrad.runs.callbacks import PARTS

R = TypeVar("R")


def change_settings(run: R, changes: Mapping[str, Any]) -> R:
    """Return a copy of the run with the new values in `changes`. Raises `UserError` if a setting is unknown or cannot change."""
    made: Any = run
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        if name == SETTING:  # lowered when memory ran out, but the settings of a resumed run can be lower still
            value = min(value, made.config.micro_batch_tokens)
        if head in PARTS:
            made = _change_method(made, head, rest, value)
            continue
        made = replace(made, config=_replace_in(made.config, name.split("."), value, name))
        if head == "sampling" and hasattr(made, "params"):
            made = replace(made, params=_replace_in(made.params, [rest], value, name))
        if name == "critic_learning_rate" and getattr(made, "critic", None) is not None:
            made = replace(made, critic=replace(made.critic, learning_rate=value))
    same: R = made
    return same


def apply_changes(run: R, changes: Mapping[str, Any]) -> R:
    """Return a copy of the run with the new values in `changes`. Its optimisers, which both runs share, get them too."""
    if not changes:
        return run
    made: Any = change_settings(run, changes)
    for optimizer in (made.optimizer, *([made.critic.optimizer] if getattr(made, "critic", None) is not None else ())):
        optimizer.optim = made.config.optim
    same: R = made
    return same


def _change_method(run: Any, head: str, rest: str, value: float) -> Any:
    """Return a copy of the run with the setting `head`.`rest` set to `value`. `head` is "algorithm" or "loss"."""
    name = f"{head}.{rest}"
    if head == "loss":
        tasks = {own: task for own in ("task", "held_out") if (task := getattr(run, own)) is not None}
        changed = {own: replace(t, loss=_replace_in(t.loss, rest.split("."), value, name)) for own, t in tasks.items()}
        return replace(run, **changed)
    algorithm = _replace_in(run.algorithm, rest.split("."), value, name)
    if getattr(algorithm, "needs_reference", False) and not run.has_reference:
        raise UserError(
            f"{name} cannot be changed to {value!r}, since the run has no reference model; start the run with a value above 0."
        )
    return replace(run, algorithm=algorithm)


def _replace_in(thing: Any, path: list[str], value: Any, name: str) -> Any:
    """Copy the dataclass `thing` with `value` in the nested field at `path`. `name` is the setting's full name, for errors."""
    known = [f.name for f in fields(thing)] if is_dataclass(thing) else []
    if path[0] not in known:
        raise UserError(f"{name} cannot be changed: there is no {path[0]!r}{nearest(path[0], known) or '.'}")
    held = getattr(thing, path[0])
    if len(path) > 1:
        value = _replace_in(held, path[1:], value, name)
    elif "." in name and name.partition(".")[0] in PARTS and (isinstance(held, bool) or not isinstance(held, int | float)):
        raise UserError(f"{name} is {held!r}, but only a number can be changed during a run.")
    return replace(thing, **{path[0]: value})
