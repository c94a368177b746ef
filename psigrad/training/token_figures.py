"""What one update saw token by token, for rollouts.jsonl: people look at it, nothing is computed from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from psigrad.objective import Evaluation, Prepared
from psigrad.rollout.types import Completion

DIGITS = 4


class TokenFigures:
    """Log-probs and entropies of the last forward pass over each of the first `rows` rows of a batch.

    [rows, T], NaN where no pass was made.
    """

    def __init__(self, rows: int, prepared: Prepared) -> None:
        self.prepared, self.count = prepared, min(rows, prepared.batch.mask.shape[0])
        shape = (self.count, prepared.batch.mask.shape[1])
        self.logp, self.entropy = torch.full(shape, math.nan), torch.full(shape, math.nan)

    def see(self, rows: Tensor, evaluation: Evaluation) -> None:
        """Keep what a pass over these rows of the batch found."""
        wanted = rows.cpu() < self.count
        if not bool(wanted.any()):
            return
        picked = rows.cpu()[wanted]
        self.logp[picked] = evaluation.logp.detach().float().cpu()[wanted]
        if evaluation.entropy is not None:
            self.entropy[picked] = evaluation.entropy.detach().float().cpu()[wanted]

    def rows(self) -> list[dict[str, Any]]:
        """Columns of rollouts.jsonl for every row of the batch: `kept` False where a filter left it out, and for the first rows
        what is known of each token.

        `trained_logprobs` under the policy of the last pass over the row, before its step; `ref_logprobs` under the reference;
        `entropy` exact, in nats; `advantages` where they differ between tokens.
        """
        kept: list[dict[str, Any]] = [{} if keep else {"kept": False} for keep in self.prepared.keep.tolist()]
        return [{**own, **self._tokens(n)} if n < self.count else own for n, own in enumerate(kept)]

    def _tokens(self, n: int) -> dict[str, list[float]]:
        batch = self.prepared.batch
        mask = batch.mask[n]
        return {
            **_column("trained_logprobs", self.logp[n], mask),
            **({} if batch.logp_ref is None else _column("ref_logprobs", batch.logp_ref[n], mask)),
            **_column("entropy", self.entropy[n], mask),
            **_varying("advantages", self.prepared.advantage[n], mask),
        }


def log_probs_of(completion: Completion) -> dict[str, list[float]]:
    """`logprobs` under the policy that sampled; `sampling_logprobs` where top-k and the like made another distribution of it."""
    same = completion.logprobs == completion.sampling_logprobs
    sampling = {} if same else {"sampling_logprobs": rounded(completion.sampling_logprobs)}
    return {"logprobs": rounded(completion.logprobs), **sampling}


def rounded(values: Sequence[float]) -> list[float]:
    """What people read of figures per token."""
    return [round(float(value), DIGITS) for value in values]


def _column(name: str, values: Tensor, mask: Tensor) -> dict[str, list[float]]:
    """The values up to the last chosen token, 0 on those that the policy did not choose; nothing where one is unknown."""
    mask = mask.cpu()
    length = int(mask.nonzero().max()) + 1 if bool(mask.any()) else 0
    chosen = torch.where(mask, values.detach().float().cpu(), torch.zeros(()))[:length]
    return {} if length == 0 or bool(chosen.isnan().any()) else {name: rounded(chosen.tolist())}


def _varying(name: str, values: Tensor, mask: Tensor) -> dict[str, list[float]]:
    chosen = values[mask]
    return _column(name, values, mask) if chosen.numel() and bool((chosen != chosen[0]).any()) else {}
