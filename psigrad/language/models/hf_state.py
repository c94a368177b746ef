"""Layers with state inside any transformers model: the gated delta rule, Mamba-2 and short convolutions, over packed rows.

transformers lets a program register an attention, but no recurrence. Its mixers call a few global functions, and pass on the
keyword arguments of the forward call. So a mixer of a loaded model runs the same code with psigrad's functions under these names.
They read the layout of the packed row from the keywords: state and window begin at zero in each sequence, and those of a prompt
are computed once for its completions. Without a layout they are transformers' own.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from psigrad.kernels.kernels import Kernels, kernels
from psigrad.language.models.attention import Layout, Tensors

Function = Callable[..., Any]


def attach(network: nn.Module) -> None:
    """Give the mixers of `network` the functions that read layouts, and mark them by `has_state`."""
    for module in network.modules():
        own: Any = inspect.unwrap(type(module).forward)
        called = set(getattr(getattr(own, "__code__", None), "co_names", ())) & _MADE.keys()
        index: Any = getattr(module, "layer_idx", None)
        if called and index is not None and isinstance(own, types.FunctionType):
            made = {name: _MADE[name](own.__globals__[name], index) for name in called}
            run = types.FunctionType(own.__code__, {**own.__globals__, **made}, own.__name__, own.__defaults__, own.__closure__)
            run.__kwdefaults__ = own.__kwdefaults__
            mixer: Any = module
            mixer.has_state = True
            mixer.forward = types.MethodType(run, module)  # a copy of the model binds it to the copied mixer


def _convolution(own: Function, layer: int) -> Function:
    """Return `causal_conv1d_fn` for one layer."""

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
        out = layout.convolve(layer, rows.flatten(0, 1).to(weight.dtype), weight, bias)
        act: Any = ACT2FN[activation] if activation is not None else torch.nn.Identity()
        turned: Tensor = act(out).to(hidden_states.dtype).unflatten(0, rows.shape[:2]).transpose(1, 2)
        return turned

    return convolve


def _delta_rule(own: Function, layer: int) -> Function:
    """Return `torch_chunk_gated_delta_rule` or `chunk_kimi_delta_attention` for one layer."""
    rule = DeltaRule(own)

    def scan(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, layout: Layout | None = None, **given: Any
    ) -> tuple[Tensor, Any]:
        if layout is None:
            made: tuple[Tensor, Any] = own(query, key, value, g=g, beta=beta, **given)
            return made
        out = layout.scan(layer, rule, tuple(x.flatten(0, 1) for x in (query, key, value, g, beta)))
        return out.unflatten(0, query.shape[:2]), None

    return scan


def _mamba2(own: Function, layer: int) -> Function:
    """Return `mamba2_chunk_scan` for one layer."""

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
        # made here, so that padding can have a step of 0
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        out = layout.scan(layer, Mamba2(own, A, chunk_size), tuple(x.flatten(0, 1) for x in (hidden_states, dt, B, C)))
        out = out.unflatten(0, hidden_states.shape[:2])
        return out if D is None else out + D[:, None] * hidden_states

    return scan


def _never(own: Function, layer: int) -> Function:
    """Return `mamba2_split_conv1d_scan_combined` without its kernel, which knows no layout; a mixer then takes the other path."""

    def scan(*args: Any, layout: Layout | None = None, **given: Any) -> Any:
        return own(*args, **given) if layout is None else None

    return scan


_MADE: dict[str, Callable[[Function, int], Function]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _never,
}


def _native(state: Tensor) -> Kernels | None:
    """Return the kernels if they can step this state."""
    usable = state.device.type == "cpu" and state.dtype == torch.float32 and state.is_contiguous()
    found = kernels() if usable and not torch.is_grad_enabled() else ""
    return None if isinstance(found, str) else found


def _plain(inputs: Tensors) -> list[Tensor]:
    return [x.float().contiguous() for x in inputs]


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule (Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464): S ← e^g S, then S ← S + β k (v - kᵀS), o = qᵀS/√d.

    Inputs are queries and keys [N, L, H_k, D], values [N, L, H, V], and per head g (or per head and channel, Kimi) and β. Queries
    and keys are normalised. `chunks` is the function of the model's module.
    """

    chunks: Function

    def scan(self, inputs: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Recurrence.scan`."""
        q, k, v, g, beta = inputs
        given = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        made: tuple[Tensor, Tensor] = self.chunks(q, k, v, g=g, beta=beta, **given)
        return made

    def step(self, inputs: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.step`."""
        native = _native(state)
        if native is not None:
            return native.steps.delta_rule(state, *_plain(inputs)).to(inputs[0].dtype), state
        return self.step_by_torch(inputs, state)

    def step_by_torch(self, inputs: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `step` without the kernel; the state is not changed."""
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

    Inputs are x [N, L, H, P], steps Δ [N, L, H], and B and C [N, L, groups, states]. `A` [H] is negative. `chunks` is the
    function of the model's module, and `size` the number of tokens that it computes at once.
    """

    chunks: Function
    A: Tensor
    size: int

    def scan(self, inputs: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Recurrence.scan`."""
        x, dt, b, c = inputs
        given = {"chunk_size": self.size, "initial_states": state, "return_final_states": True}
        out, after = self.chunks(x, dt, self.A, b, c, **given)
        return out, after

    def step(self, inputs: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Recurrence.step`."""
        native, (x, dt, *rest) = _native(state), _plain(inputs)
        if native is not None:
            return native.steps.mamba2(state, x, dt, self.A.detach().float(), *rest), state
        return self.step_by_torch(inputs, state)

    def step_by_torch(self, inputs: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `step` without the kernel; the state is not changed."""
        x, dt, b, c = (y.float() for y in inputs)
        b, c = (y.repeat_interleave(x.shape[1] // y.shape[1], 1) for y in (b, c))
        state = state * (dt * self.A.float()).exp()[..., None, None] + (dt[..., None] * x)[..., None] * b[..., None, :]
        return (state @ c[..., None])[..., 0], state
