"""Log-probabilities of chosen tokens from hidden states, in chunks, so that no [tokens, vocabulary] tensor outlives its chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits held at once: 2^24 floats are 64 MiB.
CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class TokenStats:
    """Per token, each [M]: log pi(a|s), the entropy of pi(.|s), and KL(pi||ref) over the whole vocabulary (None if not asked for)."""

    logp: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None


def upcast(logits: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def of_logits(logits: Tensor, ids: Tensor, temperature: float = 1.0, entropy: bool = False) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[ids] and the entropy (an empty tensor if not asked for), in float32 at least.

    logits [M, V], ids [M].
    """
    logits = upcast(logits)
    if temperature != 1.0:
        logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    logp = logits.gather(-1, ids[:, None])[:, 0] - normaliser
    if not entropy:
        return logp, logits.new_empty(0)
    log_all = logits - normaliser[:, None]
    return logp, -(log_all.exp() * log_all).sum(-1)


def token_stats(
    hidden: Tensor,
    ids: Tensor,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    reference: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None,
) -> TokenStats:
    """`TokenStats` of hidden states [M, E] under `head` (E -> V), chunked over M and recomputed in the backward pass.

    `reference` is (its hidden states [M, E'], its head): then the exact KL(pi||ref) is computed as well.
    """
    rows = max(1, CHUNK_ELEMENTS // vocabulary)

    def chunk(h: Tensor, i: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        logits = head(h)
        logp, ent = of_logits(logits, i, temperature, entropy)
        kl = logits.new_empty(0)
        if r is not None and reference is not None:
            log_pi = torch.log_softmax(upcast(logits) / temperature, -1)
            log_ref = torch.log_softmax(upcast(reference[1](r)) / temperature, -1)
            kl = (log_pi.exp() * (log_pi - log_ref)).sum(-1)
        return logp, ent, kl

    whole = hidden.shape[0] <= rows
    parts = []
    for start in range(0, max(hidden.shape[0], 1), rows):
        cut = slice(start, start + rows)
        args = (hidden[cut], ids[cut], None if reference is None else reference[0][cut])
        parts.append(chunk(*args) if whole or not torch.is_grad_enabled() else checkpoint(chunk, *args, use_reentrant=False))
    logp, ent, kl = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return TokenStats(logp, ent if entropy else None, kl if reference is not None else None)
