"""The architectures that the fused decoder supports, and the weights that it reads from transformers' and peft's modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psigrad.errors import kind_of
from psigrad.kernels.kernels import Kernels
from psigrad.kernels.products import Products
from psigrad.language.models.coded_linear import CodedLinear
from psigrad.language.models.fused.caches import PackedProjection, Projection
from psigrad.language.models.sizes import size


class Unsupported(Exception):
    """Raised if the fused decoder can't run a model, with the reason as its message."""


def _by_layer(config: Any, layer: int) -> int | None:
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None


def _mixer(state: str, attention: str = "") -> Callable[[Any, int], str]:
    """Return a `Family.mixer`. It returns `state` for recurrences and convolutions, "squared ReLU" for MLPs, else `attention`."""
    kinds = {"conv": state, "linear_attention": state, "mamba": state, "mlp": "squared ReLU"}
    return lambda config, layer: kinds.get(config.layer_types[layer], attention)


def _experts(config: Any, layer: int) -> str:
    """Return the mixer of a layer in Qwen's mixtures of experts: "attention, experts", or "" if the layer has no experts."""
    dense = layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step or not size(config, "experts")
    return "" if dense else "attention, experts"


def _query_factors(config: Any, positions: Tensor) -> Tensor:
    """Return the factors by which Ministral 3 multiplies queries: 1 + β·log(1 + ⌊position/L⌋), with β and L from `config`."""
    rope = config.rope_parameters
    found: Tensor = 1 + rope["llama_4_scaling_beta"] * torch.log(
        1 + torch.floor(positions / rope["original_max_position_embeddings"])
    )
    return found


@dataclass(frozen=True)
class Family:
    """The features of an architecture's layers. Some are functions of (configuration, layer).

    - `window` returns a layer's sliding window in tokens, or None.
    - `rope` returns the name of a layer's rotary embedding: "" if the model has only one, None if the layer has none.
    - `mixer` returns a layer's key in `mixers.MIXERS`, or "" for a plain `Layer`.
    - `before` has the names of two norms: before attention and before the feed-forward layer. None: no norm.
    - `after` has the names of two norms: after attention and the feed-forward layer. Gemma 4 has one more.
    - `wide` is True if the query norm and the key norm each normalise all heads together.
    - `offset` is added to the weights of norms.
    - `gelu` is True if the activation is GELU (tanh approximation), False if it is SiLU.
    - `halves` is True if the rotary embedding module returns only D/2 cosines and sines.
    - `factors` returns the factor by which the queries at each position are multiplied.
    - `loads` is True if `loader.load` can read the weights.
    """

    window: Callable[[Any, int], int | None] = lambda config, layer: None
    rope: Callable[[Any, int], str | None] = lambda config, layer: ""
    mixer: Callable[[Any, int], str] = lambda config, layer: ""
    before: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str | None, ...] = (None, None)
    wide: bool = False
    offset: float = 0.0
    gelu: bool = False
    halves: bool = False
    factors: Callable[[Any, Tensor], Tensor] | None = None
    loads: bool = False


_ONLY_AFTER: Any = {"before": (None, None), "after": ("post_attention_layernorm", "post_feedforward_layernorm")}
_BY_TYPE: Any = {"window": _by_layer, "rope": lambda config, layer: config.layer_types[layer]}
_GEMMA_4 = Family(
    **_BY_TYPE,
    mixer=lambda config, layer: "normalised values",
    before=("input_layernorm", "pre_feedforward_layernorm"),
    after=(*_ONLY_AFTER["after"], "post_per_layer_input_norm"),
    gelu=True,
)
# The architectures that the fused decoder supports. transformers' Llama ignores a sliding window in its configuration.
FAMILIES = {
    "Llama": Family(loads=True),
    "Mistral": Family(lambda config, layer: config.sliding_window, loads=True),
    "Qwen2": Family(_by_layer, loads=True),
    "Qwen3": Family(_by_layer, loads=True),
    "SmolLM3": Family(_by_layer, lambda config, layer: "" if config.no_rope_layers[layer] else None),
    "Ministral3": Family(lambda config, layer: config.sliding_window, factors=_query_factors),
    "Qwen3Moe": Family(lambda config, layer: config.sliding_window, mixer=_experts),
    "Mixtral": Family(lambda config, layer: config.sliding_window, mixer=lambda config, layer: "attention, experts"),
    "GptOss": Family(_by_layer, mixer=lambda config, layer: "sinks, clamped experts", halves=True),
    "Phi3": Family(lambda config, layer: config.sliding_window),
    "SeedOss": Family(),
    "Granite": Family(),
    "GraniteMoeHybrid": Family(
        rope=lambda config, layer: "" if config.position_embedding_type == "rope" else None, mixer=_mixer("mamba2")
    ),
    # Each layer has one part. An MLP takes the place of a mixer.
    "NemotronH": Family(
        rope=lambda config, layer: None,
        mixer=_mixer("mamba2"),
        before=("norm", None),
    ),
    "Bamba": Family(mixer=_mixer("mamba2"), before=("input_layernorm", "pre_ff_layernorm")),
    "Qwen3_5Text": Family(mixer=_mixer("delta rule", "gate per channel"), offset=1.0),
    "Lfm2": Family(mixer=_mixer("convolution"), before=("operator_norm", "ffn_norm")),
    "Lfm3": Family(
        **_BY_TYPE,
        mixer=lambda config, layer: _mixer("convolution", "gate per head" if config.use_attention_gate else "")(config, layer),
        before=("operator_norm", "ffn_norm"),
        after=("post_operator_norm", "post_ffn_norm"),
    ),
    "Olmo2": Family(**_ONLY_AFTER, wide=True),
    "Olmo3": Family(**_BY_TYPE, **_ONLY_AFTER, wide=True),
    "Exaone4": Family(
        _by_layer, lambda config, layer: None if config.sliding_window and not _by_layer(config, layer) else "", **_ONLY_AFTER
    ),
    "Gemma": Family(offset=1.0, gelu=True),
    "Gemma3Text": Family(
        **_BY_TYPE, before=("input_layernorm", "pre_feedforward_layernorm"), after=_ONLY_AFTER["after"], offset=1.0, gelu=True
    ),
    "Gemma4Text": _GEMMA_4,
    "Gemma4UnifiedText": _GEMMA_4,
}


