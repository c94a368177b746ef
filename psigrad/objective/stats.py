"""Statistics over rows of a group and over chosen steps, and sums of rewards along a trajectory.

Group functions take and return [N]: each row gets its own group's figure. Groups may have any size, any row order, any ids.

Sums along a trajectory take and return [N, T] and are 0 on masked steps. Their time counts chosen steps only: a masked
observation between two chosen steps takes no time, is not discounted and hides nothing.
"""

from __future__ import annotations

from functools import lru_cache

from psigrad.objective.batch import Batch, inside, is_whole, zero_outside
from psigrad.objective.lazy_torch import Tensor, torch

__all__ = [
    "all_equal",
    "centre",
    "discounted_sum",
    "explained_variance",
    "group_max",
    "group_min",
    "group_size",
    "group_std",
    "group_sum",
    "masked_mean",
    "next_chosen",
    "rank_in_group",
    "scramble",
    "step_covariance",
    "td_errors",
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


def centre(x_N: Tensor, group_N: Tensor) -> Tensor:
    """x − mean of the group; exactly 0.0 where the whole group is equal.

    The least x is taken off first. That changes nothing in exact arithmetic, and leaves exact zeros for equal x.
    """
    above_N = x_N - group_min(x_N, group_N)
    return above_N - group_sum(above_N, group_N) / group_size(group_N)


def group_std(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Unbiased standard deviation √(Σ(x − mean)² / (G − 1)) of the group; 0 in a group of one."""
    return (group_sum(centre(x_N, group_N) ** 2, group_N) / (group_size(group_N) - 1).clamp(min=1)).sqrt()


def rank_in_group(x_N: Tensor, group_N: Tensor) -> Tensor:
    """0 for the greatest x of the row's group, 1 for the next, …; of equal x the earlier row comes first."""
    order_N = x_N.argsort(descending=True, stable=True)
    order_N = order_N[group_N[order_N].argsort(stable=True)]
    sorted_N, places_N = group_N[order_N].contiguous(), torch.arange(len(x_N), device=x_N.device)
    return torch.empty_like(places_N).index_put((order_N,), places_N - torch.searchsorted(sorted_N, sorted_N))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where mask is True; 0 where nothing is."""
    return torch.where(mask, x, torch.zeros_like(x)).sum() / mask.sum().clamp(min=1)


def step_covariance(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """[N, T] (x − mean(x))·(y − mean(y)), means over the steps where mask is True: a step's share of their covariance."""
    return ((x - masked_mean(x, mask)) * (y - masked_mean(y, mask))).masked_fill(~mask, 0.0)


def scramble(x: Tensor) -> Tensor:
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


def discounted_sum(x_NT: Tensor, mask_NT: Tensor, discount: float | Tensor) -> Tensor:
    """y_t = x_t + discount · y_{t+1}, backwards over the chosen steps; `discount` is a number, or one for each row [N].

    With x the rewards this is the reward-to-go; with x the TD errors and discount γλ it is GAE.

    Over a few steps that is one product with the powers of the discount. Else, with S the shift by a step,
    y = (1 − dS)⁻¹·x = …(1 + d⁴S⁴)(1 + d²S²)(1 + dS)·x: log₂ T passes over whole rows, not T steps.
    """
    within, n_steps = inside(mask_NT), x_NT.shape[1]
    y_NT, holes = within(x_NT), _holes(mask_NT)
    if holes:  # chosen steps to the front, in their order
        order_NT = (~mask_NT).to(torch.int8).argsort(dim=1, stable=True)
        y_NT = y_NT.gather(1, order_NT)
    if isinstance(discount, torch.Tensor):
        discount = discount[:, None].to(y_NT.dtype)
    if n_steps <= _FEW and y_NT.is_floating_point() and not isinstance(discount, torch.Tensor):
        y_NT = y_NT @ _powers(n_steps, discount, y_NT.dtype, y_NT.device)
    else:
        shift = 1
        while shift < n_steps:
            later_NT = torch.nn.functional.pad(y_NT[:, shift:], (0, shift))
            if isinstance(discount, torch.Tensor):
                y_NT = y_NT + later_NT * discount**shift
            else:
                y_NT = torch.add(y_NT, later_NT, alpha=discount**shift)
            shift *= 2
    if holes:
        y_NT = torch.zeros_like(y_NT).scatter(1, order_NT, y_NT)
    return within(y_NT)


# Steps up to which T² multiplications take less time than log₂ T calls.
_FEW = 16


@lru_cache(maxsize=32)
def _powers(n_steps: int, discount: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[T, T] discount^(u − t) in row u and column t ≤ u, 0 elsewhere."""
    steps = torch.arange(n_steps, dtype=torch.float64)
    ahead = steps[:, None] - steps
    return torch.where(ahead < 0, 0.0, discount ** ahead.clamp(min=0)).to(device, dtype)


def next_chosen(x_NT: Tensor, mask_NT: Tensor, last_N: Tensor) -> Tensor:
    """x at the next chosen step of the same row; `last_N` where there is none."""
    n_steps = x_NT.shape[1]
    if n_steps and not _holes(mask_NT):
        ahead_NT = torch.cat([x_NT[:, 1:], last_N[:, None]], dim=1)
        if is_whole(mask_NT):
            return ahead_NT
        follows_NT = torch.nn.functional.pad(mask_NT[:, 1:], (0, 1))
        return zero_outside(mask_NT, torch.where(follows_NT, ahead_NT, last_N[:, None]))
    steps_NT = torch.arange(n_steps, device=x_NT.device).expand(x_NT.shape)
    chosen_NT = torch.where(mask_NT, steps_NT, n_steps)
    after_NT = torch.cat([chosen_NT[:, 1:], torch.full_like(chosen_NT[:, :1], n_steps)], dim=1)
    next_NT = after_NT.flip(1).cummin(1).values.flip(1)
    return zero_outside(mask_NT, torch.cat([x_NT, last_N[:, None]], dim=1).gather(1, next_NT))


def _holes(mask_NT: Tensor) -> bool:
    """Whether a chosen step comes behind one that was not chosen; rows of one length after another have none."""
    return mask_NT.shape[1] > 1 and not bool(mask_NT.all()) and bool((mask_NT[:, 1:] & ~mask_NT[:, :-1]).any())


def td_errors(batch: Batch, gamma: float) -> Tensor:
    """δ_t = r_t + γ·V(s_{t+1}) − V(s_t); after the last step V is `batch.last_value` (0 when absent)."""
    if batch.value is None:
        raise ValueError(
            "The batch has no `value`, which TD errors read; give the critic's values or choose a psi without a critic."
        )
    last_N = torch.zeros_like(batch.value[:, 0]) if batch.last_value is None else batch.last_value.detach().to(batch.value.dtype)
    ahead_NT = next_chosen(batch.value, batch.mask, last_N)
    error_NT = torch.add(batch.reward, ahead_NT, alpha=gamma).sub_(batch.value)
    return error_NT if batch.whole else zero_outside(batch.mask, error_NT)
