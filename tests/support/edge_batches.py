"""Small batches for the edges of the algebra."""

from __future__ import annotations

import torch

from psigrad.objective import Batch, PolicyOutputs, terminal


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


def gradient(method, rows: Batch, logp: torch.Tensor) -> torch.Tensor:
    leaf = logp.clone().requires_grad_()
    prepared = method.prepare(rows, method.initial_state())
    method.loss(prepared, PolicyOutputs(leaf), method.totals(prepared), prepared.state).value.backward()
    return leaf.grad


def world(rows: int = 6, width: int = 20, seed: int = 0) -> tuple[Batch, torch.Tensor]:
    """Rows of all lengths up to `width`, more than the 16 steps that take another path, and log-probs of a policy that moved."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(rows, width, generator=random, dtype=torch.float64)  # noqa: E731
    lengths = torch.randint(1, width + 1, (rows,), generator=random)
    lengths[0] = width
    mask = torch.arange(width) < lengths[:, None]
    old = -draw().abs()
    given = {"value": draw(), "logp_sampler": old + 0.1 * draw(), "logp_ref": old + 0.3 * draw()}
    return Batch(mask, draw(), old, torch.arange(rows) // 3, **given), old + 0.2 * draw()


def outcomes(rewards, steps=2, **given) -> Batch:
    """One group, each row with its reward on its last step."""
    mask = torch.ones(len(rewards), steps, dtype=torch.bool)
    old = given.pop("logp_old", torch.full(mask.shape, -1.0))
    return Batch(mask, terminal(torch.tensor(rewards), mask), old, torch.zeros(len(rewards)).long(), **given)
