"""Packed rows in the recurrent layers of transformers models: the gated delta rule, Mamba-2 and short convolutions.

transformers has no registry for recurrences, so `attach` replaces the functions that these layers call. The new functions get
the `Layout` of a packed row as a keyword argument.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import ACT2FN

from psigrad.kernels.kernels import Kernels, kernels
from psigrad.kernels.state_kernels import Tensors, Trees
from psigrad.language.models.attention import Layout
from psigrad.language.models.segments import ShortConvolution

Function = Callable[..., Any]


def attach(network: nn.Module) -> None:
    """Make the recurrent layers of `network` call psigrad's functions, which support packed rows.

    The attribute `has_state` of each recurrent layer is set to its `Switch`.
    """
    for module in network.modules():
        own: Any = inspect.unwrap(type(module).forward)
        called = set(getattr(getattr(own, "__code__", None), "co_names", ())) & _MADE.keys()
        index: Any = getattr(module, "layer_idx", None)
        if called and index is not None and isinstance(own, types.FunctionType):
            switch = Switch()
            made = {name: _MADE[name](own.__globals__[name], index, switch) for name in called}
            run = types.FunctionType(own.__code__, {**own.__globals__, **made}, own.__name__, own.__defaults__, own.__closure__)
            run.__kwdefaults__ = own.__kwdefaults__
            mixer: Any = module
            mixer.has_state = switch
            mixer.forward = types.MethodType(run, module)  # a copy of the model binds it to the copied mixer


class Switch:
    """A recurrent layer's switch for C++ kernels on packed rows. If off, `native` is None. A layer's copies share the switch."""

    native: Kernels | None = None

    def __deepcopy__(self, memo: Any) -> Switch:
        return self


def _convolution(own: Function, layer: int, switch: Switch) -> Function:
    """Return a function that replaces transformers' `causal_conv1d_fn`, `own`, in layer number `layer`, for packed rows too."""

    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        layout: Layout | None = None,
        **given: Any,
    ) -> Tensor:
        if layout is None:
            made: Tensor = own(hidden_states, weight, bias, activation=activation, **given)
            return made
        rows = hidden_states.transpose(1, 2)  # [B, C, S] to the row's [B, S, C]
        act: Any = ACT2FN[activation] if activation is not None else torch.nn.Identity()

        def kernel(x: Tensor, windows: Tensor) -> Tensor | None:
            native = switch.native
            if native is None or activation not in (None, "silu", "swish") or x.dtype not in native.dtypes:
                return None
            made: Tensor = ConvolutionFunction.apply(native, x.contiguous(), weight, bias, windows, activation is not None)
            return made

        out = layout.convolve(layer, rows.flatten(0, 1).to(weight.dtype), ShortConvolution(weight, bias, act, kernel))
        turned: Tensor = out.to(hidden_states.dtype).unflatten(0, rows.shape[:2]).transpose(1, 2)
        return turned

    return convolve


def _delta_rule(own: Function, layer: int, switch: Switch) -> Function:
    """Return a function that replaces transformers' chunked delta rule `own` (Qwen, Kimi); see `_convolution`."""
    rule = DeltaRule(own, switch)

    def scan(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, layout: Layout | None = None, **given: Any
    ) -> tuple[Tensor, Any]:
        if layout is None:
            made: tuple[Tensor, Any] = own(query, key, value, g=g, beta=beta, **given)
            return made
        out = layout.scan(layer, rule, tuple(x.flatten(0, 1) for x in (query, key, value, g, beta)))
        return out.unflatten(0, query.shape[:2]), None

    return scan


def _mamba2(own: Function, layer: int, switch: Switch) -> Function:
    """Return a function that replaces `own`, transformers' `mamba2_chunk_scan`; see `_convolution`."""

    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        layout: Layout | None = None,
        **given: Any,
    ) -> Any:
        if layout is None:
            more = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, **given}
            return own(hidden_states, dt, A, B, C, chunk_size=chunk_size, **more)
        # computed here, so that padding tokens can have the time step 0
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        out = layout.scan(layer, Mamba2(own, A, chunk_size, switch), tuple(x.flatten(0, 1) for x in (hidden_states, dt, B, C)))
        out = out.unflatten(0, hidden_states.shape[:2])
        return out if D is None else out + D[:, None] * hidden_states

    return scan


def _never(own: Function, layer: int, switch: Switch) -> Function:
    """Return a function that replaces `own`, transformers' fused `mamba2_split_conv1d_scan_combined`.

    Since `own` cannot read a layout, the function returns None for packed sequences. The mixer then calls the functions of
    `_convolution` and `_mamba2` instead.
    """

    def scan(*args: Any, layout: Layout | None = None, **given: Any) -> Any:
        return own(*args, **given) if layout is None else None

    return scan


_MADE: dict[str, Callable[[Function, int, Switch], Function]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _never,
}


def _native(state: Tensor) -> Kernels | None:
    """Return the C++ kernels if they can compute a decoding step with this state, else None."""
    usable = state.device.type == "cpu" and state.dtype == torch.float32 and state.is_contiguous()
    found = kernels() if usable and not torch.is_grad_enabled() else ""
    return None if isinstance(found, str) else found


def _plain(inputs: Tensors) -> list[Tensor]:
    return [x.float().contiguous() for x in inputs]


