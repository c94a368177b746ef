"""A pretrained model with a scalar head: a reward model (one score per text) or a critic (a value at every token)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification
from transformers.utils import logging

from psigrad.errors import UserError, reason_of
from psigrad.kernels.codes import Kind
from psigrad.language.models.backbone import (
    DTYPES,
    LOADING_ERRORS,
    Pretrained,
    check_complete,
    local_share,
    with_gathered_weights,
)
from psigrad.language.models.coded_linear import code_linears
from psigrad.language.models.lora import Lora, hash_tokens
from psigrad.language.models.packing import ForwardInputs, Groups, Ids, Rows, lay_out
from psigrad.language.models.sizes import size
from psigrad.language.models.towers import read_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Fields of a reward model's config.json: a process reward model's step separator, and True if its prompts had no chat template.
STEP_SEPARATOR, PLAIN_PROMPTS = "step_separator", "plain_prompts"

# The texts on which packed and padded outputs of the model are compared.
TEXTS = ("The capital of France is Paris, and that of Peru is Lima.", "Water boils at a hundred degrees, ice melts at none.")


@dataclass
class ScalarModel(Pretrained):
    """A `…ForSequenceClassification` with one label, or a vision-language model with a scalar head, and its tokenizer.

    Formula: V(s_t) = w · h_t, with h_t the hidden state of the last token before token t. A text's score is V at its end.
    """

    @property
    def per_token(self) -> bool:
        """True if the model has a `score` layer, so that it has a value at every token; otherwise it scores only whole texts."""
        return isinstance(getattr(self.network, "score", None), nn.Module)

    @property
    def plain_prompts(self) -> bool:
        """True if the model was trained on prompts without a chat template, although its tokenizer may have one."""
        return bool(getattr(self.network.config, PLAIN_PROMPTS, False))

    def _probe(self, texts: Groups, packed: bool) -> Tensor:
        """Return V [N, T] before each completion token (see `values`), or the texts' scores [N, 1] if not `per_token`."""
        return self.values(texts, packed=packed) if self.per_token else self.scores(texts)[:, None]

    def _sample_texts(self, length: int) -> list[list[int]]:
        """Return two fixed sentences, each repeated to `length` tokens, because a scalar model cannot generate texts."""
        rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"] or [0] for text in TEXTS]
        return [(row * length)[:length] for row in rows]

    def values(self, inputs: Groups | Rows, *, packed: bool | None = None) -> Tensor:
        """Return V [N, T] of the state before every target token, in at least float32; 0 elsewhere. `packed`: see `lay_out`."""
        forward = lay_out(inputs, self.device, packed if packed is not None else not self.why_padded)
        return forward.targets.unpack(self._read(forward))

    def _read(self, forward: ForwardInputs) -> Tensor:
        """Return V [M] of the state before each target."""
        self.switch(self.train_mode and torch.is_grad_enabled())
        own = local_share(self, forward)
        values: Any = with_gathered_weights(self, lambda: _read_out(self.network.score, self.target_hidden(own)))
        if self.sequence_group is not None and own.local_targets is not None:
            values = self.sequence_group.gather(values, own.local_targets, len(forward.targets.ids))
        wide: Tensor = values.to(torch.promote_types(values.dtype, torch.float32))
        return wide

    def scores(self, inputs: Groups, *, packed: bool | None = None) -> Tensor:
        """Return the scores [N] of prompts with their completions, read at the last token. `packed` is as in `values`."""
        if not self.per_token:
            return self._padded_scores(
                [[*p, *c] for p, group in zip(inputs.prompts, inputs.completions, strict=True) for c in group]
            )
        # V before the extra token 0, which is not computed, is V after the last real token.
        longer = replace(inputs, completions=[[[*c, 0] for c in group] for group in inputs.completions])
        forward = lay_out(longer, self.device, packed if packed is not None else not self.why_padded)
        last = torch.tensor([len(c) + 1 for group in inputs.completions for c in group], dtype=torch.long).cumsum(0) - 1
        return self._read(replace(forward, targets=forward.targets.some(last.to(self.device))))

    def _padded_scores(self, rows: Sequence[Ids]) -> Tensor:
        self.switch(self.train_mode and torch.is_grad_enabled())
        width = max(map(len, rows))
        filler = self.network.config.pad_token_id or 0
        ids = torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        mask = (torch.arange(width, device=self.device) < lengths[:, None]).long()
        if self.dropout_masks.used:
            self.dropout_masks.tokens = hash_tokens(ids, torch.arange(width, device=self.device).expand_as(ids))
        logits: Tensor = with_gathered_weights(self, lambda: self.network(input_ids=ids, attention_mask=mask).logits)
        return logits[:, 0].float()


