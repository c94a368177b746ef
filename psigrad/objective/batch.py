"""The data of algorithms: N trajectories × T steps as tensors, their group and step statistics, and the model's outputs.

Axes in names: `_N` trajectories, `_T` steps (completion tokens of a language model).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from psigrad.objective.lazy_torch import Tensor, torch

EMPTY_ROW = -(2**63)
"""Group id given to rows without a chosen step, so that padding rows never join a real group."""

# The fields of shape [N, T], then those of shape [N].
PER_STEP = ("mask", "reward", "logp_old", "logp_ref", "logp_sampler", "value", "action_value", "entropy", "rewarded")
PER_ROW = ("group", "last_value", "truncated", "metric")
_NUMBERS = tuple(name for name in PER_STEP if name not in ("mask", "rewarded"))


def zero_outside(mask: Tensor, x: Tensor) -> Tensor:
    """Return x where mask is True, 0 elsewhere. Mask before exp, not after, or a masked inf gives a NaN gradient."""
    # not x · mask: 0 · NaN = NaN
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def copy_to(x: Tensor, device: torch.device | str) -> Tensor:
    """Return x on `device`. A copy from the CPU to a GPU goes through pinned memory, so that it does not block."""
    return x.pin_memory().to(device, non_blocking=True) if x.is_cpu and torch.device(device).type == "cuda" else x.to(device)


def is_full(mask: Tensor) -> bool:
    """Return True if the mask is on the CPU and True everywhere. Return False on a GPU, as reading it would stall the CPU."""
    return mask.device.type == "cpu" and bool(mask.all())


def inside(mask: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function x -> `zero_outside(mask, x)`. If `is_full(mask)`, the function returns x unchanged."""
    return (lambda x: x) if is_full(mask) else partial(zero_outside, mask)


def terminal(score_N: Tensor, mask_NT: Tensor) -> Tensor:
    """Return outcome rewards [N, T]: `score_N[i]` on the last step of row i at which `mask_NT` is True, and 0 elsewhere."""
    last_N = mask_NT.shape[1] - 1 - mask_NT.flip(1).int().argmax(1)
    steps_T = torch.arange(mask_NT.shape[1], device=mask_NT.device)
    return zero_outside(mask_NT & (steps_T == last_N[:, None]), score_N[:, None].expand(mask_NT.shape))


