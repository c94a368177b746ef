"""Statistics over rows of a group and over chosen steps.

Group functions take and return [N]: each row gets its own group's figure. Groups may have any size, any row order, any ids.
"""

from __future__ import annotations

from psigrad.objective.lazy_torch import Tensor, torch

__all__ = [
    "all_equal",
    "centred",
    "explained_variance",
    "group_max",
    "group_min",
    "group_size",
    "group_std",
    "group_sum",
    "masked_mean",
    "rank_in_group",
    "scrambled",
    "step_covariance",
]


def _index(group_N: Tensor) -> tuple[Tensor, int]:
    ids, index_N = torch.unique(group_N, return_inverse=True)
    return index_N, len(ids)


def group_sum(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Σ of x over the row's group."""
    index_N, n_groups = _index(group_N)
    return torch.zeros(n_groups, dtype=x_N.dtype, device=x_N.device).index_add(0, index_N, x_N)[index_N]


def group_size(group_N: Tensor) -> Tensor:
    """Number of rows in the row's group, int64."""
    return group_sum(torch.ones_like(group_N), group_N)


def group_min(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Least x in the row's group."""
    index_N, n_groups = _index(group_N)
    empty = torch.zeros(n_groups, dtype=x_N.dtype, device=x_N.device)
    return empty.scatter_reduce(0, index_N, x_N, "amin", include_self=False)[index_N]


def group_max(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Greatest x in the row's group."""
    return -group_min(-x_N, group_N)


def all_equal(x_N: Tensor, group_N: Tensor) -> Tensor:
    """[N] bool: every x of the row's group is the same number, exactly.

    A test of `std == 0` fails here: the float mean of eight times 0.1 is not 0.1, so the std is not 0.
    """
    return group_min(x_N, group_N) == group_max(x_N, group_N)


def centred(x_N: Tensor, group_N: Tensor) -> Tensor:
    """x − mean of the group; exactly 0.0 where the whole group is equal.

    The least x is taken off first. That changes nothing in exact arithmetic, and leaves exact zeros for equal x.
    """
    above_N = x_N - group_min(x_N, group_N)
    return above_N - group_sum(above_N, group_N) / group_size(group_N)


def group_std(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Unbiased standard deviation √(Σ(x − mean)² / (G − 1)) of the group; 0 in a group of one."""
    return (group_sum(centred(x_N, group_N) ** 2, group_N) / (group_size(group_N) - 1).clamp(min=1)).sqrt()


def rank_in_group(x_N: Tensor, group_N: Tensor) -> Tensor:
    """0 for the greatest x of the row's group, 1 for the next, …; of equal x the earlier row comes first."""
    greater = x_N[None, :] > x_N[:, None]
    rows = torch.arange(len(x_N), device=x_N.device)
    earlier_tie = (x_N[None, :] == x_N[:, None]) & (rows[None, :] < rows[:, None])
    return ((group_N[None, :] == group_N[:, None]) & (greater | earlier_tie)).sum(1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where mask is True; 0 where nothing is."""
    return torch.where(mask, x, torch.zeros_like(x)).sum() / mask.sum().clamp(min=1)


def step_covariance(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """[N, T] (x − mean(x))·(y − mean(y)), means over the steps where mask is True: a step's share of their covariance."""
    return ((x - masked_mean(x, mask)) * (y - masked_mean(y, mask))).masked_fill(~mask, 0.0)


def scrambled(x: Tensor) -> Tensor:
    """int64 numbers made of int64 numbers, as good as random and the same for the same: splitmix64 (Steele et al. 2014)."""
    x = x * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


def explained_variance(value: Tensor, returns: Tensor, mask: Tensor) -> float:
    """How much of the returns' variance the critic foresaw: 1 all of it, 0 as much as their mean does, below 0 less.

    Formula: 1 − Var(R − V) / Var(R), over the steps where mask [N,T] is True; 0 where the returns do not vary
    """
    chosen, missed = returns[mask].double(), (returns - value)[mask].double()
    variance = float(chosen.var(correction=0)) if chosen.numel() else 0.0
    return 1 - float(missed.var(correction=0)) / variance if variance > 0 else 0.0
