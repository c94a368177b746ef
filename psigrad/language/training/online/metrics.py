"""Figures of one collection, under TRL's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from psigrad.language.rollout.types import Trajectory


def collection_metrics(trajectories: Sequence[Trajectory], group_size: int) -> dict[str, Any]:
    """Rewards, lengths and an entropy estimate over all completions of a step, those that are not trained on included.

    `entropy` is the mean of -log pi(a) over sampled tokens: an unbiased estimate of the policy's entropy that costs nothing.
    """
    rewards = [t.reward for t in trajectories if t.reward is not None]
    groups = [
        [t.reward for t in trajectories[i : i + group_size] if t.reward is not None]
        for i in range(0, len(trajectories), group_size)
    ]
    groups = [group for group in groups if group]
    lengths = [t.chosen for t in trajectories]
    ended = [t.chosen for t in trajectories if t.completion.finish_reason == "stop"]
    surprise = [-lp for t in trajectories for lp in t.completion.logprobs]  # 0 on tokens that the policy did not choose
    figures: dict[str, Any] = {}
    if rewards:
        figures["reward"] = math.fsum(rewards) / len(rewards)
        figures["reward_std"] = math.fsum(map(_stdev, groups)) / len(groups)
        figures["frac_reward_zero_std"] = sum(len(set(g)) == 1 for g in groups) / len(groups)
    for name in sorted({name for t in trajectories for name in t.parts}):
        values = [float(t.parts[name]) for t in trajectories if t.parts.get(name) is not None]
        if values:
            figures[f"rewards/{name}/mean"] = math.fsum(values) / len(values)
            figures[f"rewards/{name}/std"] = _stdev(values)
    figures |= {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "entropy": math.fsum(surprise) / max(1, sum(lengths)),
        "samples": len(trajectories),
        "failed": sum(t.status == "failed" for t in trajectories),
        "unscored": sum(t.status == "unscored" for t in trajectories),
    }
    if any(t.mask for t in trajectories):
        figures["turns/mean"] = sum(t.turns for t in trajectories) / len(trajectories)
    if ended:
        figures["completions/mean_terminated_length"] = sum(ended) / len(ended)
    return figures


def _stdev(values: Sequence[float]) -> float:
    """The sample standard deviation, 0 of a single value. Python's own computes with fractions, fifty times as long."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))
