"""Log-probabilities of given tokens from hidden states, in chunks, so that a whole [tokens, vocabulary] tensor never exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from psigrad.compiled import gpu_kernels
from psigrad.kernels.kernels import Kernels, kernels, multiply
from psigrad.kernels.products import STRETCH
from psigrad.language.models.fused.caches import CachedLogProbs
from psigrad.language.models.stats import TokenStats, TokenStatsRequest, Top, upcast
from psigrad.optim import gradients

# The number of logits of one chunk: 2^24 floats are 64 MiB.
CHUNK_ELEMENTS = 1 << 24
# The number of logits of one tile of `_ChosenLogProbs`, and the largest number of hidden states in it.
TILE_ELEMENTS = 1 << 20
TILE_ROWS = 4096
# Factors of these sizes on a GPU, whose many processors need more work at once, and where a tile need not fit into a cache.
CHUNK_ON_GPU, TILE_ON_GPU = 4, 256


class _Logits(torch.autograd.Function):
    """The logits h·Wᵀ. If `sums` is given, the gradient of W is added to it in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, sums: gradients.Sums | None) -> Tensor:
        ctx.head, ctx.sums = weight, sums
        ctx.save_for_backward(hidden, weight)
        return multiply(hidden, weight.t())  # PyTorch would compile code for each new number of tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        dhidden = multiply(dlogits, weight) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dhidden, None, None
        dweight = multiply(dlogits.t(), hidden)
        if ctx.sums is None:
            return dhidden, dweight, None
        ctx.sums.add_wide(ctx.head, dweight)  # half precision would lose small terms
        return dhidden, None, None


