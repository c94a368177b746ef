"""The rows of a run folder's files: who writes them and who reads them agree here.

Every file is JSON Lines: one object per line, strict JSON (NaN and infinities are the strings "NaN", "Infinity", "-Infinity").
Readers ignore keys that they do not know, and never rely on the order of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

from psigrad.rollout.types import Trajectory

# Of run folders, rows and checkpoint manifests. It goes up when what is written today could be misread by yesterday's readers.
FORMAT = 1

Status = Literal["scored", "failed", "unscored"]


class RolloutRow(TypedDict):
    """One completion in rollouts.jsonl, written by language-model runs."""

    step: int
    kind: Literal["train", "eval"]
    row: int
    """Index of the prompt's dataset row."""
    k: int
    """Number of the completion within its group."""
    prompt: str | list[dict[str, Any]]
    completion: str
    completion_ids: list[int]
    reward: float | None
    parts: dict[str, float | None]
    """What each reward function gave."""
    status: Status
    reason: str
    """Why it failed or stayed unscored; else empty."""
    advantage: float | None
    """Mean over its tokens, where it was trained on."""
    finish_reason: Literal["stop", "length"]
    seed: int
    version: int
    """Optimiser steps that the sampling policy had behind it."""
    turns: NotRequired[int]
    mask: NotRequired[list[int]]
    """In episodes of several turns: 1 for tokens that the policy chose."""
    step_rewards: NotRequired[list[list[float]]]
    """(place, reward) of rewards before the end."""


def rollout_row(
    trajectory: Trajectory,
    step: int,
    kind: Literal["train", "eval"],
    prompt: str | Sequence[dict[str, Any]],
    advantage: float | None = None,
) -> dict[str, Any]:
    """One line of rollouts.jsonl; see `RolloutRow`."""
    completion = trajectory.completion
    return {
        "step": step,
        "kind": kind,
        "row": trajectory.row,
        "k": trajectory.k,
        "prompt": prompt,
        "completion": trajectory.text,
        "completion_ids": list(completion.ids),
        "reward": trajectory.reward,
        "parts": trajectory.parts,
        "status": trajectory.status,
        "reason": trajectory.reason,
        "advantage": advantage,
        **({"turns": trajectory.turns, "mask": [int(m) for m in trajectory.mask]} if trajectory.mask else {}),
        **({"step_rewards": [list(pair) for pair in trajectory.step_rewards]} if trajectory.step_rewards else {}),
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "version": trajectory.version,
    }
