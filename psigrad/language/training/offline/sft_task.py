"""Supervised fine-tuning: maximum likelihood of the target tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from psigrad.language.data.batches import pack_by_tokens
from psigrad.language.data.templates import Example
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Rows
from psigrad.language.training.offline.offline import Share
from psigrad.objective import Loss
from psigrad.processes.parallel.world import ALONE, World, each_once


@dataclass(frozen=True)
class SFTTask:
    """Cross-entropy on the tokens of each example's mask.

    Formula: L = −(1/M) Σ log π(a_t|s_t) over the M target tokens of the whole optimiser step
    """

    model: LanguageModel
    examples: Sequence[Example]
    name: str = "SFT"

    def __len__(self) -> int:
        return len(self.examples)

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens in these rows."""
        return sum(len(self.examples[i].ids) for i in rows)

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """One forward pass after the other; see `Task`."""
        picked = [self.examples[i] for i in rows]
        targets = max(1, sum(sum(e.mask) for e in picked))
        parts = pack_by_tokens([len(e.ids) for e in picked], budget, ranks)
        packed = [Rows([picked[i].ids for i in part], [picked[i].mask for i in part]) for part in parts]
        return [partial(self._loss, part, targets) for part in packed]

    def _loss(self, rows: Rows, targets: int) -> Loss:
        stats, _ = self.model.stats(rows, entropy=True, accuracy=True)
        assert stats.entropy is not None and stats.hit is not None
        value = -stats.logp.sum() / targets
        figures = {"loss": value, "entropy": stats.entropy.sum() / targets, "mean_token_accuracy": stats.hit.sum() / targets}
        return Loss(value, {name: figure.detach() for name, figure in figures.items()})

    def held_out(self, budget: int, world: World = ALONE) -> dict[str, float]:
        """Loss, entropy and accuracy on the target tokens of all examples."""
        return sum_terms(each_once(world, self.shares(range(len(self)), budget, world.size), terms_of))


def terms_of(share: Share) -> dict[str, float]:
    """The terms of one share of a loss."""
    return {name: float(term) for name, term in share().terms.items()}


def sum_terms(terms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The terms of several shares, added up."""
    total: dict[str, float] = {}
    for own in terms:
        for name, term in own.items():
            total[name] = total.get(name, 0.0) + term
    return total
