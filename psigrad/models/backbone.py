"""What every Hugging Face model of ours shares: the packed forward and whether it may be used, LoRA, saving."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from psigrad.errors import UserError
from psigrad.models import attention
from psigrad.models.fused import Decoder
from psigrad.models.fused_layer import Unlike
from psigrad.models.kept import Kept, Known
from psigrad.models.packing import ForwardInputs, Groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter: W + (alpha / rank) B A on the named modules ("all-linear": every linear layer but the head)."""

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)


def forward(
    hf: PreTrainedModel,
    decoder: Decoder | None,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: attention.Layout | attention.FusedLayout,
    keep: Kept | None = None,
    known: Known | None = None,
) -> Tensor:
    """Hidden states [B, S, E] where `layout` says who attends to whom; ids and positions are [B, S].

    A decoder adds what its layers computed to `keep`, or takes it from what is `known`.
    """
    if decoder is not None:
        return decoder(input_ids, position_ids, layout, keep, known)
    return hf.base_model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention.NO_MASK.to(hf.device),
        use_cache=False,
        layout=layout,
    ).last_hidden_state


def target_hidden(hf: PreTrainedModel, decoder: Decoder | None, inputs: ForwardInputs) -> Tensor:
    """Hidden states [M, E] that predict the targets, packed or padded."""
    if inputs.layout is not None:
        hidden = forward(hf, decoder, inputs.input_ids, inputs.position_ids, inputs.layout, known=inputs.known)
    else:
        hidden = hf.base_model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            use_cache=False,
        ).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, inputs.targets.rows)


def switch_dropout_off(hf: PreTrainedModel) -> None:
    """No dropout and evaluation mode."""
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    hf.eval()


def recompute_activations(hf: PreTrainedModel) -> None:
    """Gradient checkpointing. transformers recomputes only in training mode; without dropout that mode computes the same."""
    hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def merged(hf: PreTrainedModel, adapter: nn.Module | None) -> Any:
    """The whole model, with a copy of its adapter merged in."""
    return hf if adapter is None else copy.deepcopy(adapter).merge_and_unload()


def write(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Weights and tokenizer in Hugging Face form."""
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():  # safetensors leaves its files to their owner alone
        path.chmod(0o666 & ~umask)


def with_lora(hf: PreTrainedModel, lora: Lora, adapter: Path | None, task: str) -> nn.Module:
    """The peft wrapper of a model that now has LoRA layers inside: fresh ones, or those saved in the folder `adapter`."""
    import peft

    if adapter is not None:
        return peft.PeftModel.from_pretrained(hf, adapter, is_trainable=True)
    targets = lora.target_modules[0] if lora.target_modules == ("all-linear",) else list(lora.target_modules)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, task_type=task
    )
    try:
        return peft.get_peft_model(hf, config)
    except ValueError as error:
        raise UserError(f"No LoRA adapter could be put on {list(lora.target_modules)}: {error}") from error


# Two prompts of unlike length, with completions that share them: enough to tell a model that leaks between packed sequences.
PROBE = Groups(prompts=((3, 1, 2), (2, 5, 4, 1, 3)), completions=(((4, 2, 1), (1,)), ((3, 3), (2, 1, 4, 5))))


@torch.no_grad()
def choose_attention(hf: PreTrainedModel, run: Callable[[bool], Tensor]) -> str:
    """Why the packed forward can't be used for this model: an empty string where it reproduces the model's own attention.

    `run(packed)` gives the model's numbers on `PROBE`. Leaves the model with our attention where that works, else with its own.
    """
    own = hf.config._attn_implementation
    oracle, failure = _probe(hf, run, own, packed=False)
    if oracle is None:  # some models take SDPA for granted and refuse it when they run (softcapped attention)
        own = "eager"
        oracle, failure = _probe(hf, run, own, packed=False)
    if oracle is None:
        raise UserError(f"{type(hf).__name__} does not run: {failure}; give a causal model of transformers.")
    packed, failure = _probe(hf, run, attention.IMPLEMENTATION, packed=True)
    if packed is not None:
        gap = float((packed - oracle).abs().max())
        # float32 agrees to about 1e-6; bfloat16 differs by its own rounding in either form
        if gap < (1e-3 if hf.dtype in (torch.float32, torch.float64) else 0.25):
            return ""
        failure = f"its numbers differ by {gap:.1g} from the padded ones"
    hf.set_attn_implementation(own)
    return f"{type(hf).__name__} does not run packed: {failure}"


def fuse(hf: PreTrainedModel, recompute: bool, run: Callable[[Decoder | None], Tensor]) -> tuple[Decoder | None, str]:
    """The fused decoder where it reproduces the model's own modules, else None and why.

    `run(decoder)` gives the model's numbers on `PROBE`.
    """
    try:
        decoder = Decoder(hf, recompute)
    except Unlike as reason:
        return None, str(reason)
    with torch.no_grad(), _stirred(decoder):
        gap = float((run(decoder) - run(None)).abs().max())
    if gap < (1e-3 if hf.dtype == torch.float32 else 0.25):
        return decoder, ""
    return None, f"the fused forward differs by {gap:.1g} from the model's own"


@contextlib.contextmanager
def _stirred(decoder: Decoder) -> Iterator[None]:
    """Fresh adapters add nothing, their B being 0: here they do, so that a probe sees them."""
    fresh = [b for layer in decoder.layers for _, b in (a.weights for a in layer.adapters.values()) if not b.any()]
    generator = torch.Generator().manual_seed(0)
    for b in fresh:
        b.normal_(std=0.02, generator=generator)
    try:
        yield
    finally:
        for b in fresh:
            b.zero_()


def _probe(hf: PreTrainedModel, run: Callable[[bool], Tensor], implementation: str, packed: bool) -> tuple[Tensor | None, str]:
    """The numbers of `PROBE` under an attention implementation, or what went wrong."""
    try:
        hf.set_attn_implementation(implementation)
        return run(packed), ""
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        return None, str(error).strip().splitlines()[0]
