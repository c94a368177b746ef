"""The base of psigrad's pretrained models: weights, the packed forward pass and whether it may be used, LoRA, and saving."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn

from psigrad import redaction
from psigrad.errors import UserError
from psigrad.language.images import FIRST, sight_of
from psigrad.language.models import attention
from psigrad.language.models.experts import Balance, Routing
from psigrad.language.models.fused.caches import ActivationCache, CacheHit
from psigrad.language.models.fused.decoder import Decoder
from psigrad.language.models.lora import Lora, Masks, describe_merging, merge_adapter, text_sums, with_lora
from psigrad.language.models.packing import ForwardInputs, Groups
from psigrad.language.models.probe import (
    LENGTH,
    attend,
    choose_attention,
    compose,
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

    from psigrad.language.models.fused.parts import Parts
    from psigrad.language.models.vision import Vision

R = TypeVar("R")
# The errors that transformers raises for a folder or a name without a model.
LOADING_ERRORS = (
    *(OSError, ValueError, KeyError, RuntimeError, AttributeError, ImportError, TypeError, ArithmeticError),
    *(StrictDataclassError, SafetensorError, pickle.UnpicklingError, EOFError),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def read_tokenizer(path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub model. Raises `ValueError` if there is none. The same happens if transformers
    creates one without a single word, as for Qwen, Gemma and GPT-2, since every text would be empty.
    """
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not set(found.get_vocab()) - set(found.all_special_tokens):
        raise ValueError("it has no tokenizer: save one there by tokenizer.save_pretrained, or copy its files from the original")
    from psigrad.language.models.vision import attach  # imported here, since few models have images

    attach(found, os.fspath(path))
    return found


@torch.no_grad()
def check_finite(network: nn.Module) -> None:
    """Raise `UserError` if a weight is NaN or infinite. Otherwise every log-prob would be too, and only the first step would
    fail.
    """
    for name, weight in network.named_parameters():
        if weight.is_meta or not weight.is_floating_point() or not weight.numel():
            continue
        least, most = weight.aminmax()  # one pass, without a tensor of that size
        if not math.isfinite(float(least) + float(most)):
            bad = int((~torch.isfinite(weight)).sum())
            raise UserError(
                f"The weight {name} has {bad} of {weight.numel()} numbers that are NaN or infinite; export the model again."
            )


