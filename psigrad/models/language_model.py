"""A Hugging Face causal language model, its tokenizer, and what training and sampling need of them."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from psigrad.errors import UserError
from psigrad.models import attention
from psigrad.models.logprobs import TokenStats, Wanted, token_stats
from psigrad.models.packing import ForwardInputs, Groups, Rows, Targets, pack, pad
from psigrad.objective import Evaluation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter: W + (alpha / rank) B A on the named modules ("all-linear": every linear layer but the head)."""

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ("all-linear",)


@dataclass
class LanguageModel:
    """A causal language model under its tokenizer.

    `hf` is the transformers model (with LoRA layers inside when `adapter` is set, the peft wrapper that saves and merges them).
    `why_padded` is empty where the packed forward reproduces the model; else it says why the padded one runs instead.
    """

    hf: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: nn.Module | None = None
    why_padded: str = ""
    train_mode: bool = False

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def vocabulary(self) -> int:
        return int(self.hf.config.get_text_config().vocab_size)

    @property
    def max_length(self) -> int:
        """Most tokens of one sequence (prompt and completion)."""
        return int(getattr(self.hf.config.get_text_config(), "max_position_embeddings", 1 << 31))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a completion: the generation config's and the tokenizer's."""
        ids = self.hf.generation_config.eos_token_id if self.hf.generation_config else None
        known = {*(ids if isinstance(ids, list) else [ids]), self.tokenizer.eos_token_id} - {None}
        return tuple(sorted(known))

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name, in the model's order."""
        return {name: p for name, p in self.hf.named_parameters() if p.requires_grad}

    def forward(self, input_ids: Tensor, position_ids: Tensor, layout: attention.Layout) -> Tensor:
        """Hidden states [B, S, E] where `layout` says who attends to whom; ids and positions are [B, S]."""
        return self.hf.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention.NO_MASK.to(self.device),
            use_cache=False,
            layout=layout,
        ).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        return self.hf.get_output_embeddings()(hidden)

    def evaluate(
        self,
        inputs: Groups | Rows,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        kl_to: LanguageModel | None = None,
        packed: bool | None = None,
    ) -> Evaluation:
        """log pi of every target token as [N, T] (zeros elsewhere), on request with the entropy and the exact KL to `kl_to`.

        Gradients flow unless the caller is under `torch.no_grad()`. A LoRA model may be its own `kl_to`: the adapter is then off.
        `packed=False` asks for the padded oracle.
        """
        stats, targets = self.stats(inputs, temperature=temperature, entropy=entropy, kl_to=kl_to, packed=packed)
        return Evaluation(
            logp=targets.unpack(stats.logp),
            entropy=None if stats.entropy is None else targets.unpack(stats.entropy),
            kl=None if stats.kl is None else targets.unpack(stats.kl),
        )

    def stats(
        self,
        inputs: Groups | Rows,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        accuracy: bool = False,
        kl_to: LanguageModel | None = None,
        packed: bool | None = None,
    ) -> tuple[TokenStats, Targets]:
        """As `evaluate`, as one value per target token [M], with the `Targets` that say where each belongs."""
        self.hf.train(self.train_mode and torch.is_grad_enabled())
        use_packed = packed if packed is not None else not self.why_padded
        forward = pack(inputs, self.device) if use_packed else pad(inputs, self.device)
        hidden, head = self._target_hidden(forward)
        reference_hidden, reference_head = None, None
        if kl_to is not None:
            alone = self.without_adapter() if kl_to is self else contextlib.nullcontext()
            with torch.no_grad(), alone:
                reference_hidden, reference_head = kl_to._target_hidden(forward)
        wanted = Wanted(temperature, entropy, accuracy, reference_head)
        return token_stats(hidden, forward.targets.ids, head, self.vocabulary, wanted, reference_hidden), forward.targets

    def _target_hidden(self, inputs: ForwardInputs) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What predicts each target [M, …], and the head that makes logits of it: hidden states, or where padded the logits
        themselves.
        """
        if inputs.layout is not None:
            hidden = self.forward(inputs.input_ids, inputs.position_ids, inputs.layout)
            return hidden[0].index_select(0, inputs.targets.rows), self.head
        out = self.hf(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=inputs.attention_mask,
            use_cache=False,
        )
        return out.logits.flatten(0, 1).index_select(0, inputs.targets.rows), nn.Identity()

    def without_adapter(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which a LoRA model is the model it started from: its reference costs no memory."""
        if self.adapter is None:
            raise ValueError("Only a LoRA model carries its own reference; use frozen_copy() for full fine-tuning.")
        return self.adapter.disable_adapter()

    def frozen_copy(self) -> LanguageModel:
        """A copy that never learns: the reference of full fine-tuning."""
        twin = copy.deepcopy(self.hf)
        twin.requires_grad_(False)
        return LanguageModel(twin.eval(), self.tokenizer, why_padded=self.why_padded)

    def save(self, folder: Path) -> None:
        """Weights and tokenizer in Hugging Face form; a LoRA model saves its adapter only."""
        self._write(self.adapter or self.hf, folder)

    def save_merged(self, folder: Path) -> None:
        """The whole model, adapter merged in, so that `AutoModelForCausalLM.from_pretrained(folder)` opens it."""
        model = self.hf
        if self.adapter is not None:
            model = copy.deepcopy(self.adapter).merge_and_unload()
        self._write(model, folder)

    def _write(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder, safe_serialization=True)
        self.tokenizer.save_pretrained(folder)
        umask = os.umask(0)
        os.umask(umask)
        for path in folder.iterdir():  # safetensors leaves its files to their owner alone
            path.chmod(0o666 & ~umask)


