"""Sentences that explain an advantage, from the rewards of the group and the row itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from psigrad.records.read import show_number as _shown
from psigrad.records.rows import number
from psigrad.redaction import escape

Row = Mapping[str, Any]


def shown(value: Any) -> str:
    """Return a number as text for display, with a typographic minus sign."""
    return _shown(value).replace("-", "−")


def explained(row: Row, group: Sequence[Row]) -> str:
    """Return one or two sentences that explain the advantage of a row of rollouts.jsonl. `group` is all rows of its group."""
    if row.get("kind") == "eval":
        return "Held-out completions are measured and not trained on."
    if row.get("kind") != "train":
        return ""
    if row.get("status") == "unscored":
        reason = escape(str(row.get("reason") or ""))[:300]
        return f"The completion has no reward, so it is not trained on{f': {reason}' if reason else ''}."
    if row.get("completion_ids") == []:
        return "The completion is empty: there is no token whose probability could change."
    if row.get("kept") is False:
        return (
            f"A filter dropped the completion{_by_its_length(row)}, so its advantage of {shown(number(row.get('advantage')))} "
            "has no effect."
        )
    advantage = number(row.get("advantage"))
    if math.isnan(advantage):
        return _not_used(group)
    if advantage == 0:
        return _zero(row, group)
    return ""


def _listed(row: Row, name: str) -> list[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else []


def _rewards(group: Sequence[Row]) -> list[float]:
    values = [number(row.get("reward")) for row in group]
    return [value for value in values if math.isfinite(value)]


def _not_used(group: Sequence[Row]) -> str:
    rewards = _rewards(group)
    if len(set(rewards)) == 1 and len(rewards) > 1:
        return (
            f"All {len(rewards)} rewards of its group are {shown(rewards[0])}, so there is nothing to learn and the group was "
            "dropped."
        )
    if len(rewards) < 2 <= len(group):
        return "Too few completions of its group have a reward to compare it with, so the group was dropped."
    return "The completion was not part of the batch that was trained on."


def _zero(row: Row, group: Sequence[Row]) -> str:
    """Return a sentence that says why an advantage is 0."""
    rewards, own = _rewards(group), number(row.get("reward"))
    mask = _listed(row, "mask")
    if not mask or any(mask):
        if len(rewards) > 1 and len(set(rewards)) == 1:
            which = {1.0: "all are right", 0.0: "all are wrong"}.get(rewards[0], "none is better than another")
            all_of = f"All {len(rewards)} rewards of its group are {shown(rewards[0])}"
            return f"{all_of} ({which}), so each reward equals the mean, and there is nothing to learn."
        if any(number(a) != 0 for a in _listed(row, "advantages")):
            return "The advantages of its tokens have the mean 0; each is shown below."
        if rewards and math.isclose(own, math.fsum(rewards) / len(rewards), rel_tol=1e-6, abs_tol=1e-9):
            return f"The reward of {shown(own)} equals the mean of its group, so the probability is neither raised nor lowered."
        if _is_pair(group):
            return "The completion is neither the best nor the worst of its group; only those two are trained on."
        return f"The advantage is 0 though its reward is {shown(own)} and its group's mean is {shown(_mean(rewards))}."
    return "The policy chose none of its tokens (all are masked)."


def _is_pair(group: Sequence[Row]) -> bool:
    """Return True if the advantages look like those of a pair method: one 1, one −1, the others 0."""
    found = sorted(number(member.get("advantage")) for member in group)
    return len(found) > 2 and found[0] == -1 and found[-1] == 1 and all(value == 0 for value in found[1:-1])


def _by_its_length(row: Row) -> str:
    return ", because the length limit cut it" if row.get("finish_reason") == "length" else ""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def group_said(group: Sequence[Row]) -> str:
    """Return a line about the learning signal of a group, such as its mean reward and spread; "" if it has no rewards."""
    rewards = _rewards(group)
    if not rewards or not group or group[0].get("kind") == "episode":
        return ""
    missing = len(group) - len(rewards)
    without = f"; {missing} without a reward" if missing else ""
    if len(rewards) > 1 and len(set(rewards)) == 1:
        return f"A dead group: every reward is {shown(rewards[0])}{without}."
    mean = _mean(rewards)
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1))
    return f"Rewards {shown(min(rewards))} to {shown(max(rewards))}, mean {shown(mean)}, deviation {shown(spread)}{without}."