class _ChosenLogProbs(torch.autograd.Function):
    """The log-probs of given tokens, computed in tiles of logits, of which only a log-sum-exp per token is stored.

    Formula: d log π(a) / dz = e_a − π for a token a, with z = h·Wᵀ / temperature, π = softmax(z), e_a = one-hot(a).

    Source: Wijmans et al. 2024, arXiv:2411.09009.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        sums: gradients.Sums | None,
        known: Tensor | None,
        figures: _Figures | None,
    ) -> Tensor:
        ctx.temperature, ctx.head, ctx.sums = temperature, weight, sums
        if known is not None:
            chosen = (hidden * weight[ids]).sum(1) / temperature
            ctx.save_for_backward(hidden, weight, ids, chosen - known)
            return known.clone()
        if (native := _native(hidden, weight)) is not None:
            logp, chosen = _sampler_logprobs(native, hidden, weight, ids, temperature, figures)
            ctx.save_for_backward(hidden, weight, ids, chosen / temperature - logp)
            return logp
        kind = upcast(weight[:0]).dtype
        top = torch.full(ids.shape, -torch.inf, dtype=kind, device=ids.device)
        total, chosen = torch.zeros_like(top), torch.zeros_like(top)
        for rows, columns, logits, _ in _tiles(hidden, weight, temperature):
            hit, token = _hits(ids[rows], columns)
            chosen[rows] = torch.where(hit, logits.gather(1, token)[:, 0], chosen[rows])
            if figures is not None:
                figures.add(rows, columns, logits.clone())
            higher = torch.maximum(top[rows], logits.amax(1)).clamp_(min=torch.finfo(kind).min)
            total[rows] *= top[rows].sub_(higher).exp_()
            total[rows] += logits.sub_(higher[:, None]).exp_().sum(1)
            top[rows] = higher
        normaliser = total.log_().add_(top)
        ctx.save_for_backward(hidden, weight, ids, normaliser)
        return chosen - normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp: Tensor) -> tuple[Any, ...]:
        hidden, weight, ids, normaliser = ctx.saved_tensors
        use = _HeadUse(hidden, ctx.head, ids, normaliser, dlogp, ctx.temperature)
        # a sum in half precision would lose small products
        dhidden = torch.zeros_like(hidden, dtype=normaliser.dtype) if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.sums is not None:
            dweight = None if ctx.sums.defers(ctx.head, use) else ctx.sums.of(ctx.head)
        elif ctx.needs_input_grad[1]:
            # If one tile holds all states, its products are complete. Half precision suffices, and saves memory for activations.
            dweight = torch.zeros_like(weight, dtype=normaliser.dtype if len(hidden) > TILE_ROWS else weight.dtype)
        if dhidden is not None or dweight is not None:
            use.add_products(dhidden, dweight, slice(0, len(weight)))
        back = (dhidden, None if ctx.sums is not None else dweight)
        return *(None if x is None else x.to(hidden.dtype) for x in back), None, None, None, None, None


class _Figures:
    """The most probable token and the entropy at each of M positions, from tiles of logits divided by the temperature."""

    def __init__(self, count: int, like: Tensor) -> None:
        self._top, self._total, self._mean = (like.new_zeros(count) for _ in range(3))  # m, Σ eᶻ⁻ᵐ, Σ eᶻ⁻ᵐ(z − m)
        self._top.fill_(-1e30)
        self.best = torch.zeros(count, dtype=torch.long, device=like.device)

    def add(self, rows: slice, columns: slice, logits: Tensor) -> None:
        """Add a tile: the `logits` z of the hidden states `rows` and the token ids `columns`. The logits are overwritten."""
        highest, place = logits.max(1)
        self.best[rows] = torch.where(highest > self._top[rows], place + columns.start, self.best[rows])
        higher = torch.maximum(self._top[rows], highest)
        below = logits.sub_(higher[:, None]).clamp_(min=-1e4)  # 0 · log 0 = 0
        drop, share = self._top[rows] - higher, below.exp()
        self._mean[rows] += drop * self._total[rows]
        for held, new in ((self._mean, torch.linalg.vecdot(share, below)), (self._total, share.sum(1))):
            held[rows] = held[rows] * drop.exp() + new
        self._top[rows] = higher

    def entropy(self) -> Tensor:
        """Return the entropy [M] in nats: log Σ eᶻ⁻ᵐ − Σ eᶻ⁻ᵐ(z − m) / Σ eᶻ⁻ᵐ, with z the logits and m their maximum."""
        return self._total.log() - self._mean / self._total


class _RowLogProbs(torch.autograd.Function):
    """The log-probs of given tokens on a GPU. `want_best` also requests the most probable tokens, `want_entropy` entropies."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        sums: gradients.Sums | None,
        want_best: bool,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns: list[tuple[Tensor, ...]] = []
        kind = upcast(weight[:0]).dtype
        for rows, stored in _chunks(hidden, weight):
            columns.append(_statistics(stored, ids[rows], temperature, kind, want_best, want_entropy))
        logp, chosen, entropy, highest = (torch.cat(parts) for parts in zip(*columns, strict=True))
        ctx.temperature, ctx.head, ctx.sums = temperature, weight, sums
        ctx.save_for_backward(hidden, weight, ids, upcast(chosen) / temperature - logp)
        ctx.mark_non_differentiable(highest, entropy)
        return logp, highest, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp: Tensor, *_: Tensor) -> tuple[Any, ...]:
        hidden, weight, ids, normaliser = ctx.saved_tensors
        sums, wide = ctx.sums, normaliser.dtype
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.needs_input_grad[1]:
            use = _HeadUse(hidden, ctx.head, ids, normaliser, dlogp, ctx.temperature)
            if sums is None or weight.dtype != wide:
                dweight = torch.zeros_like(weight, dtype=wide)
            else:
                dweight = None if sums.defers(ctx.head, use) else sums.of(ctx.head)
        slope = dlogp / ctx.temperature
        less = -slope
        room: list[Tensor] = []
        for rows, stored in _chunks(hidden, weight):
            given = _gradient(stored, ids[rows], normaliser[rows], slope[rows], less[rows], ctx.temperature, room)
            if dhidden is not None:
                multiply(given, weight, out=dhidden[rows])
            if dweight is not None:
                _add_product(dweight, given.t(), hidden[rows])
        if sums is not None and dweight is not None and weight.dtype != wide:
            sums.add_wide(ctx.head, dweight)
        kept = dweight.to(weight.dtype) if sums is None and dweight is not None else None
        return dhidden, kept, None, None, None, None, None