@dataclass
class Pretrained(ABC):
    """A pretrained model with its tokenizer.

    - `network` is transformers' model, which holds the weights. With LoRA it contains the adapters' layers.
    - `adapter` is the peft wrapper that saves and merges adapters. If `continued`, the model without it is not the initial one.
    - `why_padded` is empty if the packed forward pass reproduces the model; otherwise it is why the padded one runs instead.
    - `decoder` runs the packed forward pass in fused kernels; if it is None, `why_unfused` is the reason.
    - `parts` are the kernels inside transformers' modules, if these run packed on a CPU.
    - `attends` is how packed sequences attend in transformers' modules; `why_sdpa` is why a GPU pads them anyway.
    - `compiled` is True if torch.compile runs the layers; `why_uncompiled` is why it does not although it was tried.
    - `texts` are the texts on which ways to compute were compared.
    - `balance` is the auxiliary loss of a mixture-of-experts model; `routing` records the sampler's choices for training.
    - `root` makes sharded weights whole while its forward pass runs (`language/models/sharded.py`).
    - `masks` are those of the adapter's dropout.
    - `context` is the processes that divide the tokens of a row, if there are several (`psigrad_extras/mesh/ulysses.py`).
    """

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: nn.Module | None = None
    continued: bool = False
    why_padded: str = ""
    train_mode: bool = False
    decoder: Decoder | None = None
    why_unfused: str = ""
    parts: Parts | None = None
    attends: Literal["sdpa", "varlen", "flex"] = "sdpa"
    why_sdpa: str = ""
    compiled: bool = False
    why_uncompiled: str = ""
    root: nn.Module | None = None
    context: Any = None
    texts: Groups | None = None
    balance: Balance | None = None
    routing: Routing | None = None
    masks: Masks = field(default_factory=Masks)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.network.device

    @property
    def vision(self) -> Vision | None:
        """The form of images in prompts; None if the model reads text alone."""
        found: Vision | None = sight_of(self.tokenizer)
        return found

    @property
    def is_own_reference(self) -> bool:
        """True if the model without its adapter is the one that training starts from."""
        return self.adapter is not None and not self.continued

    @property
    def slower(self) -> str:
        """The reason why the model does not run in its device's fastest way, and the cost; empty if it does."""
        if self.why_padded:
            return f"Sequences are padded, not packed, which takes two to five times the time and memory: {self.why_padded}."
        if self.why_unfused and self.device.type == "cpu":
            return f"Layers run in transformers' modules, not fused, which takes up to twice the time: {self.why_unfused}."
        if self.why_sdpa:
            return f"Attention pads packed sequences, which computes some ten times the scores: {self.why_sdpa}."
        return ""

    @property
    def instructions(self) -> str:
        """The instructions of the products in fused layers: AVX2, AVX-512, AMX tiles, …; empty without fused layers."""
        if self.decoder is not None:
            return self.decoder.native.products.instructions(self.decoder.dtype)
        return "" if self.parts is None else self.parts.native.products.instructions(self.network.dtype)

    @cached_property
    def max_length(self) -> int:
        """The largest number of tokens of one sequence, prompt and completion together."""
        config = self.network.config.get_text_config()
        return min(size(config, "positions") or 1 << 31, *_unscaled_lengths(config))

    def switch(self, training: bool) -> None:
        """Set training or evaluation mode. Skip it if the mode is set already, since it visits every module."""
        if self.network.training != training:
            set_mode(self.network, training)

    @abstractmethod
    def _probe(self, texts: Groups, packed: bool) -> Tensor:
        """Return the model's outputs on `texts`, to compare two ways to compute it."""

    @abstractmethod
    def _sample_texts(self, length: int) -> list[list[int]]:
        """Return two texts of `length` tokens that are typical of the model."""

    def _texts(self) -> Groups:
        """Return the texts on which ways to compute are compared, drawn once."""
        if self.texts is None:
            self.texts = shared_prompts(*self._sample_texts(min(LENGTH, self.max_length)))
        return self.texts

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: attention.Layout | attention.FusedLayout,
        keep: ActivationCache | None = None,
        cached: CacheHit | None = None,
        wanted: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [B, S, E], or [M, E] of the tokens `wanted`, which are positions in the B·S. `layout` is the
        attention pattern; ids and positions are [B, S]. A fused decoder adds its activations to `keep`, or reads them from
        `cached`. Routers choose `experts` [layers, B·S, k].
        """
        if self.decoder is not None:
            fused: Any = layout
            return self.decoder(input_ids, position_ids, fused, keep, cached, wanted)
        if self.attends != "sdpa" and isinstance(layout, attention.PackedLayout):
            from psigrad.language.models.hf_attention import unpad

            layout = unpad(layout, self.attends)
        if self.parts is not None:
            self.parts.packed = getattr(layout, "packed_weights", None)
        with contextlib.nullcontext() if self.routing is None else self.routing.follow(experts):
            module, given = self._embedded(input_ids)
            made = module(
                **given,
                position_ids=position_ids,
                attention_mask=attention.no_mask(self.device),
                use_cache=False,
                layout=layout,
                **({} if self.balance is None else self.balance.asked),
            )
        hidden = self._scaled(self._balanced(made).last_hidden_state)
        return hidden if wanted is None else hidden.flatten(0, 1).index_select(0, wanted)

    def _embedded(self, input_ids: Tensor) -> tuple[Any, dict[str, Any]]:
        """Return the module of the packed pass and its inputs: ids, or embeddings with the features of images.

        A decoding step reads images on a CPU alone (`dialogue.py`). On a GPU it may be recorded, and must not wait for its ids.
        """
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
        """The factor of the head's logits: Cohere's scale, or 1 / Granite's scaling. Here it multiplies the hidden states."""
        config: Any = self.network.config.get_text_config()
        return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)

    def placed(self, inputs: ForwardInputs) -> ForwardInputs:
        """Return packed inputs with the positions and the attention of their images. Raises `UserError` if it reads none."""
        vision = self._check_images(inputs)
        return inputs if vision is None else vision.place(inputs)

    def _check_images(self, inputs: ForwardInputs) -> Vision | None:
        """Return how the images of `inputs` are read, None without images. Raises `UserError` if this model reads text alone."""
        if inputs.has_images and self.vision is None:
            raise UserError(
                f"A row has an image, and {type(self.network).__name__} reads text alone; give a vision-language model, also as "
                "the reference."
            )
        return self.vision if inputs.has_images else None

    def target_hidden(self, inputs: ForwardInputs) -> Tensor:
        """Return the hidden states [M, E] that predict the targets, packed or padded."""
        wanted = inputs.targets.rows
        if inputs.layout is not None:
            if self.masks.used:
                self.masks.read(inputs)
            inputs = self.placed(inputs)
            ids, positions, layout = inputs.input_ids, inputs.position_ids, inputs.layout
            return self.forward(ids, positions, layout, cached=inputs.cached, wanted=wanted, experts=inputs.experts)
        hidden = self._padded(self.network.base_model, inputs).last_hidden_state
        return self._scaled(hidden.flatten(0, 1).index_select(0, wanted))

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Return hidden states for the head, in its dtype: Mamba-2's stream is float32 beside weights in bfloat16."""
        hidden = hidden * factor if (factor := self.logit_factor) != 1.0 else hidden
        return hidden.to(self.network.dtype)

    def _padded(self, module: Any, inputs: ForwardInputs) -> Any:
        """Return the output of transformers' `module` for padded inputs. Positions are the model's own: RoBERTa's begin at 2."""
        if self.masks.used:
            self.masks.read(inputs)
        vision = self._check_images(inputs)
        made = module(
            **({"input_ids": inputs.input_ids} if vision is None else vision.beside(inputs)),
            attention_mask=inputs.attention_mask,
            use_cache=False,
            **({} if self.balance is None else self.balance.asked),
        )
        return self._balanced(made, inputs.attention_mask)

    def _balanced(self, made: Any, mask: Tensor | None = None) -> Any:
        """Return a forward pass's output, and record its routers' load."""
        if self.balance is not None:
            self.balance.see(made, mask)
        return made

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
        known: bool,
        towers: Sequence[str] = (),
    ) -> Self:
        """Choose the ways to compute, and add the adapter if there is one.

        A `known` model (`fused.families.load`) runs packed and fused at once. Any other is compared with its own modules first.
        The model's own dropout is switched off as in TRL, since the first-step ratio would not be 1 with it. Of the modules
        outside the text half, `towers` learn.
        """
        check_finite(self.network)
        hf, known = self.network, known and lora is None
        switch_dropout_off(hf)
        if known:
            from psigrad.language.models.hf_attention import IMPLEMENTATION

            hf.set_attn_implementation(IMPLEMENTATION)
            self.decoder = Decoder(hf, gradient_checkpointing)
        elif not self.why_padded:
            self.why_padded = choose_attention(hf, self._texts, self._probe)
        if lora is not None:
            self.adapter = with_lora(hf, lora, adapter, task, towers)
            self.masks.count(self.adapter)
            check_finite(self.adapter)
        freeze_towers(hf, towers)
        if gradient_checkpointing:
            recompute_activations(hf)
        if not known and not self.why_padded:
            self.decoder, self.why_unfused = fuse(self, self._texts(), gradient_checkpointing)
            if self.decoder is None:
                self.parts, reason = compose(self, self._texts())
                self.why_unfused += reason and f"; its layers with state run in PyTorch: {reason}"
        self.train_mode = gradient_checkpointing or self.masks.used
        if self.train_mode and self.decoder is None:
            _check_repeatable(self)
        return self

    def attend(self, how: str) -> None:
        """Set how the packed model attends. "auto" on a GPU takes the first way that runs, and changes nothing on a CPU.

        Raises `UserError` if another way does not run, or does not give the numbers and the gradient of "sdpa".
        """
        attend(self, how)

    def frozen_copy(self) -> Self:
        """Return a copy that never learns: the reference of full fine-tuning."""
        twin = copy.deepcopy(self.network)
        twin.requires_grad_(False)
        decoder = None if self.decoder is None else Decoder(twin, vision=self.vision)
        own: dict[str, Any] = {"attends": self.attends, "why_padded": self.why_padded, "why_unfused": self.why_unfused}
        parts = None if self.parts is None else type(self.parts)(twin, self.parts.native)
        made = type(self)(twin.eval(), self.tokenizer, decoder=decoder, parts=parts, **own)
        if self.compiled:
            from psigrad.language.models.fused.inductor import compile_layers  # imported here, since few runs compile

            compile_layers(made)
        return made

    def save(self, folder: Path) -> None:
        """Save weights and tokenizer in Hugging Face form. A LoRA model saves only its adapter (and a scalar head)."""
        write(self.adapter or self.network, self.tokenizer, folder)

    def save_merged(self, folder: Path) -> None:
        """Save the complete model with the adapter merged in, so that transformers' `from_pretrained(folder)` opens it."""
        if self.adapter is not None and (lost := describe_merging(self.adapter)):
            redaction.say(lost)
        write(merge_adapter(self.network, self.adapter), self.tokenizer, folder)


