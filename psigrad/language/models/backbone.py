"""The base class of psigrad's pretrained models: weights, the choice between packed and padded passes, LoRA, and saving."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn

from psigrad import redaction
from psigrad.compiled import triton_kernels
from psigrad.errors import UserError
from psigrad.language.images import FIRST, image_format_of
from psigrad.language.models import attention
from psigrad.language.models.experts import LoadBalancing, RouterRecorder
from psigrad.language.models.fused.caches import ActivationCache, CacheHit
from psigrad.language.models.fused.decoder import Decoder
from psigrad.language.models.lora import DropoutMasks, Lora, add_lora, describe_merging, hash_tokens, merge_adapter
from psigrad.language.models.packing import ForwardInputs, Groups
from psigrad.language.models.probe import (
    LENGTH,
    attach_kernels,
    attend,
    check_causal,
    choose_attention,
    fuse,
    recompute_activations,
    set_mode,
    shared_prompts,
    switch_dropout_off,
)
from psigrad.language.models.sizes import size
from psigrad.language.models.towers import freeze_towers, text_half, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from psigrad.language.models.fused.module_kernels import ModuleKernels
    from psigrad.language.models.vision import Vision

R = TypeVar("R")
# The errors that transformers raises for a folder or a name without a model.
LOADING_ERRORS = (
    *(OSError, ValueError, KeyError, RuntimeError, AttributeError, ImportError, TypeError, ArithmeticError),
    *(StrictDataclassError, SafetensorError, pickle.UnpicklingError, EOFError),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@torch.no_grad()
def check_finite(network: nn.Module) -> None:
    """Raise `UserError` if a weight is NaN or infinite. All log-probs would then be NaN, and the first step would fail."""
    for name, weight in network.named_parameters():
        if weight.is_meta or not weight.is_floating_point() or not weight.numel():
            continue
        least, most = weight.aminmax()  # one pass over the weight, without a temporary tensor of its size
        if not math.isfinite(float(least) + float(most)):
            bad = int((~torch.isfinite(weight)).sum())
            raise UserError(
                f"The weight {name} is NaN or infinite in {bad} of {weight.numel()} elements; export the model again."
            )


@dataclass
class Pretrained(ABC):
    """A pretrained model with its tokenizer.

    - `network` is transformers' model. With LoRA it contains the adapters' layers.
    - `adapter` is the peft wrapper that saves and merges adapters. `from_adapter` is True if training began with a saved one.
    - `why_padded` is "" if passes are packed (one row of sequences without padding), else the reason why they are padded.
    - `train_mode` is True if passes with gradients run in training mode.
    - `decoder` runs packed forward passes in fused kernels. If passes are packed without it, `why_unfused` is the reason.
    - `module_kernels` are psigrad's kernels in transformers' modules.
    - `attention_kernel` is the attention that transformers' modules use for packed sequences. If "auto" chose "sdpa" on
      a GPU, `why_sdpa` is the reason.
    - `compiled` is True if the layers are compiled. If compilation failed, `why_uncompiled` is the reason.
    - `probe_texts` are the texts on which psigrad's outputs were compared with those of transformers.
    - `load_balancing` is the auxiliary loss of a mixture-of-experts model. `router_recorder` records the chosen experts.
    - `shard_root` is the module whose forward pass gathers sharded weights.
    - `dropout_masks` determines the masks of the adapter's dropout.
    - `sequence_group` is the group of processes that divide the tokens of each row, or None.
    """

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: nn.Module | None = None
    from_adapter: bool = False
    why_padded: str = ""
    train_mode: bool = False
    decoder: Decoder | None = None
    why_unfused: str = ""
    module_kernels: ModuleKernels | None = None
    attention_kernel: Literal["sdpa", "varlen", "flex"] = "sdpa"
    why_sdpa: str = ""
    compiled: bool = False
    why_uncompiled: str = ""
    shard_root: nn.Module | None = None
    sequence_group: Any = None
    probe_texts: Groups | None = None
    load_balancing: LoadBalancing | None = None
    router_recorder: RouterRecorder | None = None
    dropout_masks: DropoutMasks = field(default_factory=DropoutMasks)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.network.device

    @property
    def vision(self) -> Vision | None:
        """The object that processes the images in prompts; None if the model reads only text."""
        found: Vision | None = image_format_of(self.tokenizer)
        return found

    @property
    def is_own_reference(self) -> bool:
        """True if the model without its adapter is the initial model, so that it can be the reference of a KL term."""
        return self.adapter is not None and not self.from_adapter

    @property
    def slow_reason(self) -> str:
        """A sentence that says how much slower the model runs than its device allows, and why; "" if it runs at full speed."""
        if self.why_padded:
            return f"Sequences are padded, not packed, which takes two to five times the time and memory: {self.why_padded}."
        if self.why_unfused and self.device.type == "cpu":
            return f"Layers run in transformers' modules, not fused, which takes up to twice the time: {self.why_unfused}."
        if self.why_sdpa:
            return f"Attention pads packed sequences, and so computes about ten times as many scores: {self.why_sdpa}."
        if self.device.type == "cuda" and isinstance(why := triton_kernels(), str):
            return f"Log-probs and the optimiser run without Triton kernels, which makes a step about a tenth slower: {why}."
        return ""

    @property
    def instructions(self) -> str:
        """The CPU instructions that the kernels' matrix products use: AVX2, AVX-512, AMX tiles, …; "" if no kernels are used."""
        if self.decoder is not None:
            return self.decoder.native.products.instructions(self.decoder.dtype)
        return "" if self.module_kernels is None else self.module_kernels.native.products.instructions(self.network.dtype)

    @cached_property
    def max_length(self) -> int:
        """The maximum length of a sequence (a prompt with its completion) in tokens."""
        config = self.network.config.get_text_config()
        return min(size(config, "positions") or 1 << 31, *_unscaled_lengths(config))

    def switch(self, training: bool) -> None:
        """Set training or evaluation mode. Do nothing if the mode is already set, since setting it visits every module."""
        if self.network.training != training:
            set_mode(self.network, training)

    @abstractmethod
    def _probe(self, texts: Groups, packed: bool) -> Tensor:
        """Return the model's outputs on `texts` from a packed or padded pass. They are compared with those of transformers."""

    @abstractmethod
    def _sample_texts(self, length: int) -> list[list[int]]:
        """Return two texts of `length` tokens. A language model generates them; a scalar model returns fixed sentences."""

    def _texts(self) -> Groups:
        """Return the texts on which psigrad's outputs are compared with those of transformers. They are made once."""
        if self.probe_texts is None:
            self.probe_texts = shared_prompts(*self._sample_texts(min(LENGTH, self.max_length)))
        return self.probe_texts

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: attention.Layout | attention.FusedLayout,
        keep: ActivationCache | None = None,
        cached: CacheHit | None = None,
        target_rows: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [B, S, E], or only the states [M, E] at `target_rows` [M] (indices into the B·S tokens).

        `layout` determines which tokens attend to which. A fused decoder adds its activations to `keep`, or reads them from
        `cached`. `experts` [layers, B·S, k] are the experts that routers must choose.
        """
        following = contextlib.nullcontext() if self.router_recorder is None else self.router_recorder.follow(experts)
        if self.decoder is not None:
            fused: Any = layout
            logits: list[Tensor] | None = None if self.load_balancing is None else []
            with following:
                hidden = self.decoder(input_ids, position_ids, fused, keep, cached, target_rows, logits)
            self._balanced(SimpleNamespace(router_logits=logits))
            return self._scaled(hidden)
        if self.attention_kernel != "sdpa" and isinstance(layout, attention.PackedLayout):
            from psigrad.language.models.hf_attention import unpad

            layout = unpad(layout, self.attention_kernel)
        if self.module_kernels is not None:
            self.module_kernels.packed = getattr(layout, "packed_weights", None)
        with following:
            module, given = self._embedded(input_ids)
            made = module(
                **given,
                position_ids=position_ids,
                attention_mask=attention.no_mask(self.device),
                use_cache=False,
                layout=layout,
                **({} if self.load_balancing is None else self.load_balancing.forward_arguments),
            )
        hidden = self._scaled(self._balanced(made).last_hidden_state)
        return hidden if target_rows is None else hidden.flatten(0, 1).index_select(0, target_rows)

    def _embedded(self, input_ids: Tensor) -> tuple[Any, dict[str, Any]]:
        """Return (the module that runs a packed pass, its keyword arguments)."""
        # Decoding steps read no image, and a CUDA graph cannot look for image tokens.
        if self.vision is None or (input_ids.shape[1] == 1 and self.device.type != "cpu"):
            return self.network.base_model, {"input_ids": input_ids}
        ids = input_ids.flatten()
        text = self.network.get_input_embeddings()(ids.masked_fill(ids >= FIRST, 0))
        filled, deep = self.vision.fill(self.network, text, ids)
        given: dict[str, Any] = {"inputs_embeds": filled.unflatten(0, input_ids.shape)}
        if deep:
            given |= {"visual_pos_masks": input_ids >= FIRST, "deepstack_visual_embeds": list(deep)}
        return text_half(self.network), given

    @property
    def logit_factor(self) -> float:
        """The factor that multiplies the logits: Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`, or 1."""
        config: Any = self.network.config.get_text_config()
        return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)

    def placed(self, inputs: ForwardInputs) -> ForwardInputs:
        """Adapt positions and attention of packed inputs to their images. Raises `UserError` if a text-only model gets images."""
        vision = self._check_images(inputs)
        return inputs if vision is None else vision.apply_layout(inputs)

    def _check_images(self, inputs: ForwardInputs) -> Vision | None:
        """Return `vision` if `inputs` have images, else None. Raises `UserError` if the model cannot read the images."""
        if inputs.has_images and self.vision is None:
            raise UserError(
                f"A row has an image, but {type(self.network).__name__} reads only text; use vision-language models "
                "for the policy and the reference."
            )
        return self.vision if inputs.has_images else None

    def target_hidden(self, inputs: ForwardInputs) -> Tensor:
        """Return the hidden states [M, E] that predict the targets, from a packed or padded pass."""
        wanted = inputs.targets.rows
        if inputs.layout is not None:
            if self.dropout_masks.used:
                self.dropout_masks.read(inputs)
            inputs = self.placed(inputs)
            ids, positions, layout = inputs.input_ids, inputs.position_ids, inputs.layout
            return self.forward(ids, positions, layout, cached=inputs.cached, target_rows=wanted, experts=inputs.experts)
        hidden = self._padded(self.network.base_model, inputs).last_hidden_state
        return self._scaled(hidden.flatten(0, 1).index_select(0, wanted))

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Return hidden states times `logit_factor`. They are cast to the head's dtype, since Mamba-2 returns float32."""
        hidden = hidden * factor if (factor := self.logit_factor) != 1.0 else hidden
        return hidden.to(self.network.dtype)

    def _padded(self, module: Any, inputs: ForwardInputs) -> Any:
        """Return the output of transformers' `module` for padded inputs."""
        if self.dropout_masks.used:
            self.dropout_masks.read(inputs)
        vision = self._check_images(inputs)
        made = module(  # it sets the positions, which in RoBERTa start at 2
            **({"input_ids": inputs.input_ids} if vision is None else vision.forward_arguments(inputs)),
            attention_mask=inputs.attention_mask,
            use_cache=False,
            **({} if self.load_balancing is None else self.load_balancing.forward_arguments),
        )
        return self._balanced(made, inputs.attention_mask)

    def _balanced(self, output: Any, mask: Tensor | None = None) -> Any:
        """Compute the loss of `load_balancing`, if set, over the tokens where `mask` [B, S] is 1. Return `output` unchanged."""
        if self.load_balancing is not None:
            self.load_balancing.compute(output, mask)
        return output

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name, in the model's order."""
        reshard(self)
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    def prepare(
        self,
        task: str,
        lora: Lora | None,
        adapter: Path | None,
        gradient_checkpointing: bool,
        is_known: bool,
        towers: Sequence[str] = (),
    ) -> Self:
        """Choose packed or padded passes, and fused or transformers' layers. With `lora`, add the saved `adapter`, or a new one.

        `task` is the adapter's task type in peft. `is_known` is True if `fused.loader.load` loaded the model. Vision and audio
        modules are frozen, except those in `towers`.
        """
        check_finite(self.network)
        hf, is_known = self.network, is_known and lora is None
        switch_dropout_off(hf)  # as in TRL: dropout would change the ratio π/π_old
        if is_known:
            from psigrad.language.models.hf_attention import IMPLEMENTATION

            hf.set_attn_implementation(IMPLEMENTATION)
            self.decoder = Decoder(hf, gradient_checkpointing)
        elif not self.why_padded:
            self.why_padded = choose_attention(hf, self._texts, self._probe)
            if self.why_padded and task == "CAUSAL_LM":  # packed passes are causal, so the outputs of a packed model are
                texts = self._texts()
                check_causal(hf, [*texts.prompts[0], *texts.completions[0][0]])
        if lora is not None:
            self.adapter = add_lora(hf, lora, adapter, task, towers)
            self.dropout_masks.count(self.adapter)
            check_finite(self.adapter)
        freeze_towers(hf, towers)
        if gradient_checkpointing:
            recompute_activations(hf)
        if not is_known and not self.why_padded:
            self.decoder, self.why_unfused = fuse(self, self._texts(), gradient_checkpointing)
            if self.decoder is None:
                self.module_kernels, reason = attach_kernels(self, self._texts())
                self.why_unfused += reason and f"; its recurrent layers run in PyTorch ({reason})"
        self.train_mode = gradient_checkpointing or self.dropout_masks.used
        if self.train_mode and self.decoder is None:
            _check_repeatable(self)
        return self

    def attend(self, choice: str) -> None:
        """Set the attention of packed passes: "varlen", "flex", "sdpa" or "auto" (on a GPU the first that works, else "sdpa")."""
        attend(self, choice)

    def frozen_copy(self) -> Self:
        """Return a copy of the model with frozen weights. Full fine-tuning uses it as the reference model."""
        twin = copy.deepcopy(self.network)
        twin.requires_grad_(False)
        decoder = None if self.decoder is None else Decoder(twin, vision=self.vision)
        own: dict[str, Any] = {
            "attention_kernel": self.attention_kernel,
            "why_padded": self.why_padded,
            "why_unfused": self.why_unfused,
        }
        kernels = None if self.module_kernels is None else type(self.module_kernels)(twin, self.module_kernels.native)
        made = type(self)(twin.eval(), self.tokenizer, decoder=decoder, module_kernels=kernels, **own)
        if self.compiled:
            from psigrad.language.models.fused.inductor import compile_layers  # imported here, since few runs compile

            compile_layers(made)
        return made

    def save(self, folder: Path) -> None:
        """Save weights and tokenizer in Hugging Face format. With LoRA, save only the adapter and any scalar head."""
        write(self.adapter or self.network, self.tokenizer, folder)

    def save_merged(self, folder: Path) -> None:
        """Save the complete model with the adapter merged in. transformers' `from_pretrained(folder)` can load it."""
        if self.adapter is not None and (lost := describe_merging(self.adapter)):
            redaction.say(lost)
        write(merge_adapter(self.network, self.adapter), self.tokenizer, folder)


def with_gathered_weights(model: Pretrained, compute: Callable[[], R]) -> R:
    """Return `compute()`. If weights are sharded, it runs in the forward pass of `shard_root`, which gathers them."""
    if model.shard_root is None:
        return compute()
    found: list[R] = []
    model.shard_root(compute, found)
    return found[0]


def local_share(model: Pretrained, inputs: ForwardInputs) -> ForwardInputs:
    """Return this process's share of the tokens if several processes divide each packed row (cp_size), else all inputs."""
    packed = inputs.layout
    if model.sequence_group is None or not isinstance(packed, attention.PackedLayout):
        return inputs
    if inputs.has_images:
        raise UserError("A row has an image, but a cp_size above 1 works only with rows of text; set cp_size to 1.")
    if model.dropout_masks.used:
        inputs = replace(inputs, token_hashes=hash_tokens(inputs.input_ids, inputs.position_ids, packed))
    if model.attention_kernel != "sdpa":
        from psigrad.language.models.hf_attention import unpad

        packed = unpad(packed, model.attention_kernel)
    divided: ForwardInputs = model.sequence_group.share(inputs, packed)
    return divided


def reshard(model: Pretrained) -> None:
    """Shard all weights again. After a forward pass without gradients, FSDP still holds gathered weights in memory."""
    modules: Any = model.shard_root.modules() if model.shard_root is not None else ()
    for module in modules:
        if hasattr(module, "reshard"):
            module.reshard()


def _unscaled_lengths(config: Any) -> list[int]:
    """Return the lengths above which the angles of longrope and dynamic NTK embeddings depend on the longest sequence."""
    rope = getattr(config, "rope_parameters", None) or {}
    tables = list(rope.values()) if rope and all(isinstance(table, dict) for table in rope.values()) else [rope]
    lengths = [
        table.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for table in tables
        if table.get("rope_type") in ("longrope", "dynamic")
    ]
    return [int(length) for length in lengths if length] or [1 << 31]


def _check_repeatable(model: Pretrained) -> None:
    """Run the same texts twice in training mode. Raise `UserError` if random numbers make the outputs differ."""
    with torch.enable_grad():  # training mode is set only when a gradient is enabled
        one, other = (model._probe(model._texts(), packed=not model.why_padded).detach() for _ in range(2))
    if gap := float((one - other).abs().max()):
        raise UserError(
            f"{type(model.network).__name__} is random in training mode, and psigrad cannot switch that off: two forward passes "
            f"differ by {gap:.1g}. Only gradient_checkpointing and lora_dropout need training mode; remove them."
        )


def check_complete(missing: Iterable[str]) -> None:
    """Raise `ValueError` if weights are `missing` in a model's files. transformers would initialise them at random."""
    if names := sorted(missing):
        raise ValueError(
            f"the model's files lack {', '.join(names[:3])}{', …' * (len(names) > 3)}, which would be initialised at random"
        )