def eps_of(module: Any) -> Any:
    """Return the ε of a norm (`variance_epsilon` or `eps`); None if it has none."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def first_of(module: Any, names: Sequence[str]) -> Any:
    """Return the first attribute in `names` that the module has and that is not None; None if there is none."""
    return next((child for name in names if (child := getattr(module, name, None)) is not None), None)


def at(module: Any, path: str) -> Any:
    """Return the attribute at a path such as "q_norm.weight"; None if there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def find(parent: Any, choices: Sequence[Sequence[str]]) -> list[Any]:
    """Return `parent`'s modules for the first list in `choices` whose names all exist. Raises `Unsupported` if no list fits."""
    for names in choices:
        if all(getattr(parent, name, None) is not None for name in names):
            return [getattr(parent, name) for name in names]
    raise Unsupported(f"{kind_of(parent)} has no {' or '.join('/'.join(names) for names in choices)}")


class NormFunction(torch.autograd.Function):
    """The autograd function of an RMS norm: x / sqrt(mean(x²) + eps) · (weight + offset)."""

    @staticmethod
    def forward(ctx: Any, native: Kernels, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """Normalise each row of x with `Kernels.rms_norm`."""
        ctx.native, ctx.how = native, (eps, offset)
        ctx.save_for_backward(x, weight)
        return native.rms_norm(x, weight, eps, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x and of the weight, and None for the other inputs of `forward`."""
        x, weight = ctx.saved_tensors
        dx = torch.zeros_like(x)
        dw = ctx.native.gradients.rms_norm(dx, x, weight, dy.contiguous(), *ctx.how)
        return None, dx, dw, None, None


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a linear layer: peft's module, the adapter's name in it, and the weights (A, B)."""

    module: Any
    name: str
    weights: tuple[nn.Parameter, nn.Parameter]


@dataclass(frozen=True)
class LoraDelta:
    """The term that LoRA adds to a linear layer: s·x·Aᵀ·Bᵀ with A [r, in] and B [out, r] (Hu et al. 2021, arXiv:2106.09685)."""

    a: Tensor
    b: Tensor
    """s·B [out, r], already multiplied by the scale s = `scale`."""
    scale: float
    products: Products

    def add(self, y: Tensor, x: Tensor) -> None:
        """Compute y ← y + s·x·Aᵀ·Bᵀ in place, with the LoRA matrices A and B and the scale s."""
        multiply = self.products.of
        multiply(multiply(x, self.a.t()), self.b.t(), y, base=y)

    def add_input_grad(self, dx: Tensor, dy: Tensor) -> None:
        """Compute dx ← dx + s·dy·B·A in place, with the LoRA matrices A and B and the scale s."""
        multiply = self.products.of
        multiply(multiply(dy, self.b), self.a, dx, base=dx)

    def gradients(self, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the gradient of A, the gradient of B), from the gradient dy of the output and the input x."""
        multiply = self.products.of
        return multiply(multiply(dy, self.b).t(), x), multiply(dy.t(), multiply(x, self.a.t())).mul_(self.scale)


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights in its compute dtype.

    - `matrices` are those of the linear layers, then each expert's. `lora` has a LoRA term or None for each of them.
    - A group in `groups` has the indices of matrices with the same input, such as q, k and v.
    - `norms` are the weights of the norms in `Family.before` and then `Family.after`; None for a norm that the layer lacks.
    - `mixer` are the mixer's other weights, such as those of the query and key norms.
    - `feed` are the router's and all experts' parameters, shaped as in transformers.
    """

    groups: Sequence[Sequence[int]]
    matrices: list[Tensor]
    norms: list[Tensor | None]
    mixer: list[Tensor]
    biases: list[Tensor | None]
    lora: list[LoraDelta | None]
    native: Kernels
    packed: list[PackedProjection] | None = None
    """The packed matrices of each group; None if they are not packed."""
    feed: Sequence[Tensor] = ()
    decoding: bool = False
    """True in decoding. Products of few rows may then be summed in a faster order, which differs from that of training."""

    def apply(self, group: int, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """Write x·Wᵀ + bias + LoRA term of each matrix W in `groups[group]` to `out`, concatenated. Add `residual` if given."""
        if self.packed is not None:
            return self.packed[group].multiply(x, out, residual, self.native.products)
        members = self.groups[group]
        parts = out.split([len(self.matrices[i]) for i in members], dim=1)
        for i, part in zip(members, parts, strict=True):
            bias, delta = self.biases[i], self.lora[i]
            base = bias if residual is None else residual
            self.native.products.linear(x, self.matrices[i], part, base, exact=not self.decoding)
            if bias is not None and residual is not None:
                part += bias
            if delta is not None:
                delta.add(part, x)
        return out

    def factors(self, group: int) -> Projection:
        """Return the matrices, biases and LoRA matrices of `groups[group]` as a `Projection`, which `PackedWeights` packs."""
        members = self.groups[group]
        heights = [self.matrices[i].shape[0] for i in members]
        biases, deltas = [self.biases[i] for i in members], [self.lora[i] for i in members]
        like = next(x for x in self.norms if x is not None)
        width, bias, low = self.matrices[members[0]].shape[1], None, None
        if any(b is not None for b in biases):
            bias = torch.cat([like.new_zeros(n) if b is None else b.detach() for b, n in zip(biases, heights, strict=True)])
        if any(delta is not None for delta in deltas):
            a = [like.new_zeros(0, width) if delta is None else delta.a for delta in deltas]
            b = [like.new_zeros(n, 0) if delta is None else delta.b for delta, n in zip(deltas, heights, strict=True)]
            # The kernels sum bfloat16 numbers in pairs. A pair must not span two adapters, which training multiplies separately.
            odd = [len(x) % 2 for x in a]
            a = [nn.functional.pad(x, (0, 0, 0, more)) for x, more in zip(a, odd, strict=True)]
            low = torch.cat(a), torch.block_diag(*(nn.functional.pad(x, (0, more)) for x, more in zip(b, odd, strict=True)))
        return Projection([self.matrices[i] for i in members], bias, low)

    def input_grad(self, group: int, parts: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the input that the matrices in `groups[group]` share. `parts` has each output's gradient."""
        multiply, total = self.native.products.of, None
        for i, part in zip(self.groups[group], parts, strict=True):
            total = multiply(part, self.matrices[i], total, base=total)
        assert total is not None
        for i, part in zip(self.groups[group], parts, strict=True):
            if (delta := self.lora[i]) is not None:
                delta.add_input_grad(total, part)
        return total


def split_adapter(child: Any) -> tuple[nn.Linear, Adapter | None]:
    """Return (the linear layer of a module, the LoRA adapter on it or None).

    Raises `Unsupported` unless the module is a linear layer, or peft's LoRA layer without dropout or variants.
    """
    if type(child) in (nn.Linear, CodedLinear):
        return child, None
    kind = f"{type(child).__module__}.{type(child).__name__}"
    if kind != "peft.tuners.lora.layer.Linear":  # compared by name, so that peft is imported only with an adapter
        raise Unsupported(f"{kind_of(child)} replaces a linear layer")
    if type(child.base_layer) not in (nn.Linear, CodedLinear) or child.fan_in_fan_out:
        raise Unsupported(f"LoRA is applied to {kind_of(child.base_layer)}, not to a linear layer")
    if len(child.active_adapters) != 1 or child.merged or child.active_adapters[0] not in child.lora_A:
        raise Unsupported("a linear layer has several adapters, or one that is merged or inactive")
    (name,) = child.active_adapters
    a, b = child.lora_A[name], child.lora_B[name]
    if name in child.lora_variant or b.bias is not None:
        raise Unsupported("the adapter is a variant of LoRA")
    if type(child.lora_dropout[name]) is not nn.Identity:
        raise Unsupported("the adapter has dropout")
    return child.base_layer, Adapter(child, name, (a.weight, b.weight))
