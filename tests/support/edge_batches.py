"""Small batches for the edges of the algebra."""

from __future__ import annotations

import torch

from psigrad.objective import Batch, terminal


def batch(reward, logp_old, dtype=torch.float32, group=None, **given) -> Batch:
    logp_old = torch.as_tensor(logp_old, dtype=dtype)
    mask = torch.ones(logp_old.shape, dtype=torch.bool)
    reward = terminal(torch.tensor(reward, dtype=dtype), mask)
    return Batch(mask, reward, logp_old, torch.tensor(group or [0] * len(logp_old)), **given)


def rows(mask, logp_old=None, group=None, reward=None, **given) -> Batch:
    mask = torch.tensor(mask, dtype=torch.bool)
    logp_old = torch.full(mask.shape, -1.0) if logp_old is None else torch.tensor(logp_old)
    reward = torch.zeros(mask.shape) if reward is None else torch.tensor(reward)
    return Batch(mask, reward, logp_old, torch.tensor(group or [0] * len(mask)), **given)
