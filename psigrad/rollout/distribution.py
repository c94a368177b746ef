"""The distribution a token is drawn from, and the draw itself by a counter-based uniform number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from psigrad import seeds
from psigrad.models.logprobs import upcast
from psigrad.rollout.types import SamplingParams


@dataclass(frozen=True)
class Drawn:
    """Tokens [B], the policy's log-prob of each (temperature only) [B], and the one under the filtered distribution [B]."""

    ids: Tensor
    logprobs: Tensor
    sampling_logprobs: Tensor


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits [B, V], already divided by the temperature, with -inf where top-k, top-p and min-p forbid.

    Each filter sees what the one before it left, in transformers' order. Ties at the top-k threshold are all kept; top-p
    keeps the smallest set whose probability reaches p, and always one token (Holtzman et al. 2020); min-p keeps p >= min_p ·
    max p (Nguyen et al. 2024).
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


def draw(logits: Tensor, params: SamplingParams, seeds_u64: np.ndarray, counter: np.ndarray) -> Drawn:
    """One token per row of logits [B, V]: the inverse of the cumulative distribution at u(seed, counter).

    Row i depends on `logits[i]`, `seeds_u64[i]` and `counter[i]` (its number of tokens so far) only. At temperature 0 the most
    probable token is taken: then `sampling_logprobs` is 0 and `logprobs` is at temperature 1.
    """
    logits = upcast(logits)
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    log_pi = logits.log_softmax(-1)
    if params.temperature == 0:
        ids = log_pi.argmax(-1)
        return Drawn(ids, _at(log_pi, ids), torch.zeros_like(log_pi[:, 0]))
    plain = params.top_p >= 1 and params.top_k == 0 and params.min_p == 0
    log_q = log_pi if plain else filtered(logits, params).log_softmax(-1)
    # float64: a float32 sum over a large vocabulary would make rare tokens unreachable
    cdf = log_q.double().exp().cumsum(-1)
    u = torch.from_numpy(seeds.uniform(seeds_u64, counter)).to(cdf.device)[:, None] * cdf[:, -1:]
    ids = torch.searchsorted(cdf, u, right=True)[:, 0]
    # u · total may round up to the total itself: then the last token that has any probability is meant
    last = cdf.shape[-1] - 1 - (log_q.flip(-1) > -torch.inf).int().argmax(-1)
    ids = torch.minimum(ids, last)
    logp = _at(log_pi, ids)
    return Drawn(ids, logp, logp if plain else _at(log_q, ids))


def _at(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids[:, None])[:, 0]
