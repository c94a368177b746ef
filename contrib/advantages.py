"""Advantages: functions of a batch, for `algorithm.psi=contrib/advantages.py:NAME`."""

from __future__ import annotations

import torch
from torch import Tensor

from psigrad.objective import Batch
from psigrad.objective.parts.advantage import over_steps

__all__ = ["group_rank"]


def group_rank(batch: Batch) -> Tensor:
    """The share of the group's other completions that a completion beats, minus the share that beat it: between −1 and 1.

    Only the order of the rewards counts. A single outlier therefore does not dominate its group.

    Formula: A_i = 1/(G−1) · Σ_{j≠i} sign(R_i − R_j)

    Source: rank-based fitness shaping, Wierstra et al. 2014, arXiv:1106.4487, applied here within a group.
    """
    reward_N = batch.sequence_reward
    same_NN = batch.group[:, None] == batch.group[None, :]
    beaten_N = (torch.sign(reward_N[:, None] - reward_N[None, :]) * same_NN).sum(1)
    return over_steps(beaten_N / (same_NN.sum(1) - 1).clamp(min=1), batch)
