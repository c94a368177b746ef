"""Trajectories as rows of rollouts.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from psigrad.language import images
from psigrad.language.rollout.types import Completion, Trajectory

DIGITS = 4
"""Decimal digits of figures per token."""


def rollout_row(
    trajectory: Trajectory,
    step: int,
    kind: Literal["train", "eval"],
    prompt: str | Sequence[dict[str, Any]],
    advantage: float | None = None,
) -> dict[str, Any]:
    """Return one line of rollouts.jsonl; `records.rows.RolloutRow` documents its keys."""
    completion = trajectory.completion
    row: dict[str, Any] = {
        "step": step,
        "kind": kind,
        "row": trajectory.row,
        "k": trajectory.k,
        "prompt": images.recorded(prompt),
        "completion": trajectory.text,
        "completion_ids": list(completion.ids),
        "reward": trajectory.reward,
        "parts": trajectory.parts,
        "status": trajectory.status,
        "reason": trajectory.reason,
        "advantage": advantage,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "version": trajectory.version,
    }
    if trajectory.mask:
        row |= {"turns": trajectory.turns, "mask": [int(m) for m in trajectory.mask]}
    if trajectory.seat is not None:
        row["seat"] = trajectory.seat
    if trajectory.answer is not None or trajectory.branches or trajectory.seat is not None:
        row["contexts"] = [(context.start, list(context.prompt_ids)) for context in trajectory.contexts]
    if trajectory.cuts:
        row["cuts"] = [cut._asdict() for cut in trajectory.cuts]
    if trajectory.step_rewards:
        row["step_rewards"] = [list(pair) for pair in trajectory.step_rewards]
    return row


def log_probs_of(completion: Completion) -> dict[str, list[float]]:
    """Return `logprobs` under the policy, and `sampling_logprobs` if a filter such as top-k changed the distribution."""
    same = completion.logprobs == completion.sampling_logprobs
    sampling = {} if same else {"sampling_logprobs": round_all(completion.sampling_logprobs)}
    return {"logprobs": round_all(completion.logprobs), **sampling}


def round_all(values: Sequence[float]) -> list[float]:
    """Return the values rounded to `DIGITS`."""
    return [round(float(value), DIGITS) for value in values]
