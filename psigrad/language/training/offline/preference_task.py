"""The preference family: DPO and its relatives on pairs, KTO on completions without a partner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from psigrad.errors import UserError
from psigrad.intervals import mean_interval
from psigrad.language.data.pairs import Answer, Judged, Pair, pair_of
from psigrad.language.data.templates import Example
from psigrad.language.models.experts import balanced
from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups, Ids, pack_by_tokens
from psigrad.language.rollout.spread import bring
from psigrad.language.rollout.types import Trajectory
from psigrad.language.training.learners import State
from psigrad.language.training.offline.offline import Share
from psigrad.language.training.offline.sft_task import sum_terms, terms_of
from psigrad.language.training.online.figures import Outcome, Tally
from psigrad.language.training.online.online_run import Online, minibatches
from psigrad.objective import Loss
from psigrad.objective.preferences.preference_loss import KahnemanTversky, Labelled, Pairs, Preference, kl_of_mismatched
from psigrad.optim import step_together
from psigrad.processes.parallel.world import ALONE, World, each_once, shard, shares_of


def answer_logps(
    model: LanguageModel, prompts: Sequence[Ids], answers: Sequence[Sequence[Answer]], cache: ActivationCache | None = None
) -> tuple[Tensor, Tensor]:
    """([N] log π of every answer, summed over the tokens of its mask; [N] number of those tokens)."""
    texts = [[text for answer in group for text in answer.texts] for group in answers]
    logp = model.evaluate(Groups(prompts, [[text.ids for text in group] for group in texts]), cache=cache).logp
    mask = torch.zeros(logp.shape, dtype=torch.bool)
    for n, text in enumerate(text for group in texts for text in group):
        mask[n, : len(text.mask)] = torch.tensor(text.mask)
    mask = mask.to(logp.device)
    summed, count = torch.where(mask, logp, 0.0).sum(1), mask.sum(1)
    if len(counts := [len(answer.texts) for group in answers for answer in group]) == len(summed):
        return summed, count
    # the turns of an answer, each in a context of its own
    of = torch.arange(len(counts), device=logp.device).repeat_interleave(torch.tensor(counts, device=logp.device))
    return tuple(x.new_zeros(len(counts)).index_add(0, of, x) for x in (summed, count))  # type: ignore[return-value]


@torch.no_grad()
def reference_logps(
    model: LanguageModel, prompts: Sequence[Ids], answers: Sequence[Sequence[Answer]], budget: int, world: World = ALONE
) -> list[list[float]]:
    """log π_ref of every answer of every prompt; a LoRA model is its own reference, without its adapter."""
    found: list[list[float]] = [[] for _ in prompts]
    sizes = [len(p) + sum(a.tokens for a in group) for p, group in zip(prompts, answers, strict=True)]
    for part, _ in shard(world, pack_by_tokens(sizes, budget, shares_of(world))):
        with model.without_adapter() if model.is_own_reference else torch.no_grad():
            logp, _ = answer_logps(model, [prompts[i] for i in part], [answers[i] for i in part])
        values = iter(logp.tolist())
        for i in part:
            found[i] = [next(values) for _ in answers[i]]
    each = world.all_gather(found)
    return [next(own for own in several if own) for several in zip(*each, strict=True)]


@dataclass(frozen=True)
class PreferenceTask:
    """A `Preference` loss on pairs; `reference` holds (chosen, rejected) log-probs where the loss reads them.

    `cache` holds what sampling has computed of them, where the model itself wrote them.
    """

    model: LanguageModel
    loss: Preference
    pairs: Sequence[Pair]
    reference: Sequence[Sequence[float]] | None = None
    cache: ActivationCache | None = None

    @property
    def name(self) -> str:
        """The loss's name."""
        return self.loss.name or "preference"

    def __len__(self) -> int:
        return len(self.pairs)

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens in these rows."""
        return sum(self.pairs[i].tokens for i in rows)

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """See `Task`."""
        targets = sum(self.pairs[i].chosen.targets for i in rows)
        parts = pack_by_tokens([self.pairs[i].tokens for i in rows], budget, ranks)
        return [partial(self._loss, [rows[k] for k in part], len(rows), targets) for part in parts]

    def evaluate(self, rows: Sequence[int]) -> Pairs:
        """These pairs under the model as it is now."""
        picked = [self.pairs[i] for i in rows]
        answers = [[p.chosen, p.rejected] for p in picked]
        logp, tokens = answer_logps(self.model, [p.prompt for p in picked], answers, self.cache)
        margins = [p.margin for p in picked]
        ref = None if self.reference is None else torch.tensor([self.reference[i] for i in rows]).to(logp)
        return Pairs(
            logp_chosen=logp[0::2],
            logp_rejected=logp[1::2],
            tokens_chosen=tokens[0::2],
            tokens_rejected=tokens[1::2],
            ref_chosen=None if ref is None else ref[:, 0],
            ref_rejected=None if ref is None else ref[:, 1],
            margin=None if all(m is None for m in margins) else torch.tensor([m or 0.0 for m in margins]).to(logp),
        )

    def _loss(self, rows: Sequence[int], total: int, targets: int) -> Loss:
        return self.loss.loss(self.evaluate(rows), total, targets)

    def held_out(self, budget: int, world: World = ALONE) -> dict[str, float]:
        """Loss and rewards over all pairs; accuracy with its 95 % interval."""
        targets = sum(p.chosen.targets for p in self.pairs)
        parts = pack_by_tokens([p.tokens for p in self.pairs], budget, shares_of(world))
        found = each_once(world, parts, partial(self._judge, targets))
        low, high = mean_interval([hit for _, hits in found for hit in hits])
        return {**sum_terms(terms for terms, _ in found), "rewards/accuracies/low": low, "rewards/accuracies/high": high}

    def _judge(self, targets: int, rows: Sequence[int]) -> tuple[dict[str, float], list[float]]:
        """The terms of the loss on these rows, and whether each pair is told apart."""
        evaluated = self.evaluate(rows)
        terms = self.loss.loss(evaluated, len(self), targets).terms
        return {name: float(term) for name, term in terms.items()}, self.loss.correct(evaluated).tolist()


@dataclass(frozen=True)
class KTOTask:
    """KTO. `reference` holds per row the log-probs of its answer and of the answer that it is mismatched with."""

    model: LanguageModel
    loss: KahnemanTversky
    rows: Sequence[Judged]
    reference: Sequence[Sequence[float]]

    @property
    def name(self) -> str:
        """The loss's name."""
        return self.loss.name

    @cached_property
    def _mismatched(self) -> list[Answer]:
        return mismatch(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens in these rows."""
        return sum(self.rows[i].tokens for i in rows)

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """See `Task`. The KL estimate is of the whole step: a pass without gradient over mismatched answers comes first."""
        return self._shares(rows, budget, ALONE, ranks)

    def _shares(self, rows: Sequence[int], budget: int, world: World, ranks: int = 0) -> list[Share]:
        desirable = sum(self.rows[i].desirable for i in rows)
        z = self._z(rows, budget, world)
        parts = pack_by_tokens([self.rows[i].tokens for i in rows], budget, ranks or shares_of(world))
        return [partial(self._loss, [rows[k] for k in part], z, len(rows), desirable) for part in parts]

    @torch.no_grad()
    def _z(self, rows: Sequence[int], budget: int, world: World) -> Tensor:
        """z of the step from every row's prompt with the answer of `mismatch`."""
        others = [self._mismatched[i] for i in rows]
        sizes = [len(self.rows[i].prompt) + a.tokens for i, a in zip(rows, others, strict=True)]
        logps, parts = torch.zeros(len(rows)), pack_by_tokens(sizes, budget, shares_of(world))

        def of(part: list[int]) -> list[float]:
            prompts = [self.rows[rows[k]].prompt for k in part]
            return answer_logps(self.model, prompts, [[others[k]] for k in part])[0].float().tolist()

        for part, found in zip(parts, each_once(world, parts, of), strict=True):
            logps[part] = torch.tensor(found)
        return kl_of_mismatched(logps, torch.tensor([self.reference[i][1] for i in rows])).to(self.model.device)

    def _loss(self, rows: Sequence[int], z: Tensor, total: int, desirable: int) -> Loss:
        picked = [self.rows[i] for i in rows]
        logp, _ = answer_logps(self.model, [r.prompt for r in picked], [[r.answer] for r in picked])
        ref = torch.tensor([self.reference[i][0] for i in rows]).to(logp)
        good = torch.tensor([r.desirable for r in picked], device=logp.device)
        return self.loss.loss(Labelled(logp, ref, good, z), total, desirable)

    def held_out(self, budget: int, world: World = ALONE) -> dict[str, float]:
        """Loss and rewards over all rows."""
        return sum_terms(each_once(world, self._shares(range(len(self)), budget, world), terms_of))


def mismatch(rows: Sequence[Judged]) -> list[Answer]:
    """The answer that each row is mismatched with: that of the last row before it with another prompt, as in TRL. Before the
    first row stands the last. A row without another prompt keeps its own.
    """
    found, other = list(rows), None
    for i in range(1 - len(rows), len(rows)):  # once around, so that the first row knows what stands before it
        if rows[i].prompt != rows[i - 1].prompt:
            other = rows[i - 1]
        found[i] = rows[i] if other is None else other
    return [row.answer for row in found]


@dataclass(frozen=True)
class Pick:
    """The pairs of a collection: places of the chosen and the rejected among all rows."""

    pairs: list[Pair]
    chosen: list[int]
    rejected: list[int]
    rows: int


def pick(groups: Sequence[Sequence[Trajectory]], world: World = ALONE) -> Pick:
    """The earliest best and the earliest worst of every group that has both."""
    rows = [t for group in groups for t in group]
    chosen, rejected, first = [], [], 0
    for group in groups:
        rewards = [t.reward or 0.0 for t in group]
        best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
        if rewards[best] > rewards[worst]:
            chosen.append(first + best)
            rejected.append(first + worst)
        first += len(group)
    bring(world, rows, [[*chosen, *rejected]] * world.size)
    pairs = [pair_of(_texts(rows[best]), _texts(rows[worst])) for best, worst in zip(chosen, rejected, strict=True)]
    return Pick(pairs, chosen, rejected, first)


def _texts(trajectory: Trajectory) -> list[Example]:
    """What was sampled, each piece behind what it was sampled behind."""
    mask = trajectory.mask or (True,) * len(trajectory.completion.ids)
    return [
        Example([*prompt, *ids], [False] * len(prompt) + list(mask[start : start + len(ids)]), False)
        for start, prompt, ids in trajectory.contexts
    ]


def learn_preferences(
    run: Online,
    loss: Preference,
    groups: Sequence[Sequence[Trajectory]],
    state: State,
    lr: float,
    cache: ActivationCache | None,
) -> Outcome:
    """All optimiser steps on one collection by a preference loss on the best and the worst of each group. A group of equal
    rewards is left out.

    Source: Guo et al. 2024, Direct language model alignment from online AI feedback, arXiv:2402.04792.
    """
    config, world = run.config, run.world
    picked, tally = pick(groups, world), Tally(world=world)
    logps_ref = None
    if loss.needs_reference and picked.pairs:
        if not isinstance(run.reference, LanguageModel):
            raise UserError(f"{loss.name} needs a reference model, and none was loaded.")
        answers = [[p.chosen, p.rejected] for p in picked.pairs]
        logps_ref = reference_logps(run.reference, [p.prompt for p in picked.pairs], answers, config.micro_batch_tokens, world)
    task = PreferenceTask(run.model, loss, picked.pairs, logps_ref, cache)
    for iteration in range(config.num_iterations):
        for rows in minibatches(len(picked.pairs), config.num_minibatches, config.run.seed, state.step, iteration):
            tally.steps += 1
            whole = task.shares(rows.tolist(), config.micro_batch_tokens, shares_of(world))
            shares = shard(world, [partial(balanced, run.model, share, len(whole)) for share in whole])
            tally.end_step(step_together([(run.optimizer, lr)], [partial(tally.of, share, weight) for share, weight in shares]))
    signs = torch.zeros(picked.rows)
    signs[picked.chosen], signs[picked.rejected] = 1.0, -1.0
    metrics = {**(tally.result() if tally.steps else {"updates": 0}), "pairs": len(picked.pairs)}
    return Outcome(metrics, dict(state.algorithm), signs.tolist())