class ConvolutionFunction(torch.autograd.Function):
    """The autograd function of `StateKernels.convolve`, for a weight [C, K]."""

    @staticmethod
    def forward(ctx: Any, native: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, silu: bool) -> Tensor:
        """Compute the convolution; see `StateKernels.convolve`."""
        plain = weight.t().float().contiguous(), None if bias is None else bias.float()
        ctx.native, ctx.how, ctx.dtype = native, (windows, silu), weight.dtype
        ctx.save_for_backward(x, *plain)
        return native.states.convolve(x, *plain, windows, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        """Return a gradient for each input of `forward`."""
        dx, dweight, dbias = ctx.native.states.convolve_gradient(dout.contiguous(), *ctx.saved_tensors, *ctx.how)
        return None, dx, dweight.t().to(ctx.dtype), None if dbias is None else dbias.to(ctx.dtype), None, None


class _Scan(torch.autograd.Function):
    """The autograd function of `StateKernels.chunks`, for states that start at 0."""

    @staticmethod
    def forward(ctx: Any, native: Kernels, trees: Trees, delta: bool, states: Tensor, *inputs: Tensor) -> Tensor:
        ctx.how, ctx.native = (states, trees, delta), native
        ctx.save_for_backward(*inputs)
        return native.states.chunks(inputs, states, trees, delta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        inputs, slopes = ctx.saved_tensors, torch.zeros_like(ctx.how[0])
        found = ctx.native.states.chunks_gradient(dout.contiguous(), slopes, inputs, *ctx.how)
        return None, None, None, None, *(d.to(x.dtype) for d, x in zip(found, inputs, strict=True))


def _scan(
    switch: Switch, trees: Trees, delta_rule: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Run `StateKernels.chunks` from zero states. Return (outputs, final states), or None if no kernel supports the tensors."""
    native = switch.native
    if native is None or g.dim() != 2 or v.dtype not in native.dtypes or not q.dtype == k.dtype == v.dtype:
        return None
    width = (q.shape[2], v.shape[2]) if delta_rule else (v.shape[2], q.shape[2])
    states = torch.empty(trees.states, v.shape[1], *width)
    rows = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
    out: Tensor = _Scan.apply(native, trees, delta_rule, states, *rows, g.float().contiguous(), beta.float().contiguous())
    return out, states


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule (Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464): S ← e^g S, then S ← S + β k (v - kᵀS), o = qᵀS/√D.

    S [D, V] is a head's state. Inputs are q and k [N, L, H_k, D], v [N, L, H, V], and g and β [N, L, H]; in Kimi models g is
    [N, L, H, D]. q and k are first scaled to length 1. `chunks` is transformers' function for whole sequences.
    """

    chunks: Function
    switch: Switch = field(default_factory=Switch)

    def scan_trees(self, inputs: Tensors, trees: Trees) -> tuple[Tensor, Tensor] | None:
        """Compute a packed row by C++ kernels; see `Recurrence.scan_trees`. The kernels do not support Kimi models."""
        q, k, v, g, beta = inputs
        made = _scan(self.switch, trees, True, q, k, v, g, beta)
        return None if made is None else (made[0].to(q.dtype), made[1])

    def scan(self, inputs: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute whole sequences by transformers' function; see `Recurrence.scan`."""
        q, k, v, g, beta = inputs
        given = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        made: tuple[Tensor, Tensor] = self.chunks(q, k, v, g=g, beta=beta, **given)
        return made

    def step(self, inputs: Tensors, state: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute one token of each sequence, by the C++ kernel if possible; see `Recurrence.step`."""
        if (native := _native(state)) is not None:
            q, k, v, g, beta = _plain(inputs)
            return native.states.delta_rule(state, q, k, v, g, beta, slots).to(inputs[0].dtype), state
        return self.step_by_torch(inputs, state if slots is None else state[slots])

    def step_by_torch(self, inputs: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `step` in PyTorch, without changing `state`."""
        q, k, v, g, beta = (x.float() for x in inputs)
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q * q.shape[-1] ** -0.5, k))
        state = state * (g if g.dim() == 3 else g[..., None]).exp()[..., None]
        change = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
        state = state + k[..., None] * change[..., None, :]
        return (q[..., None, :] @ state)[..., 0, :].to(inputs[0].dtype), state


@dataclass(frozen=True)
class Mamba2:
    """The recurrence of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): S ← e^(Δ·A) S + Δ x ⊗ B, y = S·C.

    Inputs are x [N, L, H, P], time steps Δ [N, L, H], and B and C [N, L, groups, states]. `A` [H] is negative. `chunks` is
    transformers' function for whole sequences, in chunks of `size` tokens.
    """

    chunks: Function
    A: Tensor
    size: int
    switch: Switch = field(default_factory=Switch)

    def scan_trees(self, inputs: Tensors, trees: Trees) -> tuple[Tensor, Tensor] | None:
        """Compute a packed row by C++ kernels; see `Recurrence.scan_trees`."""
        x, dt, b, c = inputs
        return _scan(self.switch, trees, False, c, b, x, dt.float() * self.A.float(), dt)

    def scan(self, inputs: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute whole sequences by transformers' function; see `Recurrence.scan`."""
        x, dt, b, c = inputs
        given = {"chunk_size": self.size, "initial_states": state, "return_final_states": True}
        out, after = self.chunks(x, dt, self.A, b, c, **given)
        return out, after

    def step(self, inputs: Tensors, state: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute one token of each sequence, by the C++ kernel if possible; see `Recurrence.step`."""
        native, (x, dt, b, c) = _native(state), _plain(inputs)
        if native is not None:
            return native.states.mamba2(state, x, dt, self.A.detach().float(), b, c, slots), state
        return self.step_by_torch(inputs, state if slots is None else state[slots])

    def step_by_torch(self, inputs: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `step` in PyTorch, without changing `state`."""
        x, dt, b, c = (y.float() for y in inputs)
        b, c = (y.repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (b, c))
        state = state * (dt * self.A.float()).exp()[..., None, None] + (dt[..., None] * x)[..., None] * b[..., None, :]
        return (state @ c[..., None])[..., 0], state
