"""Log-probabilities of chosen tokens from hidden states, in chunks, so that no [tokens, vocabulary] tensor outlives its chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# Logits of one chunk: 2^24 floats are 64 MiB.
CHUNK_ELEMENTS = 1 << 24
# The closed form holds them once, where autograd holds several copies, so its chunks may be larger: fewer passes over the head.
CLOSED_CHUNK = 2


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

    @property
    def nothing_else(self) -> bool:
        """Whether log-probs are all that is wanted."""
        return not (self.entropy or self.accuracy) and self.reference_head is None

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


class _ChosenLogProbs(torch.autograd.Function):
    """log π of chosen tokens under a large head, forward and backward in chunks that leave nothing but a normaliser per token.

    With z = h·Wᵀ / T and π = softmax(z): d log π(a) / dz = e_a − π. The head's gradient is summed up in one matrix, where
    autograd would make one for every chunk.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, rows: int) -> Tensor:
        parts = []
        for cut, logits, _ in _logits(hidden, weight, temperature, rows):
            chosen = logits.gather(1, ids[cut, None])[:, 0]
            top = logits.amax(1)
            normaliser = logits.sub_(top[:, None]).exp_().sum(1).log_().add_(top)
            parts.append((chosen - normaliser, normaliser))
        logp, normaliser = (torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, ids, normaliser)
        ctx.temperature, ctx.rows = temperature, rows
        return logp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp: Tensor) -> tuple[Any, ...]:
        hidden, weight, ids, normaliser = ctx.saved_tensors
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # a sum of half-precision products would lose the small ones
        dweight = torch.zeros_like(weight, dtype=normaliser.dtype) if ctx.needs_input_grad[1] else None
        for cut, logits, stored in _logits(hidden, weight, ctx.temperature, ctx.rows):
            slope = dlogp[cut, None] / ctx.temperature
            back = logits.sub_(normaliser[cut, None]).exp_().mul_(-slope)
            back.scatter_add_(1, ids[cut, None], slope)
            given = back if back.dtype == weight.dtype else stored.copy_(back)
            if dhidden is not None:
                torch.mm(given, weight, out=dhidden[cut])
            if dweight is not None:
                if dweight.dtype == weight.dtype:
                    dweight.addmm_(given.t(), hidden[cut])
                else:
                    dweight.add_(given.t() @ hidden[cut])
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Logits of `rows` states at a time, in at least float32, and as they are stored; the next overwrite them."""
    room = hidden.new_empty(min(rows, len(hidden)), len(weight))
    wide = room if room.dtype == upcast(room[:0]).dtype else torch.empty_like(room, dtype=torch.float32)
    for start in range(0, len(hidden), rows):
        cut = slice(start, min(start + rows, len(hidden)))
        stored, logits = room[: cut.stop - start], wide[: cut.stop - start]
        torch.mm(hidden[cut], weight.t(), out=stored)
        if logits.dtype != stored.dtype:
            logits.copy_(stored)
        yield cut, logits.div_(temperature) if temperature != 1.0 else logits, stored


def token_stats(
    hidden: Tensor,
    ids: Tensor,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    wanted: Wanted,
    reference_hidden: Tensor | None = None,
) -> TokenStats:
    """`TokenStats` of hidden states [M, E] under `head` (E -> V), chunked over M and recomputed in the backward pass.

    Where nothing but log-probs is wanted of a `head` that is a plain linear layer, the gradient is in closed form.
    """
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    if wanted.nothing_else and type(head) is nn.Linear and head.bias is None and hidden.shape[0] > rows:
        return TokenStats(_ChosenLogProbs.apply(hidden, head.weight, ids, wanted.temperature, CLOSED_CHUNK * rows))

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
