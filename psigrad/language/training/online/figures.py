"""The metrics of a step under TRL's names, and its rows of rollouts.jsonl."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psigrad.language.rollout.collectors import log_probs_of, rollout_row, round_all
from psigrad.language.rollout.exchange import gather_rows
from psigrad.language.rollout.types import Collected, Prompt, Trajectory
from psigrad.language.training.loss_sums import LossSums
from psigrad.objective import PolicyOutputs, Prepared
from psigrad.processes.parallel.world import World


@dataclass(frozen=True)
class UpdateResult:
    """The result of all optimiser steps on one collection."""

    metrics: Mapping[str, Any]
    algorithm: dict[str, float]
    """The algorithm's new state."""
    advantages: list[float] = field(default_factory=list)
    """The advantage of each row: the mean over the row's tokens."""
    tokens: list[dict[str, Any]] = field(default_factory=list)
    """Further columns of rollouts.jsonl for each row. Columns with a value per token exist only in the first rows."""


WITHIN_GROUPS = ("reward_std", "frac_reward_zero_std")
"""The metrics that depend on differences between rewards within groups."""


def collection_metrics(trajectories: Sequence[Trajectory], group_size: int) -> dict[str, Any]:
    """Return metrics of rewards, lengths and entropy over all completions of a step, including those not trained on.

    Each prompt has `group_size` completions, one after another.
    """
    rewards = [t.reward for t in trajectories if t.reward is not None]
    groups = [
        [t.reward for t in trajectories[i : i + group_size] if t.reward is not None]
        for i in range(0, len(trajectories), group_size)
    ]
    groups = [group for group in groups if group]
    lengths = [t.num_chosen for t in trajectories]
    ended = [t.num_chosen for t in trajectories if t.completion.finish_reason == "stop"]
    # Log-probs are 0 on tokens that the policy did not choose.
    likelihood = math.fsum(itertools.chain.from_iterable(t.completion.logprobs for t in trajectories))
    filtered = any(
        abs(own - drawn) > 1e-3
        for t in trajectories
        if t.completion.logprobs is not t.completion.sampling_logprobs
        for own, drawn in zip(t.completion.logprobs, t.completion.sampling_logprobs, strict=True)
    )
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
        # With a filter such as top-k, this is a biased estimate of the entropy.
        "surprise" if filtered else "entropy": (0.0 - likelihood) / max(1, sum(lengths)),
        "samples": len(trajectories),
        "failed": sum(t.status == "failed" for t in trajectories),
        "unscored": sum(t.status == "unscored" for t in trajectories),
    }
    if any(t.mask for t in trajectories):
        figures["turns/mean"] = sum(t.turns for t in trajectories) / len(trajectories)
        for kind in ("cut", "dropped"):
            if count := sum(cut.kind == kind for t in trajectories for cut in t.cuts):
                figures[f"observations/{kind}"] = count
    if answers := [str(message.get("content")) for t in trajectories for message in t.messages if message.get("role") == "tool"]:
        figures["tools/call_frequency"] = len(answers) / len(trajectories)
        figures["tools/failure_frequency"] = sum(text.startswith("error: ") for text in answers) / len(answers)
    if ended:
        figures["completions/mean_terminated_length"] = sum(ended) / len(ended)
    return figures