def _read_out(head: Any, hidden: Tensor) -> Tensor:
    """Return the head's outputs w · h [M] for hidden states h, in float32 if the model is in half precision."""
    if type(head) is not nn.Linear or hidden.dtype not in (torch.bfloat16, torch.float16):
        made: Tensor = head(hidden)[:, 0]
        return made
    # in bfloat16 a reward of 12.3 would become 12.3125
    return nn.functional.linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())[:, 0]


def load(
    path: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    lora: Lora | None = None,
    adapter: Path | None = None,
    gradient_checkpointing: bool = False,
    fresh_head: str = "random",
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
    for_shards: bool = False,
    base: Kind | Literal[""] = "",
    vision: bool = False,
    towers: Sequence[str] = (),
) -> ScalarModel:
    """Load the scalar model at `path`: a saved reward model or critic, or any causal language model, which gets a new head.

    `fresh_head` is for a model without a trained head: "random" draws one from N(0, initializer_range²), "zero" sets it to zeros,
    and "refuse" raises `UserError`. The other arguments are those of `language_model.load`.
    """
    from psigrad.language.models.fused.loader import load as load_known
    from psigrad.language.models.tokenizer_files import read_tokenizer
    from psigrad.language.models.vision import configure_vision

    try:
        kind = base or None if lora is not None else None
        plain = (lora is None or kind is not None) and device == "cpu"
        found = load_known(path, DTYPES[dtype], scalar=True, mapped=for_shards, kind=kind) if plain else None
        network: Any
        network, missing = _by_transformers(path, DTYPES[dtype], trust_remote_code, vision) if found is None else found
        if found is None and kind is not None:
            code_linears(network, kind)
        words = tokenizer or read_tokenizer(path, trust_remote_code=trust_remote_code)
        configure_vision(words, network, path)
    except LOADING_ERRORS as error:
        raise UserError(
            f"No model with a scalar head could be loaded from {path!r} ({reason_of(error)}); give the folder or hub name of a "
            "reward model with one label, or of a causal language model."
        ) from error
    if missing and fresh_head == "refuse":
        raise UserError(
            f"{path!r} is a model without a trained scalar head ({', '.join(missing)} is missing), so its scores would be noise; "
            "give the folder or hub name of a reward model."
        )
    if missing and fresh_head == "zero":
        nn.init.zeros_(network.score.weight)
    network = network.to("cpu" if for_shards else device)
    known = found is not None
    return prepare(network, words, lora, adapter, gradient_checkpointing=gradient_checkpointing, is_known=known, towers=towers)


def _by_transformers(path: str, dtype: torch.dtype, trust_remote_code: bool, vision: bool) -> tuple[PreTrainedModel, list[str]]:
    """Return (transformers' model with a scalar head, the names of the head's weights that the checkpoint lacks)."""
    from psigrad.language.models.vision import needs_vision

    with _quiet():
        if needs_vision(path, vision):
            return _with_tower(path, dtype)
        hf, found = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=dtype, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    head = [name for name in found["missing_keys"] if name.startswith(("score", "classifier"))]
    check_complete(set(found["missing_keys"]).difference(head))
    return hf, head


def _with_tower(path: str, dtype: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """Return (a vision-language model with a scalar head `score`, the names of the head's weights that the checkpoint lacks)."""
    read: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, output_loading_info=True)
    hf, found = read
    check_complete(found["missing_keys"])
    # transformers has no class for such a model
    hf.score = nn.Linear(size(hf.config, "hidden"), 1, bias=False, dtype=dtype)
    saved = read_tensor(path, "score.weight") if "score.weight" in found["unexpected_keys"] else None
    with torch.no_grad():
        if saved is None:
            hf.score.weight.normal_(std=float(hf.config.get_text_config().initializer_range))
        else:
            hf.score.weight.copy_(saved)
    return hf, ["score.weight"] * (saved is None)


def prepare(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lora: Lora | None = None,
    adapter: Path | None = None,
    *,
    gradient_checkpointing: bool = False,
    is_known: bool = False,
    towers: Sequence[str] = (),
) -> ScalarModel:
    """Return a `ScalarModel` for a transformers model in memory.

    `is_known` (see `Pretrained.prepare`) is True if `fused.loader.load` loaded the model. The other arguments are as in `load`.
    """
    network.config.pad_token_id = _padding(tokenizer)
    model = ScalarModel(network, tokenizer)
    if not model.per_token:
        model.why_padded = f"{type(network).__name__} has no score at every token"
    return model.prepare("SEQ_CLS", lora, adapter, gradient_checkpointing, is_known, towers)


def _padding(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the padding id for the model's configuration; None if padding and EOS have the same id."""
    # If EOS were padding, transformers would score the token before it. With None, it refuses several rows.
    return None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' warning that the head is newly initialised, since `load` itself checks for a new head."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
