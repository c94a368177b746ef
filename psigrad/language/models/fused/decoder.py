"""The fused decoder: psigrad's kernels run the architectures in `families` on a CPU, in float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psigrad.kernels.kernels import Angles, Heads, Kernels, kernels
from psigrad.language.images import FIRST
from psigrad.language.models.attention import FusedLayout, PackedLayout
from psigrad.language.models.fused.caches import ActivationCache, Block, CacheHit, PackedWeights, RowLayout, Version, versions
from psigrad.language.models.fused.families import FAMILIES, Family, NormFunction, Unsupported, eps_of, first_of
from psigrad.language.models.fused.layer import RANKS, Layer, PassArguments
from psigrad.language.models.packing import RowSelection
from psigrad.language.models.sizes import layer_sizes, size
from psigrad.language.models.towers import text_half, tower_parameters
from psigrad.optim import gradients

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from psigrad.language.models.vision import Vision

_WHOLE = RowSelection()
# The index of a router's logits in the tensors that a layer with experts returns for its backward pass.
_LOGITS = 6


class _LayerFunction(torch.autograd.Function):
    """The autograd function of a fused layer, with a hand-written backward pass.

    If activations are `cached`, the layer does not run forward. With `recompute`, the backward pass runs it forward again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        x: Tensor,
        how: PassArguments,
        selection: RowSelection,
        cached: CacheHit | None,
        recompute: bool,
        *weights: Tensor,
    ) -> Any:
        logits, reads = None, how.balanced and layer.sparse
        if cached is None:
            y, parts = layer.forward(x, how, selection)
            logits, parts = parts[_LOGITS] if reads else None, () if recompute else parts
        elif layer.index == cached.last:
            y, parts = cached.output(layer.index, selection.output_rows), ()
        else:
            assert isinstance(how.layout, PackedLayout)
            # a placeholder for autograd, which nothing reads
            y, parts = x.new_full((1,), torch.nan).expand(how.layout.rows, x.shape[1]), ()
        ctx.layer, ctx.how, ctx.selection, ctx.cached = layer, how, selection, cached
        ctx.recompute, ctx.parts = recompute and cached is None, len(parts)
        ctx.save_for_backward(x, *parts, *weights)  # weights are saved only so that autograd notices an in-place change
        if reads and cached is not None:
            logits = cached.output(layer.index, None, 1 + _LOGITS)
        return y if logits is None else (y, logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlogits: Tensor | None = None) -> tuple[Any, ...]:
        x, *parts = ctx.saved_tensors[: 1 + ctx.parts]
        if ctx.cached is not None:
            own, parts = ctx.cached.saved_for_backward(ctx.layer.index, ctx.selection.output_rows)
            x = x if own is None else own
        elif ctx.recompute:  # `torch.utils.checkpoint` would import the compiler (2 s, 40 megabytes)
            parts = list(ctx.layer.forward(x, ctx.how, ctx.selection)[1])
        if ctx.layer.sparse:  # in the place of the logits, which the backward pass does not need
            parts[_LOGITS] = torch.zeros_like(parts[_LOGITS]) if dlogits is None else dlogits
        learns = ctx.needs_input_grad[6:]
        # Tensors that autograd saved may be read again. Only this function's own copies may be overwritten.
        overwrite = ctx.cached is not None or ctx.recompute
        dx, dweights = ctx.layer.backward(dy.contiguous(), x, parts, ctx.how, learns, ctx.selection, overwrite)
        return None, dx, None, None, None, None, *dweights


