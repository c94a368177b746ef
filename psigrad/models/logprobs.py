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
    """Per token, each [M]: log pi(a|s); on request the entropy of pi(.|s), KL(pi||ref) over the whole vocabulary (both in
    nats), whether a is the most probable token, and the critic's V(s).
    """

    logp: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None
    hit: Tensor | None = None
    value: Tensor | None = None

    def detach(self) -> TokenStats:
        """Without gradient."""
        columns = (self.logp, self.entropy, self.kl, self.hit, self.value)
        return TokenStats(*(x if x is None else x.detach() for x in columns))


def upcast(logits: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


@dataclass(frozen=True)
class Wanted:
    """What to compute of each token, and at which softmax temperature. `reference_head` asks for the exact KL."""

    temperature: float = 1.0
    entropy: bool = False
    accuracy: bool = False
    reference_head: Callable[[Tensor], Tensor] | None = None

    def of(self, logits: Tensor, ids: Tensor, reference_hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The columns of `TokenStats` from logits [M, V] and ids [M]; what is not wanted is empty."""
        empty = logits.new_empty(0)
        raw, logits = logits, upcast(logits)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        normaliser = logits.logsumexp(-1)
        logp = logits.gather(-1, ids[:, None])[:, 0] - normaliser
        entropy = kl = hit = empty
        if self.entropy or self.reference_head is not None:
            log_pi = logits - normaliser[:, None]
            pi = log_pi.exp()
            if self.entropy:
                entropy = -(pi * log_pi).sum(-1)
            if self.reference_head is not None and reference_hidden is not None:
                log_ref = torch.log_softmax(upcast(self.reference_head(reference_hidden)) / self.temperature, -1)
                kl = (pi * (log_pi - log_ref)).sum(-1)
        if self.accuracy:
            hit = (raw.detach().argmax(-1) == ids).to(logits.dtype)
        return logp, entropy, kl, hit


def token_stats(
    hidden: Tensor,
    ids: Tensor,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    wanted: Wanted,
    reference_hidden: Tensor | None = None,
) -> TokenStats:
    """`TokenStats` of hidden states [M, E] under `head` (E -> V), chunked over M and recomputed in the backward pass."""
    rows = max(1, CHUNK_ELEMENTS // vocabulary)

    def chunk(h: Tensor, i: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return wanted.of(head(h), i, r)

    whole = hidden.shape[0] <= rows or not torch.is_grad_enabled()
    parts = []
    for start in range(0, max(hidden.shape[0], 1), rows):
        cut = slice(start, start + rows)
        args = (hidden[cut], ids[cut], None if reference_hidden is None else reference_hidden[cut])
        parts.append(chunk(*args) if whole else checkpoint(chunk, *args, use_reentrant=False))
    logp, entropy, kl, hit = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return TokenStats(
        logp,
        entropy if wanted.entropy else None,
        kl if wanted.reference_head is not None else None,
        hit if wanted.accuracy else None,
    )
