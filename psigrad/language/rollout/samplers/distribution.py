"""The distribution from which a token is drawn, and the draw, which uses a counter-based uniform random number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from psigrad import seeds
from psigrad.compiled import kernels
from psigrad.language.models.stats import upcast
from psigrad.language.rollout.types import SamplingParams

# A large vocabulary is summed in blocks of this many tokens.
_BLOCK = 1024

# Logits per tensor operation on a CPU, so that their float64 sums fit the caches and the allocator reuses their memory.
_AT_ONCE = 1 << 20
# If the drawn token is forbidden, another is drawn with this number added to the counter.
_SECOND = 1 << 40


@dataclass(frozen=True)
class DrawnTokens:
    """Drawn tokens [B] and their log-probs [B]: `logprobs` after temperature only, `sampling_logprobs` also after the filters."""

    ids: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Apply top-k, top-p and min-p to logits [B, V], already divided by the temperature. Excluded tokens get -inf.

    Each filter is applied to the result of the previous one, in transformers' order. Sources: Holtzman et al. 2020 (top-p),
    Nguyen et al. 2024 (min-p).
    """
    if params.top_k and params.top_k < logits.shape[-1]:
        threshold = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if params.top_p < 1:
        ascending, order = logits.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        drop[:, -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    if params.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def draw(logits: Tensor, params: SamplingParams, seeds_u64: np.ndarray, counter: np.ndarray) -> DrawnTokens:
    """Draw one token per row of logits [B, V].

    The token of row i depends only on `logits[i]`, `seeds_u64[i]` and `counter[i]` (the number of tokens drawn before).
    """
    found = _draw_unchecked(logits, params, seeds_u64, counter)
    if not params.forbidden or found.ids.device.type != "cpu" or not bool((wrong := _forbidden(found.ids, params)).any()):
        return found
    rows, at = wrong.nonzero()[:, 0], wrong.cpu().numpy()
    again = _draw_in_torch(logits[rows], params, seeds_u64[at], counter[at] + _SECOND)
    merged = (getattr(found, f.name).index_put((rows,), getattr(again, f.name)) for f in fields(DrawnTokens))
    return DrawnTokens(*merged)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the probability [B, V] that `draw` returns each token. The temperature must be above 0."""
    allowed = logits.index_fill(-1, torch.tensor(params.forbidden, dtype=torch.long, device=logits.device), -torch.inf)
    return filter_logits(allowed / params.temperature, params).softmax(-1)


def _forbidden(ids: Tensor, params: SamplingParams) -> Tensor:
    return torch.isin(ids, torch.tensor(params.forbidden, device=ids.device))


def _draw_unchecked(logits: Tensor, params: SamplingParams, seeds_u64: np.ndarray, counter: np.ndarray) -> DrawnTokens:
    """Draw one token per row. The CPU kernel may draw a token of `params.forbidden`; `draw` then replaces the token."""
    if logits.device.type != "cpu":
        return _draw_in_torch(logits, params, seeds_u64, counter)
    native = kernels()
    if not isinstance(native, str) and not params.filtered and params.temperature > 0 and logits.dtype in native.dtypes:
        u = torch.from_numpy(seeds.uniform(seeds_u64, counter))
        ids, logp = native.draw(logits.contiguous(), u, params.temperature)
        if not params.forbidden:
            return DrawnTokens(ids, logp, logp)
        # Replaced draws raise the probability of each allowed token by 1 / (1 − the probability of forbidden ones).
        normaliser = _at(logits, ids).float() / params.temperature - logp
        excluded = logits[:, list(params.forbidden)].float() / params.temperature - normaliser[:, None]
        return DrawnTokens(ids, logp, logp - torch.log1p(-excluded.exp().sum(-1)))
    rows = max(1, _AT_ONCE // logits.shape[1])
    starts = range(0, max(len(logits), 1), rows)
    parts = [_draw_in_torch(logits[i : i + rows], params, seeds_u64[i : i + rows], counter[i : i + rows]) for i in starts]
    return DrawnTokens(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(DrawnTokens)))


def _draw_in_torch(logits: Tensor, params: SamplingParams, seeds_u64: np.ndarray, counter: np.ndarray) -> DrawnTokens:
    """Draw one token per row in PyTorch, without psigrad's kernel; see `draw`."""
    return draw_at(logits, params, torch.from_numpy(seeds.uniform(seeds_u64, counter)).to(logits.device)[:, None])


def draw_at(logits: Tensor, params: SamplingParams, u: Tensor) -> DrawnTokens:
    """Draw one token per row of logits [B, V], given uniform float64 numbers u [B, 1]. A CUDA graph can record this function."""
    logits = upcast(logits)
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    allowed = logits.clone() if params.forbidden else logits
    for token in params.forbidden:
        allowed.select(-1, token).fill_(-torch.inf)  # a tensor of ids could not be copied while a CUDA graph is recorded
    if params.temperature == 0:
        ids = allowed.argmax(-1)
        return DrawnTokens(ids, _at(logits, ids) - logits.logsumexp(-1), torch.zeros_like(logits[:, 0]))
    kept = filter_logits(allowed, params) if params.filtered else allowed
    weights, normaliser = _weights(kept)
    ids = inverse(weights, u)
    logq = _at(kept, ids) - normaliser
    return DrawnTokens(ids, _at(logits, ids) - logits.logsumexp(-1) if params.filtered or params.forbidden else logq, logq)


def _weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (exp(logits − each row's maximum) [B, V], log Σ exp(logits) [B])."""
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    return weights, top[:, 0] + weights.sum(-1).log()


def inverse(weights: Tensor, u: Tensor) -> Tensor:
    """Return the first index [B] in each row whose cumulative weight exceeds u [B, 1] times the row's sum of weights.

    No weight of `weights` [B, V] may be negative.
    """
    batch, size = weights.shape
    if size <= 2 * _BLOCK:
        return _first_above(weights, lambda total: u * total)
    # Search only the block that has the index. This takes 10 % of the time of a search through all weights.
    blocks = torch.nn.functional.pad(weights, (0, -size % _BLOCK)).view(batch, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    target = u * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_max_(ends.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min_(0)), 0.0)
    inside = blocks[torch.arange(batch, device=weights.device), block[:, 0]]
    ids = block[:, 0] * _BLOCK + _first_above(inside, lambda total: target - before)
    # After rounding, the target may lie beyond all weights. Then take the last index with weight.
    lost = ~(weights.gather(1, ids.clamp_max(size - 1)[:, None])[:, 0] > 0)
    if not _may_be(lost):
        return ids
    end = _last(sums)  # the last block with weight
    last = end * _BLOCK + _last(blocks[torch.arange(batch, device=weights.device), end])
    return torch.where(lost, last.clamp_max_(size - 1), ids)  # with NaN weights, `last` is in the padding


def _first_above(weights: Tensor, target: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the first index [B] in each row whose cumulative weight exceeds `target(s)`, where s [B, 1] are the rows' sums."""
    # In float32, a sum over a large vocabulary would make rare tokens unreachable.
    sums = weights.double().cumsum(-1)
    ids = torch.searchsorted(sums, target(sums[:, -1:]), right=True)[:, 0]
    # u · total may round up to the total itself.
    return torch.minimum(ids, _last(weights)) if _may_be(ids == weights.shape[1]) else ids


def _may_be(rare: Tensor) -> bool:
    """Return True if any element of `rare` is True. On a GPU, always return True, since a check would make the CPU wait."""
    return rare.is_cuda or bool(rare.any())


def _last(weights: Tensor) -> Tensor:
    """Return the last index [B] with a weight above 0 in each row."""
    return weights.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)


def _at(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids[:, None])[:, 0]