def with_whole_weights(model: Pretrained, compute: Callable[[], R]) -> R:
    """Return the result of `compute`, run with whole weights: directly, or inside the forward pass of the model's `root`."""
    if model.root is None:
        return compute()
    found: list[R] = []
    model.root(compute, found)
    return found[0]


def own_share(model: Pretrained, inputs: ForwardInputs) -> ForwardInputs:
    """Return this process's share of the inputs: all of them, or its tokens of a row that several processes divide."""
    packed = inputs.layout
    if model.context is None or not isinstance(packed, attention.PackedLayout):
        return inputs
    if inputs.has_images:
        raise UserError("A row has an image, and cp_size divides rows of text alone; set cp_size to 1.")
    if model.masks.used:
        inputs = replace(inputs, texts=text_sums(inputs.input_ids, inputs.position_ids, packed))
    if model.attends != "sdpa":
        from psigrad.language.models.hf_attention import unpad

        packed = unpad(packed, model.attends)
    divided: ForwardInputs = model.context.share(inputs, packed)
    return divided


def reshard(model: Pretrained) -> None:
    """Free the whole weights that a forward pass without gradient has left. Afterwards `network` holds sharded tensors."""
    modules: Any = model.root.modules() if model.root is not None else ()
    for module in modules:
        if hasattr(module, "reshard"):
            module.reshard()


