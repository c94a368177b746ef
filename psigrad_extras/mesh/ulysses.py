"""Context parallelism: each process has some tokens of a row and, in attention, all tokens of some heads.

Source: Ulysses, Jacobs et al. 2023, arXiv:2309.14509.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from psigrad.language.models.attention import SDPA, Layout, repeat_heads
from psigrad.language.models.packing import ForwardInputs


@dataclass(frozen=True)
class Ulysses:
    """The place of this process in context parallelism: `rank` of `size` processes that divide the tokens of each packed row."""

    group: Any
    rank: int
    size: int

    def share(self, inputs: ForwardInputs, layout: Layout) -> ForwardInputs:
        """Return this process's share of a packed row: its tokens, their layout, and the targets that they predict.

        All processes have the same number of tokens. The last tokens may be padding, to which nothing attends. A process without
        a target gets one that `gather` drops, so that its backward pass still runs through all layers.
        """
        rows = inputs.input_ids.shape[1]
        length = -(-rows // self.size)
        first = self.rank * length
        places = inputs.targets.rows
        mine = ((places >= first) & (places < first + length)).nonzero()[:, 0]
        targets = inputs.targets.some(mine if len(mine) or not len(places) else mine.new_zeros(1))
        ids, positions, texts = (
            None if x is None else F.pad(x, (0, length * self.size - rows))[:, first : first + length]
            for x in (inputs.input_ids, inputs.position_ids, inputs.token_hashes)
        )
        assert ids is not None and positions is not None
        return ForwardInputs(
            ids,
            positions,
            replace(targets, rows=(targets.rows - first).clamp(0, length - 1)),
            layout=DividedLayout(layout, rows, self),
            token_hashes=texts,
            local_targets=mine,
        )

    def gather(self, found: Tensor | None, mine: Tensor | None, whole: int) -> Tensor | None:
        """Gather the values `found` of all processes in a tensor [whole, …], at the indices `mine` of each process's targets.

        In the backward pass, each process gets the gradient of its own values. The loss of the full row is computed on all
        processes, but counts once.
        """
        return None if found is None else _Gather.apply(found, self, mine, whole)


@dataclass(frozen=True)
class DividedLayout:
    """The layout of a packed row of `rows` tokens, which several processes divide."""

    inner: Layout
    rows: int
    context: Ulysses
    packed_weights = slots = None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, how: Callable[..., Tensor] = SDPA
    ) -> Tensor:
        """Exchange tokens for heads, attend with the inner layout over all tokens of this process's heads, and exchange back.

        The shapes are those of `Layout.attend`, for this process's tokens.
        """
        size, heads = self.context.size, q.shape[1]
        if k.shape[1] % size:
            k, v = (repeat_heads(x, heads) for x in (k, v))
        q, k, v = (_Swap.apply(x, self.context, True)[:, :, : self.rows] for x in (q, k, v))
        if isinstance(how, functools.partial) and (sinks := how.keywords.get("sinks")) is not None:
            how = functools.partial(how, sinks=sinks.chunk(size)[self.context.rank])
        out = self.inner.attend(layer, q, k, v, scale, window, how)  # [1, S, H, D]
        out = F.pad(out, (0, 0, 0, 0, 0, -self.rows % size)).transpose(1, 2)
        back: Tensor = _Swap.apply(out, self.context, False)
        return back.transpose(1, 2)


class _Swap(torch.autograd.Function):
    """An all-to-all exchange from [1, H, S / n, D] (all heads of a process's tokens) to [1, H / n, S, D], or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Ulysses, to_heads: bool) -> Tensor:
        ctx.context, ctx.to_heads = context, to_heads
        parts = x[0].unflatten(0 if to_heads else 1, (context.size, -1))
        given = (parts if to_heads else parts.transpose(0, 1)).contiguous()
        made = torch.empty_like(given)
        dist.all_to_all_single(made, given, group=context.group)
        return (made.transpose(0, 1).flatten(1, 2) if to_heads else made.flatten(0, 1))[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back: Tensor = _Swap.apply(grad, ctx.context, not ctx.to_heads)
        return back, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Tensor, context: Ulysses, mine: Tensor, whole: int) -> Tensor:
        ctx.mine, ctx.own = mine, len(found)
        out = found.new_zeros(whole, *found.shape[1:])
        out[mine] = found[: len(mine)]
        dist.all_reduce(out, group=context.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        own = grad.index_select(0, ctx.mine)
        return own if len(own) == ctx.own else grad.new_zeros(ctx.own, *grad.shape[1:]), None, None, None
