"""Settings that a callback may change while a run goes on, and the run with them.

Those are marked `LIVE`: what a step reads when it begins. What was loaded or made before the first step is not among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from psigrad.config.fields import LIVE, marked, settings_of
from psigrad.config.load import expected
from psigrad.config.nested import flat_names
from psigrad.errors import UserError, nearest

R = TypeVar("R")
_PARTS = ("algorithm", "loss")


def check(config: Any, name: str, value: Any) -> tuple[str, Any]:
    """(dotted name, value) of a change, or a `UserError` where the setting stays as it is, or takes no such value."""
    leaves = dict(flat_names(type(config)))
    dotted = leaves.get(name, name)
    if dotted.partition(".")[0] in _PARTS and "." in dotted and hasattr(config, dotted.partition(".")[0]):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{dotted} is changed to {value!r}; expected a number.")
        return dotted, value
    known = marked(type(config), LIVE)
    if dotted not in known:
        parts = " and ".join(f"numbers in {part}" for part in _PARTS if hasattr(config, part))
        raise UserError(
            f"{name} cannot be changed during a run; what can is {', '.join(known)}{', ' if parts else ''}{parts}"
            f"{nearest(name, [*known, *(own.rpartition('.')[2] for own in known)]) or '.'}"
        )
    if dotted.startswith("sampling.") and getattr(config, "lag", False):
        raise UserError(f"{name} cannot be changed in a run with a lag: completions of the steps to come are drawn already.")
    try:
        return dotted, TypeAdapter(settings_of(type(config))[dotted].annotated).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{name} is changed to {value!r}; {expected(error.errors()[0]['msg'])}.") from error


def changed(run: R, changes: Mapping[str, Any]) -> R:
    """The parts of a run (`Online` or `Offline`) with these settings. Raises `UserError` where a part has no such number."""
    made: Any = run
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        if head in _PARTS:
            made = _with_part(made, head, rest, value)
            continue
        made = dataclasses.replace(made, config=_replaced(made.config, name.split("."), value, name))
        if head == "sampling" and hasattr(made, "params"):
            made = dataclasses.replace(made, params=_replaced(made.params, [rest], value, name))
        if name == "critic_learning_rate" and getattr(made, "critic", None) is not None:
            made = dataclasses.replace(made, critic=dataclasses.replace(made.critic, learning_rate=value))
    same: R = made
    return same


def apply_changes(run: R, changes: Mapping[str, Any]) -> R:
    """As `changed`, the optimisers with it."""
    if not changes:
        return run
    made: Any = changed(run, changes)
    for optimizer in (made.optimizer, *([made.critic.optimizer] if getattr(made, "critic", None) is not None else ())):
        optimizer.optim = made.config.optim
        optimizer.adamw.weight_decay = made.config.optim.weight_decay
    same: R = made
    return same


def _with_part(run: Any, head: str, rest: str, value: float) -> Any:
    """The run with another number in its algorithm, or in its preference loss."""
    name = f"{head}.{rest}"
    if head == "loss":
        tasks = {
            own: dataclasses.replace(task, loss=_replaced(task.loss, rest.split("."), value, name))
            for own in ("task", "held_out")
            if (task := getattr(run, own)) is not None
        }
        return dataclasses.replace(run, **tasks)
    algorithm = _replaced(run.algorithm, rest.split("."), value, name)
    if getattr(algorithm, "needs_reference", False) and run.reference is None:
        raise UserError(f"{name} is changed to {value!r} and the run has no reference; begin with a coefficient above 0.")
    return dataclasses.replace(run, algorithm=algorithm)


def _replaced(thing: Any, path: list[str], value: Any, name: str) -> Any:
    """A copy of a frozen dataclass with another value at the end of `path`."""
    known = [f.name for f in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    if path[0] not in known:
        raise UserError(f"{name} cannot be changed: there is no {path[0]!r}{nearest(path[0], known) or '.'}")
    held = getattr(thing, path[0])
    if len(path) > 1:
        value = _replaced(held, path[1:], value, name)
    elif "." in name and name.partition(".")[0] in _PARTS and (isinstance(held, bool) or not isinstance(held, int | float)):
        raise UserError(f"{name} cannot be changed: it is {held!r} and no number.")
    return dataclasses.replace(thing, **{path[0]: value})
