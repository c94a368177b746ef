"""A backbone with one number per position: the reward model (its number at the last token) and the critic (at every token)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from psigrad.errors import UserError
from psigrad.models import backbone
from psigrad.models.backbone import DTYPES, Lora
from psigrad.models.fused import Decoder
from psigrad.models.packing import Groups, Ids, Rows, pack, pad

# In a process reward model's config.json: what ends a step.
STEP_SEPARATOR = "step_separator"


@dataclass
class ScalarModel:
    """A transformers `…ForSequenceClassification` with one label, under its tokenizer.

    Formula: V(s_t) = w · h_t, with h_t the hidden state behind the tokens before step t; the score of a text is V behind its last
    token. `why_padded` says why the packed forward is not used, where it is not, and `why_unfused` why the fused decoder is not.
    Models whose head is not a plain `score` layer (BERT's kin) can only score whole texts.
    """

    hf: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: nn.Module | None = None
    why_padded: str = ""
    train_mode: bool = False
    decoder: Decoder | None = None
    why_unfused: str = ""

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def per_token(self) -> bool:
        """Whether the model has a number at every token."""
        return isinstance(getattr(self.hf, "score", None), nn.Module)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name, in the model's order."""
        return {name: p for name, p in self.hf.named_parameters() if p.requires_grad}

    def _fuse(self, recompute: bool = False) -> None:
        """Use the fused decoder if it reproduces the model."""

        def run(decoder: Decoder | None) -> Tensor:
            self.decoder = decoder
            return self.values(backbone.PROBE, packed=True)

        self.decoder, self.why_unfused = backbone.fuse(self.hf, recompute, run)

    def values(self, inputs: Groups | Rows, *, packed: bool | None = None) -> Tensor:
        """V of the state before every target token, [N, T] in at least float32, zeros elsewhere."""
        self.hf.train(self.train_mode and torch.is_grad_enabled())
        use_packed = packed if packed is not None else not self.why_padded
        forward = pack(inputs, self.device) if use_packed else pad(inputs, self.device)
        values = self.hf.score(backbone.target_hidden(self.hf, self.decoder, forward))[:, 0]
        return forward.targets.unpack(values.to(torch.promote_types(values.dtype, torch.float32)))

    def scores(self, inputs: Groups, *, packed: bool | None = None) -> Tensor:
        """[N] score of every prompt with its completion, read behind the last token; a group's prompt is computed once."""
        if not self.per_token:
            return self._whole([[*p, *c] for p, group in zip(inputs.prompts, inputs.completions, strict=True) for c in group])
        # V "before" a token that is never computed is V behind the last real one
        longer = Groups(inputs.prompts, [[[*c, 0] for c in group] for group in inputs.completions])
        lengths = torch.tensor([len(c) for group in inputs.completions for c in group], device=self.device)
        return self.values(longer, packed=packed).gather(1, lengths[:, None])[:, 0]

    def _whole(self, rows: Sequence[Ids]) -> Tensor:
        self.hf.train(self.train_mode and torch.is_grad_enabled())
        width = max(map(len, rows))
        filler = self.hf.config.pad_token_id or 0
        ids = torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = (torch.arange(width, device=self.device) < lengths[:, None]).long()
        return self.hf(input_ids=ids, attention_mask=mask).logits[:, 0].float()

    def frozen_copy(self) -> ScalarModel:
        """A copy that never learns."""
        twin = copy.deepcopy(self.hf)
        twin.requires_grad_(False)
        decoder = None if self.decoder is None else Decoder(twin)
        return ScalarModel(twin.eval(), self.tokenizer, why_padded=self.why_padded, decoder=decoder, why_unfused=self.why_unfused)

    def save(self, folder: Path) -> None:
        """Weights and tokenizer in Hugging Face form; a LoRA model saves its adapter and head only."""
        backbone.write(self.adapter or self.hf, self.tokenizer, folder)

    def save_merged(self, folder: Path) -> None:
        """The whole model, so that `AutoModelForSequenceClassification.from_pretrained(folder)` opens it."""
        backbone.write(backbone.merged(self.hf, self.adapter), self.tokenizer, folder)


def load(
    path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    lora: Lora | None = None,
    adapter: Path | None = None,
    gradient_checkpointing: bool = False,
    fresh_head: str = "random",
) -> ScalarModel:
    """The scalar model at `path`: one that was saved as such, or any causal language model, which gets a fresh head.

    `fresh_head` is "random" (N(0, initializer_range²), from torch's generator), "zero", or "refuse" where only a trained head
    will do. Raises `UserError` if nothing loads from `path`.
    """
    try:
        with _quiet():
            hf, found = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, dtype=DTYPES[dtype], output_loading_info=True
            )
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"No model with a scalar head could be loaded from {path!r} ({reason}); give the folder or hub name of a "
            "reward model with one label, or of a causal language model."
        ) from error
    missing = [name for name in found["missing_keys"] if name.startswith(("score", "classifier"))]
    if missing and fresh_head == "refuse":
        raise UserError(
            f"{path!r} is a model without a trained scalar head ({', '.join(missing)} is missing), so its scores would be noise; "
            "give the folder or hub name of a reward model."
        )
    if missing and fresh_head == "zero":
        nn.init.zeros_(hf.score.weight)
    return prepare(hf.to(device), tokenizer, lora=lora, adapter=adapter, gradient_checkpointing=gradient_checkpointing)


def prepare(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lora: Lora | None = None,
    adapter: Path | None = None,
    gradient_checkpointing: bool = False,
) -> ScalarModel:
    """A `ScalarModel` around a transformers model that is already in memory; dropout is switched off."""
    backbone.switch_dropout_off(hf)
    hf.config.pad_token_id = _padding(tokenizer)
    model = ScalarModel(hf, tokenizer)
    if model.per_token:
        model.why_padded = backbone.choose_attention(hf, lambda packed: model.values(backbone.PROBE, packed=packed))
    else:
        model.why_padded = f"{type(hf).__name__} has no score at every token"
    if lora is not None:
        model.adapter = backbone.with_lora(hf, lora, adapter, "SEQ_CLS")
    if gradient_checkpointing:
        backbone.recompute_activations(hf)
    if not model.why_padded:
        model._fuse(gradient_checkpointing)
    model.train_mode = gradient_checkpointing or (lora is not None and lora.dropout > 0)
    return model


def _padding(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The padding id that transformers may look for when it searches a row's last real token.

    It takes the last token that is not padding, so where padding is EOS it would score a text without its end. None makes it
    refuse batches instead of being wrong.
    """
    return None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warning that the head is fresh: here that is no accident."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