@dataclass(frozen=True, eq=False)
class Batch:
    """N collected trajectories. Steps at which `mask` is False are called masked.

    On construction every float tensor [N, T] is detached, copied, cast to at least float32, and set to 0 on masked steps. A
    reward on a masked step is therefore lost: put it on the previous unmasked step.
    Errors: ValueError if a tensor has the wrong shape or `mask` is not boolean.
    """

    mask: Tensor
    """[N, T] bool: True on the steps that the policy chose."""
    reward: Tensor
    """[N, T] reward of each step."""
    logp_old: Tensor
    """[N, T] log-probability of each step under π_old, the policy before the batch's updates."""
    group: Tensor
    """[N] int64: rows with the same number answer the same prompt (or start from the same state)."""
    inputs: Any = None
    """Opaque model inputs for these rows: a tensor or list with one entry per row, or a mapping of such tensors and lists."""
    logp_ref: Tensor | None = None
    """[N, T] log-probability under the frozen reference policy."""
    logp_sampler: Tensor | None = None
    """[N, T] log-probability under the distribution that the sampler drew from."""
    value: Tensor | None = None
    """[N, T] the critic's value of the state before each step."""
    action_value: Tensor | None = None
    """[N, T] the critic's value Q(s_t, a_t) of each step's action in its state."""
    last_value: Tensor | None = None
    """[N] the value of the state after the last step: the bootstrap of a cut trajectory, 0 for a finished one."""
    truncated: Tensor | None = None
    """[N] bool: True where the trajectory was cut by its length limit."""
    metric: Tensor | None = None
    """[N] the metric that the filter has_signal compares, such as correctness; None: the sum of the rewards."""
    entropy: Tensor | None = None
    """[N, T] the entropy of each step's distribution under the policy that collected the batch, in nats."""
    rewarded: Tensor | None = None
    """[N, T] bool: True on steps that received a reward, even of 0. None: the steps with a reward other than 0 and the last step
    of each row count as rewarded.
    """
    parts: Tensor | None = None
    """[N, K] the outputs of K reward functions, before weights; NaN where a function does not apply."""
    part_weights: tuple[float, ...] = ()
    """The weights of the K reward functions; empty: all 1."""

    def __post_init__(self) -> None:
        if self.mask.dim() != 2 or self.mask.dtype != torch.bool:
            raise ValueError(
                f"Batch.mask has shape {tuple(self.mask.shape)} and dtype {self.mask.dtype}; expected a boolean tensor [N, T]; "
                "build it from the lengths of the rows."
            )
        for names, expected in ((PER_STEP, self.mask.shape), (PER_ROW, self.mask.shape[:1])):
            for name in names:
                tensor: Tensor | None = getattr(self, name)
                if tensor is not None and tensor.shape != expected:
                    raise ValueError(
                        f"Batch.{name} has shape {tuple(tensor.shape)}; expected {tuple(expected)} to match mask "
                        f"{tuple(self.mask.shape)}; pad or index it in the same way as the mask."
                    )
        if self.parts is not None and (self.parts.dim() != 2 or len(self.parts) != len(self.mask)):
            raise ValueError(
                f"Batch.parts has shape {tuple(self.parts.shape)}; expected [{len(self.mask)}, K], a column per reward function."
            )
        for name in _NUMBERS:
            tensor = getattr(self, name)
            if tensor is not None:
                own = _at_least_float32(tensor.detach())
                object.__setattr__(self, name, own.clone() if self.is_full else zero_outside(self.mask, own))
        if self.rewarded is not None:
            object.__setattr__(self, "rewarded", self.rewarded & self.mask)
        group = self.group.long()
        if not self.is_full:
            group = torch.where(self.present, group, torch.full_like(group, EMPTY_ROW))
        object.__setattr__(self, "group", group)

    @cached_property
    def is_full(self) -> bool:
        """True if `mask` is True everywhere. Always False on a GPU, where reading the mask would stall the CPU."""
        return self.mask.shape[1] > 0 and is_full(self.mask)

    @property
    def present(self) -> Tensor:
        """[N] bool: rows in which `mask` is True on at least one step. All other rows are padding and never count."""
        return self.mask.any(1)

    @property
    def sequence_reward(self) -> Tensor:
        """[N] undiscounted sum of the rewards of each trajectory."""
        return self.reward.sum(1)

    def check_finite(self) -> None:
        """Raise ValueError for a NaN or infinite float. `parts`, masked steps and padding rows are not checked."""
        for name in (*_NUMBERS, "last_value", "metric"):
            x: Tensor | None = getattr(self, name)
            x = zero_outside(self.present, x)[:, None] if x is not None and x.dim() == 1 else x
            # A sum is one operation and is finite only if every number is.
            if x is not None and not math.isfinite(x.sum()) and not bool(torch.isfinite(x).all()):
                rows = (~torch.isfinite(x)).any(1).nonzero().flatten().tolist()
                raise ValueError(
                    f"The {name} of rows {rows[:5]} is NaN or infinite; expected finite numbers; recompute or drop those rows."
                )

    def select(self, rows: Tensor | slice) -> Batch:
        """Return only `rows` (indices or a boolean mask) of the batch, also of its `inputs`."""
        return replace(self, inputs=_select_inputs(self.inputs, rows), **self._of_tensors(lambda x: x[rows]))

    def _of_tensors(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        return {name: change(x) for name in (*PER_STEP, *PER_ROW, "parts") if (x := getattr(self, name)) is not None}


def _at_least_float32(x: Tensor) -> Tensor:
    """Cast x to float32 unless it is float64. Half precision is too coarse for long sums, and rounds GSPO's clip bounds to 1."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _select_inputs(inputs: Any, rows: Tensor | slice) -> Any:
    if inputs is None or isinstance(inputs, torch.Tensor):
        return inputs if inputs is None else inputs[rows]
    if isinstance(inputs, Mapping):
        return {key: _select_inputs(value, rows) for key, value in inputs.items()}
    if isinstance(rows, slice):
        return inputs[rows]
    return [inputs[i] for i in (rows.nonzero().flatten() if rows.dtype == torch.bool else rows).tolist()]


@dataclass(frozen=True, eq=False)
class PolicyOutputs:
    """The current model's outputs for a batch's steps, with gradient. Values at masked steps are never read."""

    logp: Tensor
    """[N, T] log-probability of each chosen step."""
    entropy: Tensor | None = None
    """[N, T] entropy of the step's distribution, in nats."""
    value: Tensor | None = None
    """[N, T] critic's value."""
    kl: Tensor | None = None
    """[N, T] the KL by an exact estimator (a sum over the vocabulary) or by span, in nats; see `KL`."""


@dataclass(frozen=True)
class Totals:
    """Numbers of sequences and tokens in one optimiser step, over all its micro-batches and ranks. Losses are divided by them."""

    sequences: int = 0
    """Number of kept rows."""
    tokens: int = 0
    """Number of chosen steps in kept rows."""
    gradient_tokens: int = 0
    """Number of chosen steps in rows that need a forward pass. Metrics are means over these steps."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.sequences + other.sequences, self.tokens + other.tokens, self.gradient_tokens + other.gradient_tokens)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A collected batch with its advantages and filters. Any number of passes can compute the loss from it."""

    batch: Batch
    """The batch as collected: `reward` is without a KL penalty."""
    advantage: Tensor
    """[N, T] advantages, 0 on masked steps."""
    keep: Tensor
    """[N] bool: rows that are trained on."""
    needs_gradient: Tensor
    """[N] bool: False if a row's gradient is certain to be exactly zero, so that its forward pass may be skipped."""
    metrics: dict[str, float]
    """Metrics of the whole batch."""
    state: dict[str, float]
    """The method's state after this batch: plain numbers by name; see `PolicyGradient.initial_state`."""
    returns: Tensor | None = None
    """[N, T] target of the critic's values; None if the method has no critic."""
    counts: Tensor | None = None
    """[N, T] bool: True on the steps whose surrogate loss is part of the loss; None if no filter drops single steps."""
    marks: Tensor | None = None
    """[N, T] True, or a weight above 0, on the steps chosen by the surrogate's method `marks`; None if it has no such method."""

    @cached_property
    def is_full(self) -> bool:
        """True if no step is masked, and every row is kept and needs a gradient. Always False on a GPU; see `Batch.is_full`."""
        return self.batch.is_full and bool((self.keep & self.needs_gradient).all())

    def select(self, rows: Tensor | slice) -> Prepared:
        """Return the prepared data with only `rows` (indices or a boolean mask)."""
        return self._of(self.batch.select(rows), lambda x: x[rows], lambda x: x[rows])

    def to(self, device: torch.device) -> Prepared:
        """Return the prepared data with its tensors on `device`."""
        copy = partial(copy_to, device=device)
        return self if self.keep.device == device else self._of(replace(self.batch, **self.batch._of_tensors(copy)), copy, copy)

    def _of(self, batch: Batch, of_rows: Callable[[Tensor], Tensor], of_steps: Callable[[Tensor], Tensor]) -> Prepared:
        names = ("advantage", "returns", "counts", "marks")
        per_step: dict[str, Any] = {name: of_steps(x) for name in names if (x := getattr(self, name)) is not None}
        return replace(self, batch=batch, keep=of_rows(self.keep), needs_gradient=of_rows(self.needs_gradient), **per_step)

    def steps(self) -> Prepared:
        """Return each unmasked step of the kept rows as a row of its own, without `inputs` and `parts`.

        Use it only if the loss of a step does not depend on the other steps of its row.
        """
        mask = self.batch.mask & self.keep[:, None]
        at = mask.flatten().nonzero()[:, 0]  # computed once: every boolean index would search again
        rows = at.div(mask.shape[1], rounding_mode="floor")
        own = {name: getattr(self.batch, name) for name in (*PER_STEP, *PER_ROW)}
        per_step: dict[str, Any] = {name: _pick(own[name], at) for name in PER_STEP if own[name] is not None}
        per_row: dict[str, Any] = {name: own[name][rows] for name in PER_ROW if own[name] is not None}
        return self._of(Batch(**per_step, **per_row), lambda x: x[rows], lambda x: _pick(x, at))


@dataclass(frozen=True, eq=False)
class Loss:
    """A micro-batch's share of an optimiser step's loss and metrics. The shares of all micro-batches add up to the total."""

    value: Tensor
    """Scalar loss with gradient."""
    terms: dict[str, Tensor]
    """Detached scalars by name. A policy gradient's, except for losses, are means over steps of rows that need a gradient."""


def _pick(x: Tensor, at: Tensor) -> Tensor:
    """Return the elements [M, 1] of an [N, T] tensor at the flat positions `at` [M]."""
    return x.flatten()[at][:, None]


# Statistics over the rows of a group and over chosen steps, and sums of rewards along a trajectory.
#
# Group functions take and return [N]: each row gets the result of its group. Groups may have any size, row order and ids.
# Sums along a trajectory take and return [N, T] and are 0 on masked steps. Time counts chosen steps only: a masked observation
# between two chosen steps adds no discount, and later rewards still reach the steps before it.


def _index(group_N: Tensor) -> tuple[Tensor, int]:
    ids, index_N = torch.unique(group_N, return_inverse=True)
    return index_N, len(ids)


def group_sum(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Return [N]: for each row, the sum of x over its group."""
    index_N, n_groups = _index(group_N)
    return torch.zeros(n_groups, dtype=x_N.dtype, device=x_N.device).index_add(0, index_N, x_N)[index_N]


def group_size(group_N: Tensor) -> Tensor:
    """Return [N] int64: for each row, the number of rows in its group."""
    return group_sum(torch.ones_like(group_N), group_N)


def group_min(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Return [N]: for each row, the least x in its group."""
    index_N, n_groups = _index(group_N)
    empty = torch.zeros(n_groups, dtype=x_N.dtype, device=x_N.device)
    return empty.scatter_reduce(0, index_N, x_N, "amin", include_self=False)[index_N]


def group_max(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Return [N]: for each row, the greatest x in its group."""
    return -group_min(-x_N, group_N)


def all_equal(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Return [N] bool: True if all x of the row's group are equal."""
    # not `std == 0`: the float mean of eight times 0.1 is not 0.1
    return group_min(x_N, group_N) == group_max(x_N, group_N)


def centre(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Return [N]: x minus the mean x of the row's group; exactly 0.0 if all x of the group are equal."""
    above_N = x_N - group_min(x_N, group_N)  # subtracted first: equal x then give exact zeros
    return above_N - group_sum(above_N, group_N) / group_size(group_N)


def group_std(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Return [N]: the unbiased standard deviation √(Σ(x − mean)² / (G − 1)) of the row's group of G rows; 0 if G is 1."""
    return (group_sum(centre(x_N, group_N) ** 2, group_N) / (group_size(group_N) - 1).clamp(min=1)).sqrt()


def rank_in_group(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Return each row's rank in its group: 0 for the greatest x, 1 for the next, …; among equal x the earlier row comes first."""
    order_N = x_N.argsort(descending=True, stable=True)
    order_N = order_N[group_N[order_N].argsort(stable=True)]
    sorted_N, places_N = group_N[order_N].contiguous(), torch.arange(len(x_N), device=x_N.device)
    return torch.empty_like(places_N).index_put((order_N,), places_N - torch.searchsorted(sorted_N, sorted_N))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x where mask is True; 0 if mask is False everywhere."""
    return torch.where(mask, x, torch.zeros_like(x)).sum() / mask.sum().clamp(min=1)


def step_covariance(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return (x − mean(x))·(y − mean(y)) of each step [N, T], with means over the steps in `mask`; 0 outside `mask`."""
    return ((x - masked_mean(x, mask)) * (y - masked_mean(y, mask))).masked_fill(~mask, 0.0)


def scramble(x: Tensor) -> Tensor:
    """Hash int64 numbers to pseudo-random int64 numbers, deterministically: splitmix64 (Steele et al. 2014)."""
    x = x * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


def explained_variance(value: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return the share of the returns' variance that the critic explains.

    Formula: 1 − Var(R − V) / Var(R), over the steps where mask [N,T] is True; 0 if the returns do not vary.
    """
    chosen, missed = returns[mask].double(), (returns - value)[mask].double()
    variance = float(chosen.var(correction=0)) if chosen.numel() else 0.0
    return 1 - float(missed.var(correction=0)) / variance if variance > 0 else 0.0


def discounted_sum(x_NT: Tensor, mask_NT: Tensor, discount: float | Tensor) -> Tensor:
    """Return y_t = x_t + discount · y_{t+1} on unmasked steps, where t + 1 is the next unmasked step; 0 on masked steps.

    `discount` is a number or a tensor [N].
    """
    within, n_steps = inside(mask_NT), x_NT.shape[1]
    y_NT, holes = within(x_NT), _holes(mask_NT)
    if holes:  # move chosen steps to the front, in their order
        order_NT = (~mask_NT).to(torch.int8).argsort(dim=1, stable=True)
        y_NT = y_NT.gather(1, order_NT)
    if isinstance(discount, torch.Tensor):
        discount = discount[:, None].to(y_NT.dtype)
    if n_steps <= _FEW and y_NT.is_floating_point() and not isinstance(discount, torch.Tensor):
        y_NT = y_NT @ _powers(n_steps, discount, y_NT.dtype, y_NT.device)
    else:  # with d the discount and S the shift by one step, y = (1 − dS)⁻¹·x = …(1 + d⁴S⁴)(1 + d²S²)(1 + dS)·x
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


# The longest row for which one [T, T] product takes less time than log₂ T passes.
_FEW = 16


@lru_cache(maxsize=32)
def _powers(n_steps: int, discount: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix [T, T] whose element in row u and column t is discount^(u − t) if u ≥ t, else 0."""
    steps = torch.arange(n_steps, dtype=torch.float64)
    ahead = steps[:, None] - steps
    return torch.where(ahead < 0, 0.0, discount ** ahead.clamp(min=0)).to(device, dtype)


def next_chosen(x_NT: Tensor, mask_NT: Tensor, last_N: Tensor) -> Tensor:
    """Return [N, T]: on each unmasked step, x of the next unmasked step, or `last_N` if there is none; 0 on masked steps."""
    n_steps = x_NT.shape[1]
    if n_steps and not _holes(mask_NT):
        ahead_NT = torch.cat([x_NT[:, 1:], last_N[:, None]], dim=1)
        if is_full(mask_NT):
            return ahead_NT
        follows_NT = torch.nn.functional.pad(mask_NT[:, 1:], (0, 1))
        return zero_outside(mask_NT, torch.where(follows_NT, ahead_NT, last_N[:, None]))
    steps_NT = torch.arange(n_steps, device=x_NT.device).expand(x_NT.shape)
    chosen_NT = torch.where(mask_NT, steps_NT, n_steps)
    after_NT = torch.cat([chosen_NT[:, 1:], torch.full_like(chosen_NT[:, :1], n_steps)], dim=1)
    next_NT = after_NT.flip(1).cummin(1).values.flip(1)
    return zero_outside(mask_NT, torch.cat([x_NT, last_N[:, None]], dim=1).gather(1, next_NT))


def _holes(mask_NT: Tensor) -> bool:
    """Return True if, in some row, the mask is True after a False. Padding at the end of a row is not a hole."""
    return mask_NT.shape[1] > 1 and not bool(mask_NT.all()) and bool((mask_NT[:, 1:] & ~mask_NT[:, :-1]).any())


def td_errors(batch: Batch, gamma: float) -> Tensor:
    """Return δ_t = r_t + γ·V(s_{t+1}) − V(s_t). On the last step, V(s_{t+1}) is `batch.last_value`, or 0 without one."""
    if batch.value is None:
        raise ValueError(
            "The batch has no `value` for TD errors; give the critic's values, or choose an advantage (psi) that needs no critic."
        )
    last_N = torch.zeros_like(batch.value[:, 0]) if batch.last_value is None else batch.last_value.detach().to(batch.value.dtype)
    ahead_NT = next_chosen(batch.value, batch.mask, last_N)
    error_NT = torch.add(batch.reward, ahead_NT, alpha=gamma).sub_(batch.value)
    return error_NT if batch.is_full else zero_outside(batch.mask, error_NT)