def _stdev(values: Sequence[float]) -> float:
    """Return the sample standard deviation; 0 for a single value. `statistics.stdev` would take fifty times as long."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def staleness(trajectories: Sequence[Trajectory], step: int, lag: int) -> dict[str, float]:
    """Return {"sampling/staleness": the age, in steps, of the weights that sampled the completions}; {} if `lag` is 0."""
    if not lag or not trajectories:
        return {}
    versions = {t.version for t in trajectories}
    if versions != {max(0, step - lag)}:
        raise RuntimeError(
            f"Step {step + 1} with lag {lag} got completions that were sampled after steps {versions}, "
            f"not after step {max(0, step - lag)}; please report this."
        )
    return {"sampling/staleness": float(step - max(0, step - lag))}


class TokenFigures:
    """The log-probs and entropies of a batch's first `rows` rows, as the last forward pass over each row gave them."""

    def __init__(self, rows: int, prepared: Prepared) -> None:
        self.prepared, self.count = prepared, min(rows, prepared.batch.mask.shape[0])
        shape = (self.count, prepared.batch.mask.shape[1])
        self.logp, self.entropy = torch.full(shape, math.nan), torch.full(shape, math.nan)  # NaN: no pass yet

    def store(self, rows: Tensor, evaluation: PolicyOutputs, sums: LossSums) -> None:
        """Store the log-probs and entropies of a forward pass over `rows`. `sums` copies them to the host later."""
        wanted = rows < self.count

        def fill(table: Tensor, values: Tensor) -> None:
            table[rows[wanted]] = values[wanted]

        for table, values in ((self.logp, evaluation.logp), (self.entropy, evaluation.entropy)):
            if values is not None and bool(wanted.any()):
                sums.later(values.float(), partial(fill, table))

    def gather(self, world: World) -> TokenFigures:
        """Fill in the log-probs and entropies that other processes computed. Return self. All processes must call this."""
        for logp, entropy in world.all_gather((self.logp, self.entropy)):
            self.logp = torch.where(logp.isnan(), self.logp, logp)
            self.entropy = torch.where(entropy.isnan(), self.entropy, entropy)
        return self

    def rows(self) -> list[dict[str, Any]]:
        """Return each row's columns of rollouts.jsonl; see `RolloutRow`."""
        rows: list[dict[str, Any]] = [{} if keep else {"kept": False} for keep in self.prepared.keep.tolist()]
        batch = self.prepared.batch
        chosen = batch.mask[: self.count].numpy()
        columns = {"trained_logprobs": self.logp, "ref_logprobs": batch.logp_ref, "entropy": self.entropy}
        columns["advantages"] = self.prepared.advantage
        tables = {name: x[: self.count].detach().double().numpy() for name, x in columns.items() if x is not None}
        for n, mask in enumerate(chosen):
            length = int(mask.nonzero()[0].max(initial=-1)) + 1
            for name, table in tables.items():
                values = table[n][mask]
                alike = name == "advantages" and not (values != values[:1]).any()
                if length and not alike and not np.isnan(values).any():
                    rows[n][name] = round_all(np.where(mask, table[n], 0.0)[:length].tolist())
        return rows


def rollout_rows(
    world: World,
    prompts: Sequence[Prompt],
    collected: Collected,
    learned: UpdateResult,
    step: int,
    record_tokens: int,
    record_prompts: int = 0,
) -> Sequence[Mapping[str, Any]]:
    """Return a row of rollouts.jsonl for each completion of a step. `record_prompts` limits the prompts; 0 means no limit.

    `prompts` are sorted by `Prompt.index`. Rows of the first `record_tokens` groups that were trained on also have values per
    token. Rank 0 returns the rows of all processes. Any other rank returns only its own.
    """
    written = collected.trajectories
    if record_prompts:
        groups = {*list(dict.fromkeys((t.row, t.prompt_ids) for t in written))[:record_prompts]}
        written = [t for t in written if (t.row, t.prompt_ids) in groups]
    own = {n: t for n, t in enumerate(written) if t.source_rank == world.rank}
    # Prompts are in the order of their rows. Searching all of them in every step would cost more than the step.
    numbers = {t.row for t in own.values()}
    rows: dict[int, Any] = {n: prompts[bisect.bisect_left(prompts, n, key=lambda p: p.index)].row for n in numbers}
    used = [t for group in collected.groups for t in group]
    advantage = {id(t): a for t, a in zip(used, learned.advantages, strict=False)}
    shown = {id(t) for group in collected.groups[:record_tokens] for t in group}
    tokens: dict[int, dict[str, Any]] = {id(t): own for t, own in zip(used, learned.tokens, strict=False)}
    made = {
        n: {
            **rollout_row(t, step, "train", rows[t.row].dataset_prompt, advantage.get(id(t))),
            **(log_probs_of(t.completion) if id(t) in shown else {}),
            **tokens.get(id(t), {}),
        }
        for n, t in own.items()
    }
    return list(made.values()) if world.size == 1 else gather_rows(world, made)
