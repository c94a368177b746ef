"""Mixtures of experts in fused layers, instead of a feed-forward layer.

The experts of each token are chosen by transformers' router module, whose hooks can record and replace its choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from psigrad.errors import kind_of
from psigrad.kernels.products import Products
from psigrad.language.models.experts import FixedChoice
from psigrad.language.models.fused.families import LayerWeights, Unsupported
from psigrad.language.models.fused.layer import Layer, WeightGradients


class _Pairs:
    """The (token, expert) pairs of W tokens, sorted by expert. `choice` [W, k] has the k experts of each token."""

    def __init__(self, choice: Tensor, experts: int) -> None:
        flat = choice.flatten()
        self.order = flat.argsort(stable=True)
        """[W·k] the index that each sorted pair has in the flattened `choice`."""
        self.tokens, self.experts = self.order // choice.shape[1], flat.index_select(0, self.order)
        """[W·k] the token and the expert of each sorted pair."""
        self.inverse = torch.empty_like(self.order).index_copy_(0, self.order, torch.arange(len(flat)))
        ends = [0, *flat.bincount(minlength=experts).cumsum(0).tolist()]
        self.spans = [(e, slice(a, b)) for e, (a, b) in enumerate(itertools.pairwise(ends)) if a < b]
        """(expert, the slice of its sorted pairs) for each expert that has any."""

    def sum(self, rows: Tensor, tokens: int) -> Tensor:
        """Return [W, E], the sum of each token's k rows. `rows` [W·k, E] has one row per sorted pair, and `tokens` is W."""
        return rows.index_select(0, self.inverse).view(tokens, -1, rows.shape[1]).sum(1)


class _KernelLinear(TorchFunctionMode):
    """A context in which `F.linear` computes exactly the same result for a row, however many other rows its input has."""

    def __init__(self, products: Products) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        x, weight, *bias = args
        return self.products.linear(x, weight, x.new_empty(len(x), len(weight)), *bias, exact=True)