def _unscaled_lengths(config: Any) -> list[int]:
    """Return the lengths up to which rotary embeddings do not depend on the longest position of a pass. Beyond these, Phi's
    longrope and dynamic NTK do, so that a sequence's result would depend on the other sequences of its pass.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    tables = list(rope.values()) if rope and all(isinstance(table, dict) for table in rope.values()) else [rope]
    lengths = [
        table.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for table in tables
        if table.get("rope_type") in ("longrope", "dynamic")
    ]
    return [int(length) for length in lengths if length] or [1 << 31]


def _check_repeatable(model: Pretrained) -> None:
    """Raise `UserError` if two passes in training mode, which checkpointing and dropout need, give different results."""
    with torch.enable_grad():  # training mode is set only when a gradient is enabled
        one, other = (model._probe(model._texts(), packed=not model.why_padded).detach() for _ in range(2))
    if gap := float((one - other).abs().max()):
        raise UserError(
            f"{type(model.network).__name__} draws random numbers in training mode that psigrad cannot switch off (two passes "
            f"differ by {gap:.1g}); leave gradient_checkpointing and lora_dropout off."
        )


def check_whole(missing: Iterable[str]) -> None:
    """Raise `ValueError` if weights are missing in a model's files. transformers draws them at random and continues."""
    if names := sorted(missing):
        raise ValueError(f"its files lack {', '.join(names[:3])}{', …' * (len(names) > 3)}, which would be random numbers")