class Decoder:
    """The fused form of a model's decoder, from token ids to hidden states.

    `recompute` is gradient checkpointing. With `exact` the decoder computes in float32 even if the weights are bfloat16. If
    `may_dequantise` is False, sampling does not dequantise quantised layers, which saves memory. Raises `Unsupported` with the
    reason if the decoder cannot run the model.
    """

    may_dequantise = True

    def __init__(
        self, network: PreTrainedModel, recompute: bool = False, exact: bool = False, vision: Vision | None = None
    ) -> None:
        if network.device.type != "cpu" or network.dtype not in (torch.float32, torch.bfloat16):
            raise Unsupported(f"{network.dtype} on {network.device} is not supported")
        native = kernels()
        if isinstance(native, str):
            raise Unsupported(native)
        base: Any = text_half(network)
        config = network.config.get_text_config()
        family = FAMILIES.get(type(base).__name__.removesuffix("Model"))
        if family is None or not type(base).__module__.startswith("transformers."):  # a class of the same name may differ
            raise Unsupported(f"{type(base).__name__} is not fused (docs/families.md lists the families that are)")
        activation = first_of(config, ("hidden_activation", "hidden_act")) or "silu"
        if activation != ("gelu_pytorch_tanh" if family.gelu else "silu"):
            raise Unsupported(f"the activation {activation} is not supported")
        if getattr(config, "attn_logit_softcapping", None) or (vision is not None and vision.two_way):
            raise Unsupported("the model caps attention scores, or its attention is not causal")
        if vision is not None and vision.axes:
            raise Unsupported("image tokens have positions on several axes (M-RoPE)")
        mixers = [first_of(layer, ("self_attn", "mixer")) for layer in base.layers]
        attending = [i for i, mixer in enumerate(mixers) if hasattr(mixer, "scaling")]
        if not attending:
            raise Unsupported("the model has no layer with attention")
        self.norm = first_of(base, ("norm", "embedding_norm", "final_layernorm", "norm_f"))
        self.eps = float(eps_of(self.norm))
        heads = _heads(base, config, family, {i: mixers[i] for i in attending}, self.eps)
        self.native, self.base, self.recompute, self.stored = native, base, recompute, torch.float32 if exact else network.dtype
        kinds = [_mixer(family.mixer(config, i)) for i in range(len(base.layers))]
        layers = enumerate(zip(kinds, base.layers, strict=True))
        first = heads[attending[0]]
        self.layers = [kind(i, module, heads.get(i, first), family, config, native, exact) for i, (kind, module) in layers]
        keyed = _order([self.layers[i] for i in attending], [family.rope(config, i) for i in attending])
        self.heads = [layer.heads for layer in keyed]
        """The sizes of attention of each layer with keys and values of its own, by `Layer.order`."""
        ropes = [family.rope(config, layer.index) for layer in keyed]
        self._angles = partial(_angles, base, config, family, ropes, first.dim)
        self.dtype, self.offset = self.layers[0].weights.dtype, family.offset
        self.at_once = {*kinds} == {Layer} and all(layer.feeds for layer in self.layers)
        self.sparse = any(layer.sparse for layer in self.layers)
        self.layer_inputs = _layer_inputs(base, native)
        self.row_layout = RowLayout(tuple(layer.kinds for layer in self.layers))
        self.fill = None if vision is None else partial(vision.fill, network)
        self.parameters: list[nn.Parameter] = [*base.parameters(), *(tower_parameters(network) if vision is not None else ())]
        self.in_shards = False
        """True if the weights are sharded. A layer's weights are then gathered only inside its module's forward pass."""

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: FusedLayout,
        keep: ActivationCache | None = None,
        cached: CacheHit | None = None,
        target_rows: Tensor | None = None,
        router_logits: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the hidden states [B, S, E] of all tokens, or with `target_rows` [M] only the states [M, E] of these tokens.

        Activations are read from `cached` or, in a pass without gradients, added to `keep`. A pass with gradients appends each
        router's logits [B·S, experts] to `router_logits`.
        """
        ids, inputs = input_ids.flatten(), None
        if isinstance(layout, PackedLayout):  # compute equal tokens once; a decoding step has too few rows to benefit
            distinct, places = ids.unique(return_inverse=True)
            if 2 * len(distinct) <= len(ids):
                ids, inputs = distinct, places
        # `keep` needs the output of every token, and so do routers: their load counts all tokens, and their choice is recorded.
        whole = target_rows is None or keep is not None or self.sparse
        outputs, back = (None, None) if whole or target_rows is None else target_rows.unique(return_inverse=True)
        selection = [_WHOLE] * len(self.layers)
        if inputs is not None:
            selection[0] = replace(selection[0], input_rows=inputs)
        if outputs is not None:
            selection[-1] = replace(selection[-1], output_rows=outputs)
        x = self._embed(ids).to(self.dtype)
        own = () if self.layer_inputs is None else self.layer_inputs(x, _look_up(self.base.embed_tokens_per_layer, ids))
        angles, rows = self._angles(position_ids.flatten()[None], x.new_empty(1)), RowSelection(inputs)
        balanced = router_logits is not None
        how = PassArguments(angles, layout, self.adapted, {}, {}, [p.detach() for p in own], rows, balanced=balanced)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters):
            for layer, at in zip(self.layers, selection, strict=True):

                def run(x: Tensor, layer: Layer = layer, at: RowSelection = at) -> Tensor:
                    given = (*layer.weights.given, *own[layer.index : layer.index + 1])
                    made: Any = _LayerFunction.apply(layer, x, how, at, cached, self.recompute, *given)
                    if isinstance(made, tuple) and router_logits is not None:
                        router_logits.append(made[1])
                    y: Tensor = made[0] if isinstance(made, tuple) else made
                    return y

                x = self._with_weights(layer, run, x)
            x = NormFunction.apply(self.native, x, self.norm.weight.to(self.dtype), self.eps, self.offset)
        else:
            x = self._run(x, how, selection, keep) if cached is None else cached.output(cached.last, outputs)
            x = self.native.rms_norm(x, self.norm.weight.to(self.dtype), self.eps, self.offset)
        x = x.to(self.stored)
        if back is not None:
            return x.index_select(0, back)
        return x.view(*input_ids.shape, -1) if target_rows is None else x.index_select(0, target_rows)

    def _with_weights(self, layer: Layer, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `run(x)`. If weights are sharded, call the layer's module: its forward pass gathers them, then calls `run`."""
        if not self.in_shards:
            return run(x)

        def reread(x: Tensor) -> Tensor:
            layer.reread()
            return run(x)

        y: Tensor = self.base.layers[layer.index](x, reread)
        return y

    def _embed(self, input_ids: Tensor) -> Tensor:
        if self.fill is not None and bool((seen := input_ids >= FIRST).any()):
            return self.fill(self._embed(input_ids.masked_fill(seen, 0)), input_ids)[0]
        rows = _look_up(self.base.get_input_embeddings(), input_ids)
        multiplier = float(getattr(self.base, "embedding_multiplier", 1.0))  # Granite
        return rows if multiplier == 1.0 else rows * multiplier

    @property
    def adapted(self) -> bool:
        """True if LoRA adapters are enabled in any layer."""
        return any(layer.adapted for layer in self.layers)

    def _run(self, x: Tensor, how: PassArguments, selection: Sequence[RowSelection], keep: ActivationCache | None) -> Tensor:
        """Run all layers on embeddings `x` without gradients. Return the last layer's output, and add the activations to `keep`.

        `selection` has each layer's input and output rows.
        """
        now = versions(self.parameters) if keep is not None or how.layout.packed_weights is not None else []
        y = self._step(x, how, keep, now) if self.at_once and not self.in_shards else None
        if y is not None:
            return y
        packed, layers = how.layout.packed_weights, []
        if packed is not None and not self.at_once and not self.in_shards:
            how = how._replace(
                ready=packed.table(how.adapted, now, lambda: [x.current_weights(how.adapted, packed) for x in self.layers])
            )
        for layer, at in zip(self.layers, selection, strict=True):

            def run(x: Tensor, layer: Layer = layer, at: RowSelection = at) -> Tensor:
                y, parts = layer.forward(x, how, at)
                if keep is not None:
                    layers.append((y, *parts))
                return y

            x = self._with_weights(layer, run, x)
        if keep is not None:
            keep.add(len(x), self.row_layout, now, layers)
        return x

    def _step(self, x: Tensor, how: PassArguments, keep: ActivationCache | None, now: list[Version]) -> Tensor | None:
        """Run all layers on embeddings `x` in one kernel call. Return the last layer's output, and add the activations to `keep`.

        If this is not a decoding step, or if a weight can't be packed, return None. `now` are the weights' current versions.
        """
        packed_weights, slots, rows = how.layout.packed_weights, how.layout.slots, len(x)
        if packed_weights is None or slots is None:
            return None
        weights = packed_weights.table(how.adapted, now, lambda: self._addresses(packed_weights, how.adapted))
        if weights is None:
            return None
        room = None if keep is None else keep.reserve(rows, self.row_layout)
        # Without a cache all layers share one layer's memory.
        block, start = room or (Block(self.row_layout if keep is not None else RowLayout(self.row_layout.kinds[:1]), rows), 0)
        made = block.addresses(start).expand(len(self.layers), -1).contiguous()
        first, rank = self.layers[0], int(weights[:, RANKS].max())
        factors: Any = {"eps": first.eps, "gelu": first.gelu, "residual": first.residual}
        self.native.decode_layers(x, weights, made, slots, how.angles, self.heads[0], inner=first.inner, rank=rank, **factors)
        if keep is not None:
            keep.add(rows, self.row_layout, now, None if room is not None else block.layers())
        return block.part(len(block.layout.kinds) - 1, 0, start, rows)

    def _addresses(self, packed_weights: PackedWeights, adapted: bool) -> Tensor | None:
        """Return `Layer.addresses(packed_weights, adapted)` of all layers as one tensor; None if any layer returns None."""
        found = [layer.addresses(packed_weights, adapted) for layer in self.layers]
        packed = [row for row in found if row is not None]
        return torch.tensor(packed) if len(packed) == len(found) else None