class _WithoutHooks(nn.Module):
    """A module that calls `router.forward` directly, without the router's hooks."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> Any:
        return self.router.forward(x)


class ExpertLayer(Layer):
    """A layer with experts: y = h + r·Σ_e w_e·down_e(act(gate_e(n)) · up_e(n)) with n = norm(h).

    h is the residual stream after attention, r the residual multiplier. The router chooses the experts e and the weights w_e.
    """

    sparse = True
    feed_forward = ()
    feed_others: Sequence[str] = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    router = "gate"
    transposed = False
    """True if the experts' matrices are stored as [experts, in, out]."""

    def __init__(self, index: int, module: Any, *given: Any) -> None:
        for part in (module.mlp.experts, getattr(module.mlp, self.router)):
            if not type(part).__module__.startswith("transformers."):
                raise Unsupported(f"experts or routers have adapters ({kind_of(part)})")
        super().__init__(index, module, *given)
        self._names = [path.partition(".")[2] for path in self.feed_others if path.startswith(f"{self.router}.")]

    def _expand(self, plain: LayerWeights) -> LayerWeights:
        """Return `plain` with each expert's matrices [gate|up] and down appended, each in a group of its own."""

        def alternate(both: Sequence[Tensor]) -> list[Tensor]:
            return list(itertools.chain(*zip(*(x.unbind() for x in both), strict=True)))

        up, down, *biases = plain.feed[len(self._names) :]
        matrices = [*plain.matrices, *alternate([x.mT if self.transposed else x for x in (up, down)])]
        more = range(len(plain.matrices), len(matrices))
        none, groups = [None] * len(more), [*plain.groups, *((i,) for i in more)]
        added = [*plain.biases, *(alternate(biases) if biases else none)]
        return replace(plain, groups=groups, matrices=matrices, biases=added, lora=[*plain.lora, *none])

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """(number of experts, experts per token, width of an expert)."""
        experts, *shape = self._mlp.experts.gate_up_proj.shape
        return experts, int(getattr(self._mlp, self.router).top_k), shape[self.transposed] // 2

    @property
    def feed_kinds(self) -> list[tuple[int, torch.dtype]]:
        """(width, dtype) of each tensor that `feed` returns for `feed_gradient`."""
        experts, chosen, inner = self._sizes
        return [(self.width, self.dtype), (2 * inner * chosen, self.dtype), (chosen, torch.int64), (experts, self.dtype)]

    def _route(self, normed: Tensor, given: Sequence[Tensor], again: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's (logits [W, experts], weights w_e [W, k], chosen experts [W, k]) for W tokens, `normed` [W, E].

        `given` are the router's parameters. `again` disables the hooks that record or set choices.
        """
        router = getattr(self._mlp, self.router)
        names = [f"router.{name}" if again else name for name in self._names]
        made: tuple[Tensor, Tensor, Tensor]
        made = functional_call(_WithoutHooks(router) if again else router, dict(zip(names, given, strict=True)), (normed,))
        return made

    def _multiply(self, which: int, x: Tensor, width: int, pairs: _Pairs, weights: LayerWeights) -> Tensor:
        """Multiply each pair's row of `x` by its expert's [gate|up] (`which` 0) or down (1). The result has `width` columns."""
        out = x.new_empty(len(x), width)
        for e, rows in pairs.spans:
            weights.apply(2 + 2 * e + which, x[rows], out[rows])
        return out

    def activate(self, both: Tensor) -> Tensor:
        """Return act(gate) · up, the input of the experts' down matrices, from the outputs `both` of their [gate|up] matrices."""
        return self.native.gated(both, self.gelu)

    def activate_gradient(self, both: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the gradient of `both`, y = `activate(both)`) from the gradient `dy` of y. The arguments may be overwritten."""
        return self.native.gradients.gated(both, dy, self.gelu, in_place=True)

    def feed(self, middle: Tensor, weights: LayerWeights, plain: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return (the layer's output, four tensors for `feed_gradient`); see `Layer.feed`.

        The four tensors are `middle`, the outputs of the experts' [gate|up], the chosen experts, and the router's logits.
        """
        normed, (experts, _, inner) = self._norm(middle, weights.norms[1]), self._sizes
        with _KernelLinear(self.native.products):
            logits, share, choice = self._route(normed, weights.feed[: len(self._names)])
        pairs = _Pairs(choice, experts)
        both = self._multiply(0, normed.index_select(0, pairs.tokens), 2 * inner, pairs, weights)
        out = self._multiply(1, self.activate(both), middle.shape[1], pairs, weights)
        out *= share.flatten().index_select(0, pairs.order)[:, None]
        total = pairs.sum(out, len(middle))
        if weights.norms[3] is not None:
            plain.append(total)
        y = self.native.products.add(middle, self._norm(total, weights.norms[3]), self.residual)
        return y, (middle, both.index_select(0, pairs.inverse).view(len(middle), -1), choice, logits)

    def feed_gradient(self, dy: Tensor, kept: list[Tensor], made: WeightGradients, overwrite: bool) -> Tensor:
        """Return the gradient; see `Layer.feed_gradient`. `kept[3]` is the gradient of the router's logits."""
        middle, both, choice, dlogits = (kept.pop(0) for _ in range(4))
        weights, (experts, chosen, inner) = made.weights, self._sizes
        dout, normed, pairs = made.before_residual(1, dy, kept), self._norm(middle, weights.norms[1]), _Pairs(choice, experts)
        with torch.enable_grad(), FixedChoice(choice, experts):
            given = [x.detach().requires_grad_() for x in (normed, *weights.feed[: len(self._names)])]
            logits, share, _ = self._route(given[0], given[1:], again=True)
        scale = share.detach().flatten().index_select(0, pairs.order)[:, None]
        dpairs, both = dout.index_select(0, pairs.tokens), both.view(-1, 2 * inner).index_select(0, pairs.order)
        dactive = self._input_grads(1, dpairs, inner, pairs, weights)
        dboth, active = self.activate_gradient(both, dactive * scale)
        dshare = (dactive * active).sum(1)
        if weights.biases[-1] is not None:
            dshare += (dpairs * weights.feed[-1].index_select(0, pairs.experts)).sum(1)
        dshare = dshare.index_select(0, pairs.inverse).view(len(middle), chosen)
        dnormed, *drouter = torch.autograd.grad((logits, share), given, (dlogits, dshare.to(share.dtype)))
        dnormed = dnormed + pairs.sum(self._input_grads(0, dboth, middle.shape[1], pairs, weights), len(middle))
        made.feed = [*drouter, *self._learn(made, (dboth, dpairs * scale), (normed.index_select(0, pairs.tokens), active), pairs)]
        dx = dy.clone()
        made.add_through_norm(1, dx, middle, dnormed)
        return dx

    def _input_grads(self, which: int, dy: Tensor, width: int, pairs: _Pairs, weights: LayerWeights) -> Tensor:
        """Return the gradient of `_multiply`'s input rows x [W·k, `width`]. `dy` is the gradient of its result."""
        out = dy.new_empty(len(dy), width)
        for e, rows in pairs.spans:
            self.native.products.of(dy[rows], weights.matrices[len(self._linear) + 2 * e + which], out[rows])
        return out

    def _learn(self, made: WeightGradients, dys: Sequence[Tensor], xs: Sequence[Tensor], pairs: _Pairs) -> list[Tensor | None]:
        """Return the gradients of the experts' [gate|up] and down matrices (None if frozen), then of their biases, if any.

        `dys` are the gradients of these matrices' outputs, and `xs` their inputs, with one row per pair.
        """
        found: list[Tensor | None] = []
        first = len(self._linear) + sum(norm is not None for norm in made.weights.norms) + len(self.others) + len(self._names)
        given = made.weights.feed[len(self._names) :]
        for weight, learns, dy, x in zip(given, made.learns[first : first + 2], dys, xs, strict=False):
            if not learns:
                found.append(None)
                continue
            found.append(gradient := torch.zeros_like(weight))
            a, b = (x, dy) if self.transposed else (dy, x)
            for e, rows in pairs.spans:
                self.native.products.of(a[rows].t(), b[rows], gradient[e])
        return found + [torch.zeros_like(bias).index_add_(0, pairs.experts, dy) for bias, dy in zip(given[2:], dys, strict=False)]


class ClampedExpertLayer(ExpertLayer):
    """A layer with the experts of gpt-oss. Their matrices have biases, and their activation is clamped (`activate`).

    The outputs of gate and up are interleaved in the outputs of [gate|up].
    """

    feed_others = (
        *("router.weight", "router.bias", "experts.gate_up_proj", "experts.down_proj"),
        *("experts.gate_up_proj_bias", "experts.down_proj_bias"),
    )
    router = "router"
    transposed = True

    def activate(self, both: Tensor) -> Tensor:
        """Return (up + 1)·gate·sigmoid(α·gate) from `both`, with gate and up clamped. `experts` has α and the limit."""
        limit, alpha = self._mlp.experts.limit, self._mlp.experts.alpha
        gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    def activate_gradient(self, both: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the gradient of `both`, the result of `activate`); see `ExpertLayer.activate_gradient`."""
        with torch.enable_grad():
            active = self.activate(both.requires_grad_())
        return torch.autograd.grad(active, both, dy)[0], active.detach()
