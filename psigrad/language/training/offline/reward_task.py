"""The tasks of reward models, on comparisons (one score per text) and on labelled steps (one score per step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from psigrad.intervals import mean_interval
from psigrad.language.examples import Pair, Steps
from psigrad.language.models.packing import Groups, Rows, pack_by_tokens
from psigrad.language.models.scalar_model import ScalarModel
from psigrad.language.training.offline.offline import Share, marks_of, sum_terms, terms_of
from psigrad.objective import Loss
from psigrad.objective.preferences.preference_loss import correct
from psigrad.objective.preferences.reward_model import BradleyTerry, calibration, process_loss
from psigrad.processes.parallel.world import ALONE, World, map_shared, num_teams


@dataclass(frozen=True)
class RewardTask:
    """A `Task` that trains with the Bradley–Terry loss on pairs. A pair's prompt is computed once for both answers."""

    model: ScalarModel
    loss: BradleyTerry
    pairs: Sequence[Pair]
    name: str = "reward model"

    def __len__(self) -> int:
        return len(self.pairs)

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens in these rows."""
        return sum(self.pairs[i].tokens for i in rows)

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """Return one loss function per forward pass on these pairs; see `Task`."""
        parts = pack_by_tokens([self.pairs[i].tokens for i in rows], budget, ranks)
        return [partial(self._loss, [rows[k] for k in part], len(rows)) for part in parts]

    def scores(self, rows: Sequence[int]) -> Tensor:
        """Return the scores [n, 2] of the pairs at the indices `rows`: chosen answers in column 0, rejected ones in column 1."""
        picked = [self.pairs[i] for i in rows]
        return self.model.scores(Groups([p.prompt for p in picked], [[p.chosen.ids, p.rejected.ids] for p in picked])).view(-1, 2)

    def _loss(self, rows: Sequence[int], total: int) -> Loss:
        return self._loss_of(self.scores(rows), rows, total)

    def _loss_of(self, scores: Tensor, rows: Sequence[int], total: int) -> Loss:
        margins = [self.pairs[i].margin for i in rows]
        margin = None if all(m is None for m in margins) else torch.tensor([m or 0.0 for m in margins]).to(scores)
        return self.loss.loss(scores[:, 0], scores[:, 1], margin, total)

    def _judge(self, rows: Sequence[int]) -> tuple[dict[str, float], list[float]]:
        """Return (what these pairs add to each loss term, each pair's chosen score minus its rejected score)."""
        scores = self.scores(rows)
        loss = self._loss_of(scores, rows, len(self))
        lead = scores.double()
        return {name: float(term) for name, term in loss.terms.items()}, (lead[:, 0] - lead[:, 1]).tolist()

    def held_out(self, budget: int, world: World = ALONE) -> dict[str, float | str]:
        """Return the loss, the accuracy with its 95 % interval, each pair's result (`marks_of`), and calibration metrics."""
        lead = torch.zeros(len(self), dtype=torch.float64)
        parts = pack_by_tokens([p.tokens for p in self.pairs], budget, num_teams(world))
        found = map_shared(world, parts, self._judge)
        figures = sum_terms(terms for terms, _ in found)
        for part, (_, own) in zip(parts, found, strict=True):
            lead[part] = torch.tensor(own, dtype=torch.float64)
        hits: list[float] = correct(lead, torch.zeros_like(lead)).tolist()
        low, high = mean_interval(hits)
        curve = calibration(lead)
        bins = {f"calibration/{low:.2f}-{low + 0.05:.2f}": a for low, a in zip(curve.lower, curve.accuracy, strict=True)}
        accuracy: dict[str, float | str] = {"accuracy/low": low, "accuracy/high": high, "accuracy/pairs": marks_of(hits)}
        return {**figures, **accuracy, "calibration_error": curve.error, **bins}


@dataclass(frozen=True)
class ProcessRewardTask:
    """A `Task` that trains a process reward model on labelled steps. A step's logit is the value after its last token."""

    model: ScalarModel
    solutions: Sequence[Steps]
    name: str = "process reward model"

    def __len__(self) -> int:
        return len(self.solutions)

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens in these rows."""
        return sum(self.solutions[i].tokens for i in rows)

    def shares(self, rows: Sequence[int], budget: int, ranks: int = 1) -> list[Share]:
        """Return one loss function per forward pass on these solutions; see `Task`."""
        total = sum(len(self.solutions[i].ends) for i in rows)
        parts = pack_by_tokens([self.solutions[i].tokens for i in rows], budget, ranks)
        return [partial(self._loss, [self.solutions[rows[k]] for k in part], total) for part in parts]

    def _loss(self, picked: Sequence[Steps], total: int) -> Loss:
        logits = torch.cat(step_values(self.model, [(s.ids, s.ends) for s in picked]))
        labels = torch.tensor([label for s in picked for label in s.labels]).to(logits)
        return process_loss(logits, labels, total)

    def held_out(self, budget: int, world: World = ALONE) -> dict[str, float]:
        """Return loss and accuracy over the steps of all solutions, in passes of at most `budget` tokens; see `Task`."""
        return sum_terms(map_shared(world, self.shares(range(len(self)), budget, num_teams(world)), terms_of))


def step_values(model: ScalarModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Tensor]:
    """Return one tensor per text (ids, ends): the model's values after the tokens at the indices `ends`."""
    # V "before" the next token is V after this one. A dummy token follows the last and is never computed.
    rows = [[*ids, 0] for ids, _ in texts]
    masks = [[t - 1 in set(ends) for t in range(len(ids) + 1)] for ids, ends in texts]
    values = model.values(Rows(rows, masks))
    return [values[n, torch.tensor(ends, device=values.device) + 1] for n, (_, ends) in enumerate(texts)]