def _look_up(table: Any, ids: Tensor) -> Tensor:
    """Return the rows `ids` of an embedding table, scaled if the table has an `embed_scale`."""
    plain = isinstance(table, nn.Embedding) and table.max_norm is None and not table.sparse
    # For a small table the dense gradient is faster.
    sums = gradients.sums_for(table.weight) if plain and len(table.weight) > ids.numel() else None
    if sums is None:
        rows: Tensor = table(ids)
        return rows
    rows = gradients.embedding(table.weight, ids, table.padding_idx, sums)
    factor = getattr(table, "embed_scale", None)  # Gemma's table applies it in its own forward method, which has not run
    return rows if factor is None else rows * factor.to(rows.dtype)


def _heads(base: Any, config: Any, family: Family, attending: dict[int, Any], eps: float) -> dict[int, Heads]:
    """Return {layer: its attention's sizes}. `attending` is {layer: its attention module}, `eps` the epsilon of the norms."""
    queries, keys = size(config, "heads"), layer_sizes(config, "key_heads")
    ropes, start = [family.rope(config, i) for i in attending], torch.zeros(1, 1, dtype=torch.int64)
    angles = _angles(base, config, family, ropes, int(next(iter(attending.values())).head_dim), start, torch.empty(0))
    form: Any = {"wide": family.wide, "offset": family.offset}
    return {
        i: Heads(queries, keys[i], int(mixer.head_dim), eps, float(mixer.scaling), **form, turned=one.cosine.shape[1])
        for (i, mixer), one in zip(attending.items(), angles, strict=True)
    }


