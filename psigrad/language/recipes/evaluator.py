"""Held-out evaluation: sample, score by a metric that may differ from the reward, and report with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psigrad import seeds
from psigrad.intervals import LEAST_ROWS, detectable_gain, mean_interval, pass_at_k, unbounded_interval
from psigrad.language.data.reward_view import reward_view
from psigrad.language.episodes.players import Player, collector_of
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups
from psigrad.language.rewards import Scorer
from psigrad.language.rollout.collectors import ScoredRollout, rollout_row
from psigrad.language.rollout.exchange import fetch_tokens, gather_rows
from psigrad.language.rollout.types import Prompt, Sampler, SamplingParams, Trajectory
from psigrad.processes.parallel.world import ALONE, World, map_shared, shard
from psigrad.records.rows import PARTS
from psigrad.runs.journal import Journal
from psigrad.step import Clock


@dataclass(frozen=True)
class Evaluator:
    """Held-out prompts, with the settings for sampling completions of them and for scoring the completions.

    With a `reference`, the exact KL(pi‖ref) of each completion is measured too, in nats, summed over its tokens.
    """

    prompts: Sequence[Prompt]
    scorer: Scorer | None
    metric: str
    params: SamplingParams
    seed: int
    num_generations: int = 1
    reference: LanguageModel | None = None
    micro_batch_tokens: int = 16384
    player: Player | None = None
    world: World = ALONE
    skip_special_tokens: bool = True

    def __call__(self, model: LanguageModel, sampler: Sampler, version: int) -> tuple[dict[str, float], list[Trajectory]]:
        """Sample and score the held-out prompts after `version` training steps. Return (the `eval/…` figures, completions)."""
        collector = collector_of(sampler.snapshot(), model, self.player, needs_reward=self.scorer is None)
        view = reward_view(model.tokenizer, collector.plays, self.skip_special_tokens)
        rollout = ScoredRollout(collector, self.scorer, view, self.world)
        # The seeds do not depend on the step, so two evaluations of a run differ only by the policy.
        seed_of = lambda i, k: seeds.derive(self.seed, "eval", self.prompts[i].index, k)  # noqa: E731
        trajectories = rollout(self.prompts, self.params, self.num_generations, seed_of, version)
        figures = figures_of(trajectories, self.num_generations, self.metric)
        if self.reference is not None and (kl := self.kl(model, trajectories)):  # empty completions have no KL
            low, high = unbounded_interval(kl)
            figures["eval/kl"] = math.fsum(kl) / len(kl)
            figures |= {} if math.isnan(low) else {"eval/kl/low": max(0.0, low), "eval/kl/high": high}
        return figures, trajectories

    def record(self, model: LanguageModel, sampler: Sampler, step: int, journal: Journal) -> None:
        """Evaluate after `step` steps and write the figures, the completions and the duration to the run folder."""
        clock = Clock(journal.watch)
        with clock("time/eval"):
            figures, trajectories = self(model, sampler, step)
        if step == 0:
            journal.log_once(
                "detectable_gain", describe_sensitivity(scored_groups(trajectories, self.num_generations), self.metric)
            )
        rows = {p.index: p.row for p in self.prompts}
        own = [(n, t) for n, t in enumerate(trajectories) if t.source_rank == self.world.rank]
        made = {n: rollout_row(t, step, "eval", rows[t.row].dataset_prompt) for n, t in own}
        journal.rollouts(gather_rows(self.world, made))
        journal.metrics(step, figures)
        journal.timings(step, clock.read(), sum(len(t.completion.ids) for t in trajectories))

    @torch.no_grad()
    def kl(self, model: LanguageModel, trajectories: list[Trajectory]) -> list[float]:
        """Return the KL to the reference of each non-empty completion. Each process computes a share, and all get the list."""
        rows = [t for t in trajectories if t.completion.ids]
        longest = max((len(c.prompt_ids) + len(c.ids) for t in rows for c in t.contexts), default=1)
        size = max(1, self.micro_batch_tokens // (longest * max((len(t.contexts) for t in rows), default=1)))

        def of(part: range) -> list[float]:
            pieces = [(rows[n], context) for n in part for context in rows[n].contexts]
            inputs = Groups([context.prompt_ids for _, context in pieces], [[context.ids] for _, context in pieces])
            kl = model.evaluate(inputs, temperature=self.params.temperature or 1.0, kl_to=self.reference).kl
            assert kl is not None
            sums = dict.fromkeys((id(rows[n]) for n in part), 0.0)
            for row, (t, context) in zip(kl, pieces, strict=True):
                mask = t.mask[context.start : context.start + len(context.ids)]
                sums[id(t)] += float((row[: len(mask)][torch.tensor(mask, device=row.device)] if mask else row).sum())
            return list(sums.values())

        parts = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
        shares = [shard(self.world, parts, rank) for rank in range(self.world.size)]
        fetch_tokens(self.world, rows, [[n for part, _ in share for n in part] for share in shares])
        return [value for found in map_shared(self.world, parts, of) for value in found]


def figures_of(trajectories: Sequence[Trajectory], num_generations: int, metric: str) -> dict[str, Any]:
    """Return the `eval/…` figures: the mean of the metric over prompts with its 95 % interval, pass@k, and completion lengths.

    Unscored completions are left out of the metric's mean and pass@k; `eval/unscored` is their number.
    """
    groups = [trajectories[i : i + num_generations] for i in range(0, len(trajectories), num_generations)]
    values = scored_groups(trajectories, num_generations)
    lengths = [t.num_chosen for t in trajectories]
    figures: dict[str, Any] = {"eval/prompts": len(groups), "eval/unscored": sum(t.reward is None for t in trajectories)}
    figures |= _over_prompts(f"eval/{metric}", values)
    if values and num_generations > 1 and all(v in (0.0, 1.0) for group in values for v in group):
        for k in (k for k in (1, 2, 4, 8, 16, 32, 64) if k <= num_generations):
            chances = [pass_at_k(len(group), round(sum(group)), k) for group in values if len(group) >= k]
            figures[f"eval/pass@{k}"] = math.fsum(chances) / len(chances) if chances else math.nan
    names = list(dict.fromkeys(name for t in trajectories for name in t.parts))
    for name in names if len(names) > 1 else ():
        given = [[float(t.parts[name]) for t in group if t.parts.get(name) is not None] for group in groups]
        figures |= _over_prompts(f"{PARTS}{name}", [group for group in given if group])
    figures["eval/completions/mean_length"] = sum(lengths) / len(lengths)
    figures["eval/completions/clipped_ratio"] = sum(t.completion.finish_reason == "length" for t in trajectories) / len(lengths)
    return figures


def scored_groups(trajectories: Sequence[Trajectory], num_generations: int) -> list[list[float]]:
    """Return one list per prompt: the metric of its scored completions. Prompts without a scored completion are dropped."""
    groups = [trajectories[i : i + num_generations] for i in range(0, len(trajectories), num_generations)]
    values = [[t.reward for t in group if t.reward is not None] for group in groups]
    return [group for group in values if group]


def describe_sensitivity(values: Sequence[Sequence[float]], metric: str) -> str:
    """Return a sentence on the smallest detectable gain of `metric`. `values` are each prompt's values before training."""
    means = [math.fsum(group) / len(group) for group in values]
    if len(means) < LEAST_ROWS:
        return f"evaluation: a verdict needs {LEAST_ROWS} scored held-out prompts, not {len(means)}; raise eval_prompts."
    gain, bounded = detectable_gain(means), all(0 <= mean <= 1 for mean in means)
    if bounded and math.fsum(means) / len(means) + gain > 1:
        return f"evaluation: {len(means)} held-out prompts are too few to show even a rise of {metric} to 1; raise eval_prompts."
    return (
        f"evaluation: {len(means)} held-out prompts reveal a gain in {metric} of about {gain:.2g} in four of five runs; more "
        "eval_prompts reveal smaller gains."
    )


def _over_prompts(name: str, values: Sequence[Sequence[float]]) -> dict[str, float]:
    """Average each prompt's `values`, then the prompts. Return `name`/mean and its 95 % interval, `name`/low and `name`/high."""
    if not values:
        return {}
    means = [math.fsum(group) / len(group) for group in values]
    low, high = mean_interval(means)  # of prompts, since completions of one prompt are not independent
    ends = {} if math.isnan(low) else {f"{name}/low": low, f"{name}/high": high}
    return {f"{name}/mean": math.fsum(means) / len(means), **ends}
