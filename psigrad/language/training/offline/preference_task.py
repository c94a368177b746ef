"""Preference tasks: DPO and its variants on pairs, KTO on single completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from psigrad.intervals import mean_interval
from psigrad.language.examples import Answer, LabelledAnswer, Pair
from psigrad.language.models.fused.caches import ActivationCache
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups, Ids, pack_by_tokens
from psigrad.language.training.loss_sums import to_host
from psigrad.language.training.offline.offline import Share, marks_of, sum_terms, terms_of
from psigrad.objective import Loss
from psigrad.objective.batch import copy_to
from psigrad.objective.preferences.preference_loss import KahnemanTversky, Labelled, Pairs, Preference, kl_of_mismatched
from psigrad.processes.parallel.world import ALONE, World, map_shared, num_teams, shard


def answer_logps(
    model: LanguageModel, prompts: Sequence[Ids], answers: Sequence[Sequence[Answer]], cache: ActivationCache | None = None
) -> tuple[Tensor, Tensor]:
    """Return each answer's (sum of target log-probs, number of targets) as tensors [N]. `cache` may have activations to reuse."""
    texts = [[text for answer in group for text in answer.texts] for group in answers]
    logp = model.evaluate(Groups(prompts, [[text.ids for text in group] for group in texts]), cache=cache).logp
    mask = torch.zeros(logp.shape, dtype=torch.bool)
    for n, text in enumerate(text for group in texts for text in group):
        mask[n, : len(text.mask)] = torch.tensor(text.mask)
    mask = copy_to(mask, logp.device)
    summed, count = torch.where(mask, logp, 0.0).sum(1), mask.sum(1)
    if len(counts := [len(answer.texts) for group in answers for answer in group]) == len(summed):
        return summed, count
    # Sum over the turns of an answer, each of which has its own context.
    of = copy_to(torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)), logp.device)
    return tuple(x.new_zeros(len(counts)).index_add(0, of, x) for x in (summed, count))  # type: ignore[return-value]


@torch.no_grad()
def reference_logps(
    model: LanguageModel, prompts: Sequence[Ids], answers: Sequence[Sequence[Answer]], budget: int, world: World = ALONE
) -> list[list[float]]:
    """Return log π_ref of every answer, summed over its target tokens, as one list per prompt.

    A forward pass has at most `budget` tokens.
    """
    found: list[list[float]] = [[] for _ in prompts]
    sizes = [len(p) + sum(a.tokens for a in group) for p, group in zip(prompts, answers, strict=True)]
    parts = [part for part, _ in shard(world, pack_by_tokens(sizes, budget, num_teams(world)))]
    with model.without_adapter() if model.is_own_reference else torch.no_grad():
        logps = [answer_logps(model, [prompts[i] for i in part], [answers[i] for i in part])[0] for part in parts]
    for part, logp in zip(parts, to_host(logps), strict=True):
        values = iter(logp.tolist())
        for i in part:
            found[i] = [next(values) for _ in answers[i]]
    each = world.all_gather(found)
    return [next(own for own in several if own) for several in zip(*each, strict=True)]