def load(
    path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    lora: Lora | None = None,
    adapter: Path | None = None,
    gradient_checkpointing: bool = False,
) -> LanguageModel:
    """The model at `path` (a folder or a hub name), ready to train and to sample.

    `adapter` is a folder with LoRA weights to go on from. Raises `UserError` if nothing loads from `path`.
    """
    try:
        hf = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"No causal language model could be loaded from {path!r} ({reason}); give a folder or a hub name."
        ) from error
    return prepare(hf.to(device), tokenizer, lora=lora, adapter=adapter, gradient_checkpointing=gradient_checkpointing)


def prepare(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lora: Lora | None = None,
    adapter: Path | None = None,
    gradient_checkpointing: bool = False,
) -> LanguageModel:
    """A `LanguageModel` around a transformers model that is already in memory.

    The model's own dropout is switched off, as TRL does: with it, the first-step ratio would not be 1.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("The tokenizer has no EOS token, so no completion could ever end; set tokenizer.eos_token and save it.")
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    hf.eval()
    model = LanguageModel(hf, tokenizer)
    model.why_padded = _why_padded(model)
    if lora is not None:
        model.adapter = _with_lora(hf, lora, adapter)
        model.train_mode = lora.dropout > 0
    if gradient_checkpointing:
        # transformers recomputes only in training mode; with the model's dropout at zero that mode computes the same numbers
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train_mode = True
    return model


def _with_lora(hf: PreTrainedModel, lora: Lora, adapter: Path | None) -> nn.Module:
    import peft

    if adapter is not None:
        return peft.PeftModel.from_pretrained(hf, adapter, is_trainable=True)
    targets = lora.target_modules[0] if lora.target_modules == ("all-linear",) else list(lora.target_modules)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        return peft.get_peft_model(hf, config)
    except ValueError as error:
        raise UserError(f"No LoRA adapter could be put on {list(lora.target_modules)}: {error}") from error


# Two prompts of unlike length, with completions that share them: enough to tell a model that leaks between packed sequences.
_PROBE = Groups(prompts=((3, 1, 2), (2, 5, 4, 1, 3)), completions=(((4, 2, 1), (1,)), ((3, 3), (2, 1, 4, 5))))


@torch.no_grad()
def _why_padded(model: LanguageModel) -> str:
    """Why the packed forward can't be used for this model: an empty string where it reproduces the model's own attention.

    Leaves the model with our attention where that works, else with its own.
    """
    own = model.hf.config._attn_implementation
    oracle, failure = _probe(model, own, packed=False)
    if oracle is None:  # some models take SDPA for granted and refuse it when they run (softcapped attention)
        own = "eager"
        oracle, failure = _probe(model, own, packed=False)
    if oracle is None:
        raise UserError(f"{type(model.hf).__name__} does not compute log-probs: {failure}; give a causal language model.")
    packed, failure = _probe(model, attention.IMPLEMENTATION, packed=True)
    if packed is not None:
        gap = float((packed - oracle).abs().max())
        # float32 agrees to about 1e-6; bfloat16 differs by its own rounding in either form
        if gap < (1e-3 if model.hf.dtype in (torch.float32, torch.float64) else 0.25):
            return ""
        failure = f"its log-probs differ by {gap:.1g} from the padded ones"
    model.hf.set_attn_implementation(own)
    return f"{type(model.hf).__name__} does not run packed: {failure}"


def _probe(model: LanguageModel, implementation: str, packed: bool) -> tuple[Tensor | None, str]:
    """Log-probs of `_PROBE` under an attention implementation, or what went wrong."""
    try:
        model.hf.set_attn_implementation(implementation)
        return model.evaluate(_PROBE, packed=packed).logp, ""
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        return None, str(error).strip().splitlines()[0]
