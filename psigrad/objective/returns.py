"""Sums of rewards along a trajectory.

Time counts chosen steps only: a masked observation between two chosen steps takes no time, is not discounted and hides nothing.
All functions take and return [N, T]; results are 0 on masked steps.
"""

from __future__ import annotations

from functools import lru_cache

from psigrad.objective.batch import Batch, inside, is_whole, zero_outside
from psigrad.objective.lazy_torch import Tensor, torch

__all__ = ["discounted_sum", "next_chosen", "td_errors"]


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