def _order(layers: Sequence[Any], ropes: Sequence[str | None]) -> list[Layer]:
    """Set the `order` of the attention `layers`. Return those that compute their own keys and values, in this order.

    `ropes` are the names of the layers' rotary embeddings.
    """
    latest: dict[str | None, Layer] = {}
    keyed: list[Layer] = []
    for layer, rope in zip(layers, ropes, strict=True):
        if not getattr(layer, "has_keys", True):
            layer.read(latest[rope])
            continue
        layer.order, latest[rope] = len(keyed), layer
        keyed.append(layer)
    return keyed


def _layer_inputs(base: Any, native: Kernels) -> Any:
    """Return the `LayerInputs` of a model whose layers read a second embedding table (Gemma 4), otherwise None."""
    if not getattr(base, "hidden_size_per_layer_input", 0):
        return None
    from psigrad.language.models.fused.gemma4 import LayerInputs

    return LayerInputs(base, native)


def _mixer(name: str) -> type[Layer]:
    """Return the class of the layers for which `Family.mixer` returns `name`."""
    if not name:
        return Layer
    from psigrad.language.models.fused.mixers import MIXERS  # imported here, since most families have no such layers

    return MIXERS[name]


def _angles(
    base: Any, config: Any, family: Family, ropes: Sequence[str | None], dim: int, position_ids: Tensor, like: Tensor
) -> list[Angles]:
    """Return the cosines and sines of the rotary embeddings named in `ropes`, at the positions [1, S].

    `like` has the computation's dtype.
    """
    factors = None if family.factors is None else family.factors(config, position_ids[0].float())
    tables: dict[str | None, Angles] = {}
    for name in dict.fromkeys(ropes):
        if name is None:  # a rotation by 0 changes nothing
            zeros = torch.zeros(position_ids.shape[1], dim)
            tables[name] = Angles(torch.ones_like(zeros), zeros, factors)
        else:
            # M-RoPE has a position on each of three axes; those of text are equal.
            places = position_ids.expand(3, -1, -1) if hasattr(base.rotary_emb, "mrope_section") else position_ids
            cosine, sine = base.rotary_emb(like, places, *([name] if name else []))
            cosine, sine = (torch.cat([x, x], -1) if family.halves else x for x in (cosine, sine))
            tables[name] = Angles(cosine[0].float().contiguous(), sine[0].float().contiguous(), factors)
    return [tables[name] for name in ropes]
