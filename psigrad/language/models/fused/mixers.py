"""Mixers of fused layers: recurrences, convolutions, MLPs, and attention with gates or sinks. `Layer` has plain attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from psigrad.language.models.attention import FusedLayout
from psigrad.language.models.fused.families import NormFunction, eps_of, first_of
from psigrad.language.models.fused.gemma4 import Gemma4Layer
from psigrad.language.models.fused.layer import Layer, PassArguments
from psigrad.language.models.fused.mixtures import ClampedExpertLayer, ExpertLayer
from psigrad.language.models.hf_state import ConvolutionFunction, DeltaRule, Mamba2, Switch
from psigrad.language.models.segments import ShortConvolution

_UNUSED: Any = None  # in place of transformers' function for whole sequences, which the kernels replace


class GatedAttention(Layer):
    """Attention whose output is multiplied by the sigmoid of a gate (Qwen 3.5). One projection computes [q|gate] of each head."""

    def mix(self, row: Tensor, others: Sequence[Tensor], how: PassArguments) -> tuple[Tensor, Tensor]:
        """Compute attention from q, k and v in the projections `row`, before the gate is applied; see `Layer.mix`."""
        return super().mix(self._split_gate(row)[0], others, how)

    def gate(self, row: Tensor, mixed: Tensor) -> Tensor:
        """Return `mixed`, the output of attention, times the sigmoid of the gate in the projections `row`."""
        return (mixed.view(-1, self.heads.queries, self.heads.dim) * self._split_gate(row)[1].sigmoid()).flatten(1)

    def mix_gradient(
        self, dout: Tensor, row: Tensor, mixed: Tensor, normaliser: Tensor, others: Sequence[Tensor], how: PassArguments
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return gradients as `Layer.mix_gradient` does; the gate is a part of `row`, so its gradient is included."""
        qkv, gate = self._split_gate(row)
        share, shape = gate.sigmoid(), (-1, self.heads.queries, self.heads.dim)
        dmixed = (dout.view(shape) * share).flatten(1)
        dgate = (dout * mixed).view(shape) * (share * (1 - share))
        dqkv, dothers = super().mix_gradient(dmixed, qkv, mixed, normaliser, others, how)
        return self._join_gate(dqkv, dgate), dothers

    def _split_gate(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Split the projections `row` [S, …] into [q|k|v] [S, …] and the gate [S, H, D]."""
        width = 2 * self.heads.queries * self.heads.dim
        q, gate = row[:, :width].view(-1, self.heads.queries, 2, self.heads.dim).unbind(2)
        return torch.cat([q.flatten(1), row[:, width:]], 1), gate

    def _join_gate(self, dqkv: Tensor, dgate: Tensor) -> Tensor:
        """Return the gradient of `row` from the gradients of [q|k|v] and of the gate; see `_split_gate`."""
        dq, rest = dqkv.tensor_split([self.heads.queries * self.heads.dim], 1)
        return torch.cat([torch.stack([dq.view(dgate.shape), dgate], 2).flatten(1), rest], 1)


class SinkAttention(Layer):
    """Attention with a sink for each head (gpt-oss): one more score in the softmax, without a key or a value."""

    others = ("sinks",)

    def mix(self, row: Tensor, others: Sequence[Tensor], how: PassArguments) -> tuple[Tensor, Tensor]:
        """Compute attention; see `Layer.mix`. The softmax includes the sink, so the weights of the values sum to less than 1."""
        mixed, sums = super().mix(row, (), how)
        total = torch.logaddexp(sums, others[0].float())
        share = (sums - total).exp()[:, :, None]
        return (mixed.view(-1, self.heads.queries, self.heads.dim) * share).flatten(1).to(row.dtype), total

    def mix_gradient(
        self, dout: Tensor, row: Tensor, mixed: Tensor, normaliser: Tensor, others: Sequence[Tensor], how: PassArguments
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return gradients as `Layer.mix_gradient` does. `others` are the sinks."""
        dots = (dout * mixed).view(-1, self.heads.queries, self.heads.dim).sum(2)
        dsinks = -((others[0] - normaliser).exp() * dots).sum(0)
        return super().mix_gradient(dout, row, mixed, normaliser, (), how)[0], [dsinks]


class SinkExpertLayer(SinkAttention, ClampedExpertLayer):
    """A layer of gpt-oss: attention with sinks, and clamped experts."""


class HeadGatedAttention(GatedAttention):
    """Attention whose output is multiplied by the sigmoid of a gate (LFM 3): one number per head, computed by `g_proj`."""

    projections = ((("q_proj", "k_proj", "v_proj", "g_proj"),), (("o_proj",),))

    def _split_gate(self, row: Tensor) -> tuple[Tensor, Tensor]:
        return row[:, : self.heads.row].contiguous(), row[:, self.heads.row :, None]

    def _join_gate(self, dqkv: Tensor, dgate: Tensor) -> Tensor:
        return torch.cat([dqkv, dgate.sum(2)], 1)


class StateLayer(Layer):
    """A layer whose mixer is the method `core`, which autograd differentiates."""

    scores = 0
    projections: Any = ((("in_proj",),), (("out_proj",), ("o_proj",)))

    @abstractmethod
    def core(self, row: Tensor, others: Sequence[Tensor], layout: FusedLayout) -> Tensor:
        """Return the output projection's input [S, …] from the input projections `row` [S, …]; for `others` see `Layer.mix`."""

    def mix(self, row: Tensor, others: Sequence[Tensor], how: PassArguments) -> tuple[Tensor, Tensor]:
        """Return (the result of `core`, an empty tensor [S, 0] in place of attention's log-sum-exps); see `Layer.mix`."""
        return self.core(row, others, how.layout), torch.empty(len(row), 0)

    def mix_gradient(
        self, dout: Tensor, row: Tensor, mixed: Tensor, normaliser: Tensor, others: Sequence[Tensor], how: PassArguments
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return gradients as `Layer.mix_gradient` does, by autograd through `core`."""
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in (row, *others)]
            out = self.core(given[0], given[1:], how.layout)
        drow, *dothers = torch.autograd.grad(out, given, dout)
        return drow, dothers

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, layout: FusedLayout, silu: bool = True) -> Tensor:
        """Convolve x [S, C] along each sequence with `weight` [C, 1, K], then apply SiLU if `silu`."""
        weight = weight.squeeze(1)

        def kernel(x: Tensor, windows: Tensor) -> Tensor:
            made: Tensor = ConvolutionFunction.apply(self.native, x, weight, bias, windows, silu)
            return made

        return layout.convolve(self.index, x, ShortConvolution(weight, bias, F.silu, kernel))

    @cached_property
    def switch(self) -> Switch:
        """The `Switch` that holds the C++ kernels for this layer's recurrence."""
        switch = Switch()
        switch.native = self.native
        return switch

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm of x [S, …], times `weight`. Each group of adjacent elements is normalised separately.

        A group has `group_size` elements if the mixer's norm has this attribute, else len(weight).
        """
        module = first_of(self._mixer, ("norm", "o_norm"))
        width = getattr(module, "group_size", len(weight))
        ones = weight if width == len(weight) else torch.ones(width, dtype=x.dtype)
        made: Tensor = NormFunction.apply(self.native, x.reshape(-1, width), ones, eps_of(module), 0.0)
        return made.view(len(x), -1) if ones is weight else made.view(len(x), -1) * weight


class ConvolutionLayer(StateLayer):
    """A short convolution between two gates (LFM): C ⊙ conv(B ⊙ x), with the projections [B|C|x]."""

    mixer = ("conv",)
    others = ("conv.weight", "conv.bias")

    def core(self, row: Tensor, others: Sequence[Tensor], layout: FusedLayout) -> Tensor:
        """Compute the gated convolution; see `StateLayer.core`."""
        b, c, x = row.chunk(3, 1)
        return c * self.convolve(b * x, others[0], others[1] if len(others) > 1 else None, layout, silu=False)


class DeltaRuleLayer(StateLayer):
    """A gated delta net (Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464), with the projections [q|k|v|z|b|a].

    q, k and v pass through a short convolution with SiLU, then through `DeltaRule`. The output is normalised and multiplied
    by silu(z).
    """

    mixer = ("linear_attn",)
    projections = ((("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),), (("out_proj",),))
    others = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")

    def core(self, row: Tensor, others: Sequence[Tensor], layout: FusedLayout) -> Tensor:
        """Compute the delta net; see `StateLayer.core`."""
        (weight, a_log, dt_bias, norm), mixer = others, self._mixer
        keys, values, heads = mixer.key_dim, mixer.value_dim, mixer.num_v_heads
        qkv, z, b, a = row.split([2 * keys + values, values, heads, heads], 1)
        q, k, v = self.convolve(qkv, weight, None, layout).split([keys, keys, values], 1)
        g = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
        q, k, v = q.unflatten(1, (-1, mixer.head_k_dim)), k.unflatten(1, (-1, mixer.head_k_dim)), v.unflatten(1, (heads, -1))
        out = layout.scan(self.index, DeltaRule(_UNUSED, self.switch), (q, k, v, g, b.sigmoid()))
        return self.norm(out, norm) * F.silu(z)


class Mamba2Layer(StateLayer):
    """Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), with the projections [z|x|B|C|Δ].

    x, B and C pass through a short convolution with SiLU, then through `Mamba2`, which computes o. The result is
    norm((o + D·x) ⊙ silu(z)), with one trained number D per head.
    """

    mixer = ("mamba", "mixer")
    others = ("conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight")

    def core(self, row: Tensor, others: Sequence[Tensor], layout: FusedLayout) -> Tensor:
        """Compute Mamba-2; see `StateLayer.core`."""
        weight, *bias, dt_bias, a_log, d, norm = others
        mixer, width, groups = self._mixer, self._mixer.intermediate_size, self._mixer.n_groups * self._mixer.ssm_state_size
        z, xbc, dt = row.split([width, width + 2 * groups, mixer.num_heads], 1)
        x, b, c = self.convolve(xbc, weight, bias[0] if bias else None, layout).split([width, groups, groups], 1)
        x, b, c = (y.unflatten(1, (n, -1)) for y, n in ((x, mixer.num_heads), (b, mixer.n_groups), (c, mixer.n_groups)))
        dt = F.softplus(dt.float() + dt_bias).clamp(*mixer.time_step_limit)
        rule = Mamba2(_UNUSED, -a_log.float().exp(), 0, self.switch)
        out = layout.scan(self.index, rule, (x, dt, b, c)) + d[:, None] * x
        return self.norm((out.flatten(1) * F.silu(z)).to(row.dtype), norm)


class SquaredReLULayer(StateLayer):
    """A layer that has an MLP instead of attention: down(relu(up(x))²) (So et al. 2021, arXiv:2109.08668)."""

    mixer = ("mixer",)
    projections = ((("up_proj",),), (("down_proj",),))

    def core(self, row: Tensor, others: Sequence[Tensor], layout: FusedLayout) -> Tensor:
        """Compute relu(row)²; see `StateLayer.core`."""
        return row.relu().square()


MIXERS: dict[str, type[Layer]] = {
    "attention, experts": ExpertLayer,
    "sinks, clamped experts": SinkExpertLayer,
    "gate per channel": GatedAttention,
    "gate per head": HeadGatedAttention,
    "convolution": ConvolutionLayer,
    "delta rule": DeltaRuleLayer,
    "mamba2": Mamba2Layer,
    "squared ReLU": SquaredReLULayer,
    "normalised values": Gemma4Layer,
}
