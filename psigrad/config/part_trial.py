"""A trial of a method's custom parts on a small artificial batch, so that a wrong shape is found before a model is loaded."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from psigrad.errors import UserError, kind_of, name_reason
from psigrad.objective.batch import Batch, PolicyOutputs, Totals, terminal
from psigrad.objective.lazy_torch import Tensor, torch
from psigrad.objective.parts.advantage import StatefulPsi, needs_of
from psigrad.objective.policy_gradient import PolicyGradient

GROUPS, SIZE, STEPS = 2, 8, 3
PACKAGE = str(Path(__file__).parents[1])


def make_batch() -> Batch:
    """Return a batch of two groups, each of 8 trajectories of 1 to 3 steps. `inputs`, `metric` and `rewarded` are None."""
    generator = torch.Generator().manual_seed(0)
    rows = GROUPS * SIZE
    lengths_N = torch.arange(rows) % STEPS + 1
    mask_NT = torch.arange(STEPS) < lengths_N[:, None]

    def draw() -> Tensor:
        return torch.rand(rows, STEPS, generator=generator)

    reward_N = torch.arange(rows).remainder(3) / 2
    logp_NT = -draw() - 0.1
    return Batch(
        mask=mask_NT,
        reward=terminal(reward_N, mask_NT),
        logp_old=logp_NT,
        group=torch.arange(rows) // SIZE,
        logp_ref=logp_NT - 0.1 * draw(),
        logp_sampler=logp_NT,
        value=draw(),
        action_value=draw(),
        last_value=torch.zeros(rows),
        truncated=torch.arange(rows) % 5 == 4,
        entropy=draw(),
        parts=torch.stack([reward_N, reward_N / 2], dim=1),
    )


def try_parts(method: PolicyGradient) -> None:
    """Call a method's custom parts on a small batch, then compute the method's loss. Do nothing if all parts are psigrad's.

    Raises `UserError` if a custom part raises an error, or returns the wrong type or shape.
    """
    custom = [part for part in _parts_within(method) if _is_custom(part)]
    if not custom:
        return
    batch = make_batch()
    mask, (rows, steps) = batch.mask, batch.mask.shape
    logp = (batch.logp_old + 0.05).requires_grad_()
    totals = Totals(rows, int(mask.sum()), int(mask.sum()))
    advantage = torch.where(mask, 1.0, 0.0)
    known = {"mask": mask, "marks": None, "logp_sampler": batch.logp_sampler}

    def call_psi() -> Any:
        psi = method.psi
        return psi(batch, psi.initial_state())[0] if isinstance(psi, StatefulPsi) else psi(batch)

    def call_surrogate() -> Any:
        needed = {name: known[name] for name in needs_of(method.surrogate) & known.keys()}
        return method.surrogate(logp, logp - batch.logp_old, advantage, **needed)

    calls: list[tuple[str, Any, Callable[[], Any]]] = [
        ("algorithm.psi", method.psi, call_psi),
        ("algorithm.ratio", method.ratio, lambda: method.ratio(logp, batch.logp_old, mask)),
        ("algorithm.aggregate", method.aggregate, lambda: method.aggregate(mask, totals)),
    ]
    if "marks" not in needs_of(method.surrogate):
        calls.append(("algorithm.surrogate", method.surrogate, call_surrogate))
    if (correction := method.correction) is not None:
        calls.append(("algorithm.correction", correction, lambda: correction(batch)))
    for setting, part, call in calls:
        if _is_custom(part):
            _check(setting, part, _result(setting, part, call), ((rows, steps),))
    for keep in method.keep:
        if _is_custom(keep):
            arguments = (batch, advantage) if "advantage" in needs_of(keep) else (batch,)
            found = _result("algorithm.keep", keep, partial(keep, *arguments))
            _check("algorithm.keep", keep, found, ((rows,), (rows, steps)), torch.bool)
    _result("algorithm", custom[0], lambda: _compute_loss(method, batch, logp))


def _compute_loss(method: PolicyGradient, batch: Batch, logp: Tensor) -> None:
    """Compute the method's loss and its gradient with respect to `logp`, the policy's log-probs, only to find errors."""
    state = method.initial_state()
    prepared = method.prepare(batch, state)
    outputs = PolicyOutputs(logp, entropy=batch.entropy, value=batch.value, kl=torch.zeros_like(logp) + 0 * logp)
    loss = method.loss(prepared, outputs, method.totals(prepared), state | prepared.state)
    if loss.value.requires_grad:
        loss.value.backward()


def _parts_within(thing: Any) -> list[Any]:
    """Return the parts inside `thing`, at any depth. `thing` is a method, or a part that is a dataclass."""
    found: list[Any] = []
    for field in fields(thing):
        value = getattr(thing, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            within = is_dataclass(part) and not isinstance(part, type)
            if within or callable(part):
                found.append(part)
            if within:
                found += _parts_within(part)
    return found


def _is_custom(part: Any) -> bool:
    """Return True if a part is not one of psigrad's."""
    home = getattr(part if inspect.isroutine(part) else type(part), "__module__", "")
    return not home.startswith("psigrad.")


def _result(setting: str, part: Any, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(PACKAGE)]
        own = [frame for frame in frames if frame.filename == _file_of(part)]
        place = f"{own[-1].filename}, line {own[-1].lineno}" if own else _source_location(part)
        raise UserError(
            f"{setting} ({_name(part)}) raised {name_reason(error)} on a test batch ({place}); correct its code."
        ) from error


def _check(setting: str, part: Any, found: Any, shapes: tuple[tuple[int, ...], ...], dtype: Any = None) -> None:
    """Raise `UserError` about `setting` unless `part`'s result `found` is a tensor of one of `shapes`, and of `dtype` if set."""
    names = {1: "[N]", 2: "[N, T]"}
    expected = " or ".join(f"{names[len(shape)]} = {list(shape)}" for shape in shapes)
    kind = "a boolean tensor" if dtype is not None else "a tensor"
    if not isinstance(found, torch.Tensor):
        given = kind_of(found)
    elif tuple(found.shape) not in shapes:
        given = f"a tensor of shape {list(found.shape)}"
    elif dtype is not None and found.dtype != dtype:
        given = f"a tensor of {found.dtype}"
    else:
        return
    raise UserError(f"{setting} ({_name(part)}) returned {given}; expected {kind} {expected} ({_source_location(part)}).")


def _name(part: Any) -> str:
    return str(getattr(part, "__name__", type(part).__name__))


def _file_of(part: Any) -> str:
    try:
        return inspect.getsourcefile(part if inspect.isroutine(part) else type(part)) or ""
    except TypeError:
        return ""


def _source_location(part: Any) -> str:
    """Return the file and the line where a part is defined."""
    try:
        _, line = inspect.getsourcelines(part if inspect.isroutine(part) else type(part))
    except (OSError, TypeError):
        return "defined without a file"
    return f"{_file_of(part)}, line {line}"