def _statistics(
    stored: Tensor, ids: Tensor, temperature: float, wide: torch.dtype, want_best: bool, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log-probs of `ids`, logits of `ids`, entropies, most probable tokens), [rows] each, from logits `stored` [rows, V].

    Log-probs and entropies have the dtype `wide`. The last two are arbitrary unless requested.
    """
    triton = gpu_kernels(stored) if wide == torch.float32 else None
    if triton is not None:
        found: tuple[Tensor, Tensor, Tensor, Tensor] = triton.log_probs(stored, ids, temperature)
        return found
    log_pi = torch.log_softmax(stored if temperature == 1.0 else upcast(stored) / temperature, -1, dtype=wide)
    logp, chosen = log_pi.gather(1, ids[:, None])[:, 0], stored.gather(1, ids[:, None])[:, 0]
    highest = stored.argmax(1) if want_best else ids
    return logp, chosen, torch.special.entr(log_pi.exp_(), out=log_pi).sum(1) if want_entropy else logp, highest


def _gradient(
    stored: Tensor, ids: Tensor, normaliser: Tensor, slope: Tensor, less: Tensor, temperature: float, room: list[Tensor]
) -> Tensor:
    """Overwrite the logits `stored` with their gradient slope · (one-hot(ids) − softmax(stored / temperature)), and return it.

    `slope` [rows] is the log-probs' gradient divided by the temperature, `less` is −slope, `normaliser` [rows] the log-sum-exp.
    `room` is one list for all chunks, empty at first, that keeps a buffer. The first chunk must be the largest.
    """
    wide = normaliser.dtype
    if (triton := gpu_kernels(stored) if wide == torch.float32 else None) is not None:
        triton.logit_gradient(stored, ids, normaliser, slope, temperature)
        return stored
    if not room:
        room.append(stored if stored.dtype == wide else torch.empty_like(stored, dtype=wide))
    back = room[0][: len(stored)]
    torch.sub(stored, (normaliser if temperature == 1.0 else normaliser * temperature)[:, None], out=back)
    back = back if temperature == 1.0 else back.div_(temperature)
    back.exp_().mul_(less[:, None]).scatter_add_(1, ids[:, None], slope[:, None])
    return back if back.dtype == stored.dtype else stored.copy_(back)


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, logits [rows, V]) for chunks of the hidden states. The first chunk is the largest.

    The logits of a chunk overwrite those of the previous one.
    """
    height = min(len(hidden), max(1, TILE_ELEMENTS * TILE_ON_GPU // len(weight)))
    room = hidden.new_empty(height, len(weight))
    for top in range(0, len(hidden), height):
        rows = slice(top, min(top + height, len(hidden)))
        yield rows, multiply(hidden[rows], weight.t(), out=room[: rows.stop - rows.start])


def _on_gpu(x: Tensor) -> bool:
    return x.device.type != "cpu"


@dataclass(frozen=True)
class _HeadUse:
    """The tensors that give an LM head's gradients: its inputs, the log-sum-exp per token, and the log-probs' gradient."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    normaliser: Tensor
    dlogp: Tensor
    temperature: float

    @property
    def size(self) -> int:
        """The number of elements that this object stores."""
        return self.hidden.numel() + 3 * len(self.ids)

    @torch.no_grad()
    def add_to(self, out: Tensor, rows: slice) -> None:
        """Add the gradient of `weight[rows]`, a part of the head's weight, to `out`, which has the shape of that part."""
        self.add_products(None, out, rows)

    def add_products(self, dhidden: Tensor | None, dweight: Tensor | None, tokens: slice) -> None:
        """Add to `dhidden` and `dweight` the gradients that come from the logits of `tokens`, a range of the vocabulary.

        `dhidden` [M, E] is the gradient of the hidden states, and `dweight` that of the weight's rows `tokens`.
        """
        weight, ids = self.weight.detach()[tokens], self.ids - tokens.start
        for rows, columns, logits, stored in _tiles(self.hidden, weight, self.temperature):
            slope = self.dlogp[rows] / self.temperature
            back = logits.sub_(self.normaliser[rows, None]).exp_().mul_(-slope[:, None])
            hit, token = _hits(ids[rows], columns)
            back.scatter_add_(1, token, (slope * hit)[:, None])
            given = back if back.dtype == weight.dtype else stored.copy_(back)
            if dhidden is not None:
                _add_product(dhidden[rows], given, weight[columns])
            if dweight is not None:
                _add_product(dweight[columns], given.t(), self.hidden[rows])


def _native(hidden: Tensor, weight: Tensor) -> Kernels | None:
    """Return psigrad's C++ kernels if they can compute log-probs for this device and dtype, else None."""
    native = kernels() if hidden.device.type == "cpu" and hidden.dtype == weight.dtype else ""
    return None if isinstance(native, str) or weight.dtype not in native.dtypes else native


def _sampler_logprobs(
    native: Kernels, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, figures: _Figures | None
) -> tuple[Tensor, Tensor]:
    """Return (log-probs [M], logits [M]) of the tokens `ids`. The log-probs have the same bits as the sampler's."""
    height = max(1, min(len(hidden), TILE_ELEMENTS // STRETCH))
    most = TILE_ELEMENTS if figures is None else TILE_ELEMENTS // 4  # figures make three copies of a tile
    width = max(1, most // height // STRETCH) * STRETCH
    room = hidden.new_empty(height * min(width, len(weight)))
    chosen = torch.zeros(len(ids))
    sums = torch.empty(len(ids), -(-len(weight) // STRETCH), 2, dtype=torch.float64)
    for top in range(0, len(hidden), height):
        rows = slice(top, min(top + height, len(hidden)))
        for left in range(0, len(weight), width):
            columns = slice(left, min(left + width, len(weight)))
            shape = (rows.stop - top, columns.stop - left)
            logits = multiply(hidden[rows], weight[columns].t(), out=room[: shape[0] * shape[1]].view(shape))
            hit, token = _hits(ids[rows], columns)
            chosen[rows] = torch.where(hit, logits.gather(1, token)[:, 0].float(), chosen[rows])
            native.log_probs.sum_stretches(sums[rows, left // STRETCH :], logits, temperature)
            if figures is not None:
                figures.add(rows, columns, logits.to(torch.float32, copy=True).div_(temperature))
    return native.log_probs.of(chosen, sums, temperature), chosen


def _tiles(hidden: Tensor, weight: Tensor, temperature: float) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield tiles of the logits as (rows of `hidden`, rows of `weight`, logits, stored). A tile overwrites the previous one.

    `logits` are in at least float32 and divided by the temperature. `stored` is a buffer of their shape in the weight's dtype.
    """
    height = min(len(hidden), TILE_ROWS)
    width = min(len(weight), max(1, TILE_ELEMENTS // height))
    room = hidden.new_empty(height * width)
    wide = room if room.dtype == upcast(room[:0]).dtype else torch.empty_like(room, dtype=torch.float32)
    for top in range(0, len(hidden), height):
        rows = slice(top, min(top + height, len(hidden)))
        for left in range(0, len(weight), width):
            columns = slice(left, min(left + width, len(weight)))
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            stored, logits = (x[: shape[0] * shape[1]].view(shape) for x in (room, wide))
            multiply(hidden[rows], weight[columns].t(), out=stored)
            if logits.dtype != stored.dtype:
                logits.copy_(stored)
            yield rows, columns, logits.div_(temperature) if temperature != 1.0 else logits, stored


def _hits(ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return (mask [m] of the ids in the range `columns`, indices [m, 1] in this range). Other ids get an arbitrary index."""
    hit = (ids >= columns.start) & (ids < columns.stop)
    return hit, (ids - columns.start).clamp_(0, columns.stop - columns.start - 1)[:, None]


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute out ← out + a·b. The product a·b is computed in the dtype of `a`, and then added in the dtype of `out`."""
    if out.dtype == a.dtype:
        multiply(a, b, out, base=out)
    else:
        out.add_(multiply(a, b))


def _check_ids(ids: Tensor, count: int) -> None:
    if _on_gpu(ids):  # the assertion does not wait for the GPU
        return torch._assert_async(((ids >= 0) & (ids < count)).all(), "A target is not a token of the head.")
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        raise IndexError(f"A target has the id {wrong}, but the LM head has {count} tokens; use the tokenizer of this model.")


def token_stats(
    hidden: Tensor,
    ids: Tensor,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    request: TokenStatsRequest,
    reference_hidden: Tensor | Top | None = None,
    cached: CachedLogProbs | None = None,
) -> TokenStats:
    """Return the `TokenStats` of tokens `ids` [M], whose logits are `head(hidden)` [M, V], computed in chunks of tokens.

    `vocabulary` is V. A divergence needs `reference_hidden`: the reference's hidden states or `Top`. `cached` log-probs are used
    where possible.
    """
    linear: Any = head if (plain := type(head) is nn.Linear and head.bias is None) else None
    if plain and _on_gpu(hidden) and request.is_closed_form and len(ids):
        _check_ids(ids, len(linear.weight))
        sums = gradients.sums_for(linear.weight) or gradients.wide_sums_for(linear.weight)
        looked_at = request.accuracy, bool(request.entropy)
        logp, best, entropies = _RowLogProbs.apply(hidden, linear.weight, ids, request.temperature, sums, *looked_at)
        hit = (best == ids).to(logp.dtype) if request.accuracy else None
        return TokenStats(logp, entropies if request.entropy else None, hit=hit)
    closed = plain and (request.logp_only or (request.is_closed_form and request.entropy is not True))
    # Autograd would store five to seven copies of the logits, of a different size in every pass. It is used only for few logits.
    large = hidden.shape[0] * vocabulary > (TILE_ELEMENTS if request.logp_only else TILE_ELEMENTS // 4)
    if closed and len(ids) and (large or (request.logp_only and _native(hidden, linear.weight) is not None)):
        _check_ids(ids, len(linear.weight))
        # The normaliser is a logit minus its cached log-prob. Logits that were rounded differently would not give it.
        exact = cached is not None and hidden.dtype == linear.weight.dtype == torch.float32
        known = cached.for_head(linear.weight, request.temperature) if cached is not None and exact else None
        figures = None if request.logp_only else _Figures(len(ids), upcast(hidden[:0]).detach())
        given = (ids, request.temperature, gradients.sums_for(linear.weight), known if figures is None else None, figures)
        logp = _ChosenLogProbs.apply(hidden, linear.weight, *given)
        hit = (figures.best == ids).to(logp.dtype) if figures is not None and request.accuracy else None
        entropy = figures.entropy() if figures is not None and request.entropy else None
        return TokenStats(logp, entropy, hit=hit)
    rows = max(1, CHUNK_ELEMENTS * (CHUNK_ON_GPU if _on_gpu(hidden) else 1) // vocabulary)
    whole = hidden.shape[0] <= rows or not torch.is_grad_enabled()
    sums = gradients.wide_sums_for(linear.weight) if plain and not whole else None

    def chunk(h: Tensor, i: Tensor, r: Tensor | Top | None) -> tuple[Tensor, ...]:
        return request.of(_Logits.apply(h, linear.weight, sums) if plain else head(h), i, r)

    parts = []
    for start in range(0, max(hidden.shape[0], 1), rows):
        cut = slice(start, start + rows)
        args = (hidden[cut], ids[cut], None if reference_hidden is None else reference_hidden[cut])
        parts.append(chunk(*args) if whole else checkpoint(chunk, *args, use_reentrant=False))
    logp, entropy, kl, hit, mean_logp = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return TokenStats(
        logp,
        entropy if request.entropy else None,
        kl if request.reference_head is not None else None,
        hit if request.accuracy else None,
        mean_logp=mean_logp if request.mean_logp else None,
    )
