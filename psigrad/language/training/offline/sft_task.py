"""Supervised fine-tuning: maximum likelihood of the target tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from psigrad.language.examples import Example, common_prefix
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.models.packing import Groups, Rows, pack_by_tokens
from psigrad.language.training.offline.offline import Share, sum_terms, terms_of
from psigrad.objective import Loss
from psigrad.processes.parallel.world import ALONE, World, map_shared, num_teams


@dataclass(frozen=True)
class SFTTask:
    """A `Task` for supervised fine-tuning: cross-entropy on the target tokens.

    Formula: L = −(1/M) Σ log π(a_t|s_t) over the M target tokens of the whole optimiser step. With label smoothing ε,
    L = −(1/M) Σ [(1 − ε) log π(a_t|s_t) + ε/V · Σ_v log π(v|s_t)] with v over all V tokens of the vocabulary, as in transformers.

    A row has several examples if a template rewrites earlier turns.
    """

    model: LanguageModel
    rows: Sequence[Sequence[Example]]
    name: str = "SFT"
    label_smoothing: float = 0.0
    """The ε of label smoothing; held-out figures do not use it."""

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens computed for these rows. Tokens shared by the examples of a row count once."""
        return sum(one.tokens for i in rows for one in bundle(self.rows[i]))

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """Return one loss function per forward pass on these rows; see `Task`."""
        bundles = [bundle(self.rows[i]) for i in rows]
        targets = max(1, sum(sum(text.mask) for own in bundles for one in own for text in one.texts))
        parts = pack_by_tokens([sum(one.tokens for one in own) for own in bundles], budget, ranks)
        packed = [_pack([one for place in part for one in bundles[place]]) for part in parts]
        return [partial(self._loss, part, targets) for part in packed]

    def _loss(self, rows: Rows | Groups, targets: int) -> Loss:
        epsilon = self.label_smoothing
        stats, _ = self.model.stats(rows, entropy="figure", accuracy=True, mean_logp=epsilon > 0)
        assert stats.entropy is not None and stats.hit is not None
        value = -stats.logp.sum() / targets
        if stats.mean_logp is not None:
            value = (1 - epsilon) * value - epsilon * stats.mean_logp.sum() / targets
        figures = {"loss": value, "entropy": stats.entropy.sum() / targets, "mean_token_accuracy": stats.hit.sum() / targets}
        return Loss(value, {name: figure.detach() for name, figure in figures.items()})

    def held_out(self, budget: int, world: World = ALONE) -> dict[str, float]:
        """Return loss, entropy and accuracy on the target tokens of all examples; see `Task`."""
        return sum_terms(map_shared(world, self.shares(range(len(self)), budget, num_teams(world)), terms_of))


@dataclass(frozen=True)
class Bundle:
    """Examples of a row that begin alike: `texts[i]` begins with the first `starts[i]` tokens of `trunk`."""

    trunk: Sequence[int]
    texts: Sequence[Example]
    starts: Sequence[int]

    @property
    def tokens(self) -> int:
        """The number of tokens that a forward pass over `texts` computes. Tokens of `trunk` count once."""
        return len(self.trunk) + sum(len(text.ids) - start for text, start in zip(self.texts, self.starts, strict=True))


def bundle(texts: Sequence[Example]) -> list[Bundle]:
    """Split a row's examples into bundles of consecutive examples, so that as few tokens as possible are computed."""
    best: list[tuple[int, list[Bundle]]] = [(0, [])]
    for end in range(1, len(texts) + 1):
        found = []
        for begin in range(end):
            one = _branch(texts[begin:end])
            if all(one.starts):  # texts without a common start are separate
                found.append((best[begin][0] + one.tokens, [*best[begin][1], one]))
        best.append(min(found, key=lambda pair: pair[0]))
    return best[-1][1]


def _branch(texts: Sequence[Example]) -> Bundle:
    """Return one bundle of these examples. Its trunk is the last example up to its first target token."""
    contexts = [text.ids[: text.mask.index(True)] if any(text.mask) else text.ids for text in texts]
    starts = [common_prefix(context, contexts[-1]) for context in contexts]
    return Bundle(contexts[-1], texts, starts)


def _pack(bundles: Sequence[Bundle]) -> Rows | Groups:
    """Return each bundle as a group whose prompt is the trunk. If every bundle has one text, return independent rows instead."""
    if all(len(one.texts) == 1 for one in bundles):
        texts = [text for one in bundles for text in one.texts]
        return Rows([text.ids for text in texts], [text.mask for text in texts])
    return Groups(
        [one.trunk for one in bundles],
        [[text.ids[start:] for text, start in zip(one.texts, one.starts, strict=True)] for one in bundles],
        [[text.mask[start:] for text, start in zip(one.texts, one.starts, strict=True)] for one in bundles],
        [one.starts for one in bundles],
    )