@dataclass(frozen=True)
class PreferenceTask:
    """A `Task` that trains with a `Preference` loss on pairs.

    `reference` has the reference model's log-probs of each pair (chosen, rejected), if the loss needs them.
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
        """Return the number of tokens in these rows."""
        return sum(self.pairs[i].tokens for i in rows)

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """Return one loss function per forward pass on these pairs; see `Task`."""
        targets = sum(self.pairs[i].chosen.targets for i in rows)
        parts = pack_by_tokens([self.pairs[i].tokens for i in rows], budget, ranks)
        return [partial(self._loss, [rows[k] for k in part], len(rows), targets) for part in parts]

    def evaluate(self, rows: Sequence[int]) -> Pairs:
        """Return the log-probs of these pairs under the current model and the reference, with their margins."""
        picked = [self.pairs[i] for i in rows]
        answers = [[p.chosen, p.rejected] for p in picked]
        logp, tokens = answer_logps(self.model, [p.prompt for p in picked], answers, self.cache)
        margins = [p.margin for p in picked]

        def there(values: Sequence[object]) -> Tensor:
            return copy_to(torch.tensor(values).to(logp.dtype), logp.device)

        ref = None if self.reference is None else there([self.reference[i] for i in rows])
        return Pairs(
            logp_chosen=logp[0::2],
            logp_rejected=logp[1::2],
            tokens_chosen=tokens[0::2],
            tokens_rejected=tokens[1::2],
            ref_chosen=None if ref is None else ref[:, 0],
            ref_rejected=None if ref is None else ref[:, 1],
            margin=None if all(m is None for m in margins) else there([m or 0.0 for m in margins]),
        )

    def _loss(self, rows: Sequence[int], total: int, targets: int) -> Loss:
        return self.loss.loss(self.evaluate(rows), total, targets)

    def held_out(self, budget: int, world: World = ALONE) -> dict[str, float | str]:
        """Return the mean loss, rewards and accuracy, the accuracy's 95 % interval, and each pair's result (`marks_of`)."""
        targets = sum(p.chosen.targets for p in self.pairs)
        parts = pack_by_tokens([p.tokens for p in self.pairs], budget, num_teams(world))
        found = map_shared(world, parts, partial(self._judge, targets))
        hits = {row: hit for part, (_, own) in zip(parts, found, strict=True) for row, hit in zip(part, own, strict=True)}
        low, high = mean_interval([*hits.values()])
        more: dict[str, float | str] = {"low": low, "high": high, "pairs": marks_of(hits[row] for row in sorted(hits))}
        return {**sum_terms(terms for terms, _ in found), **{f"rewards/accuracies/{name}": value for name, value in more.items()}}

    def _judge(self, targets: int, rows: Sequence[int]) -> tuple[dict[str, float], list[float]]:
        """Return (what these pairs add to each loss term, one hit per pair: 1 if ranked correctly, ½ for a tie, otherwise 0)."""
        evaluated = self.evaluate(rows)
        terms = self.loss.loss(evaluated, len(self), targets).terms
        return {name: float(term) for name, term in terms.items()}, self.loss.correct(evaluated).tolist()


@dataclass(frozen=True)
class KTOTask:
    """A `Task` that trains with the KTO loss on rows labelled good or bad.

    `reference` has, for each row, the reference model's log-probs of its own answer and of a mismatched answer (`mismatch`).
    """

    model: LanguageModel
    loss: KahnemanTversky
    rows: Sequence[LabelledAnswer]
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
        """Return the number of tokens in these rows."""
        return sum(self.rows[i].tokens for i in rows)

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """Return one loss function per forward pass on these rows; see `Task`. All functions use the same KL estimate."""
        return self._shares(rows, budget, ALONE, ranks)

    def _shares(self, rows: Sequence[int], budget: int, world: World, ranks: int = 0) -> list[Share]:
        desirable = sum(self.rows[i].desirable for i in rows)
        z = self._z(rows, budget, world)
        parts = pack_by_tokens([self.rows[i].tokens for i in rows], budget, ranks or num_teams(world))
        return [partial(self._loss, [rows[k] for k in part], z, len(rows), desirable) for part in parts]

    @torch.no_grad()
    def _z(self, rows: Sequence[int], budget: int, world: World) -> Tensor:
        """Return z, KTO's estimate of the KL, from the mismatched answers of these rows. A pass has at most `budget` tokens."""
        others = [self._mismatched[i] for i in rows]
        sizes = [len(self.rows[i].prompt) + a.tokens for i, a in zip(rows, others, strict=True)]
        logps, parts = torch.zeros(len(rows)), pack_by_tokens(sizes, budget, num_teams(world))

        def of(part: list[int]) -> list[float]:
            prompts = [self.rows[rows[k]].prompt for k in part]
            return answer_logps(self.model, prompts, [[others[k]] for k in part])[0].float().tolist()

        for part, found in zip(parts, map_shared(world, parts, of), strict=True):
            logps[part] = torch.tensor(found)
        return kl_of_mismatched(logps, torch.tensor([self.reference[i][1] for i in rows])).to(self.model.device)

    def _loss(self, rows: Sequence[int], z: Tensor, total: int, desirable: int) -> Loss:
        picked = [self.rows[i] for i in rows]
        logp, _ = answer_logps(self.model, [r.prompt for r in picked], [[r.answer] for r in picked])
        ref = torch.tensor([self.reference[i][0] for i in rows]).to(logp)
        good = torch.tensor([r.desirable for r in picked], device=logp.device)
        return self.loss.loss(Labelled(logp, ref, good, z), total, desirable)

    def held_out(self, budget: int, world: World = ALONE) -> dict[str, float]:
        """Return the mean loss and rewards over all rows; see `Task`."""
        return sum_terms(map_shared(world, self._shares(range(len(self)), budget, world), terms_of))


def mismatch(rows: Sequence[LabelledAnswer]) -> list[Answer]:
    """Return a mismatched answer for each row: the answer of the nearest earlier row with a different prompt, as in TRL."""
    found, other = list(rows), None
    for i in range(1 - len(rows), len(rows)):  # start one round earlier, so that the first row has a predecessor
        if rows[i].prompt != rows[i - 1].prompt:
            other = rows[i - 1]
        found[i] = rows[i] if other is None else other
    return [row.answer for row in found]
