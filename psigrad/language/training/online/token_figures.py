"""What one update saw token by token, for rollouts.jsonl: people look at it, nothing is computed from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psigrad.language.rollout.types import Completion
from psigrad.objective import PolicyOutputs, Prepared
from psigrad.processes.parallel.world import World

DIGITS = 4


class TokenFigures:
    """Log-probs and entropies of the last forward pass over each of the first `rows` rows of a batch.

    [rows, T], NaN where no pass was made.
    """

    def __init__(self, rows: int, prepared: Prepared) -> None:
        self.prepared, self.count = prepared, min(rows, prepared.batch.mask.shape[0])
        shape = (self.count, prepared.batch.mask.shape[1])
        self.logp, self.entropy = torch.full(shape, math.nan), torch.full(shape, math.nan)

    def see(self, rows: Tensor, evaluation: PolicyOutputs) -> None:
        """Keep what a pass over these rows of the batch found."""
        wanted = rows.cpu() < self.count
        if not bool(wanted.any()):
            return
        picked = rows.cpu()[wanted]
        self.logp[picked] = evaluation.logp.detach().float().cpu()[wanted]
        if evaluation.entropy is not None:
            self.entropy[picked] = evaluation.entropy.detach().float().cpu()[wanted]

    def joined(self, world: World) -> TokenFigures:
        """These figures with those that other processes have seen."""
        for logp, entropy in world.all_gather((self.logp, self.entropy)):
            self.logp = torch.where(logp.isnan(), self.logp, logp)
            self.entropy = torch.where(entropy.isnan(), self.entropy, entropy)
        return self

    def rows(self) -> list[dict[str, Any]]:
        """Columns of rollouts.jsonl for every row of the batch: `kept` False where a filter left it out, and for the first rows
        what is known of each token up to the last that the policy chose, 0 for those that it did not choose.

        `trained_logprobs` under the policy of the last pass over the row, before its step; `ref_logprobs` under the reference;
        `entropy` exact, in nats; `advantages` where they differ between tokens.
        """
        rows: list[dict[str, Any]] = [{} if keep else {"kept": False} for keep in self.prepared.keep.tolist()]
        batch, advantage = self.prepared.batch, self.prepared.advantage
        chosen = batch.mask[: self.count].cpu().numpy()
        columns = {
            "trained_logprobs": self.logp,
            "ref_logprobs": batch.logp_ref,
            "entropy": self.entropy,
            "advantages": advantage,
        }
        tables = {name: x[: self.count].detach().double().cpu().numpy() for name, x in columns.items() if x is not None}
        for n, mask in enumerate(chosen):
            length = int(mask.nonzero()[0].max(initial=-1)) + 1
            for name, table in tables.items():
                values = table[n][mask]
                alike = name == "advantages" and not (values != values[:1]).any()
                if length and not alike and not np.isnan(values).any():
                    rows[n][name] = rounded(np.where(mask, table[n], 0.0)[:length].tolist())
        return rows


def log_probs_of(completion: Completion) -> dict[str, list[float]]:
    """`logprobs` under the policy that sampled; `sampling_logprobs` where top-k and the like made another distribution of it."""
    same = completion.logprobs == completion.sampling_logprobs
    sampling = {} if same else {"sampling_logprobs": rounded(completion.sampling_logprobs)}
    return {"logprobs": rounded(completion.logprobs), **sampling}


def rounded(values: Sequence[float]) -> list[float]:
    """What people read of figures per token."""
    return [round(float(value), DIGITS) for value in values]
