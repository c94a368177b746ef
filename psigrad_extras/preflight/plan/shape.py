"""The counts of a model from its configuration alone: no weight is read or made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from psigrad.errors import UserError, reason_of
from psigrad.language.loading.model_source import meant
from psigrad.language.models.backbone import LOADING_ERRORS
from psigrad.language.models.fused import weights_only
from psigrad.language.models.fused.weights_only import WeightsOnly

# Names of the same size in different architectures.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "keys": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal language model.

    `parameters` counts tied weights once. `matrices` are those of the layers that tokens are multiplied with, each with `active`
    of them (of experts with those that it is sent to), and `head` those of the output layer, which only predicted positions are.
    `embeddings` are only looked up. `linears` are the (name, inputs, outputs) of the linear layers but the head.
    """

    parameters: int
    embeddings: int
    head: int
    tied: bool
    matrices: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    linears: tuple[tuple[str, int, int], ...]
    active: int

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads, which is also that of the values."""
        return self.key_heads * self.head_dim

    @property
    def scalar_parameters(self) -> int:
        """Parameters of the same backbone with one number per token in place of the head."""
        return self.parameters - (0 if self.tied else self.head) + self.hidden

    @property
    def layer_matrices(self) -> int:
        """Weights of the linear layers inside layers, which a base in codes has in codes."""
        return sum(i * o for name, i, o in self.linears if any(part.isdigit() for part in name.split(".")))

    def lora_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of an adapter B A of this rank on the layers that `targets` name: rank · (inputs + outputs) each."""
        every = targets == ("all-linear",)
        return sum(rank * (i + o) for name, i, o in self.linears if every or name.rpartition(".")[2] in targets)


@cache
def shape_of(path: str, *, local: bool = False) -> Shape:
    """The shape of the model at `path`: a folder, a config.json, or a hub name. Raises `UserError` if there is none.

    With `local` a hub name is only looked up among what was downloaded before.
    """
    try:
        return count_shape(config_of(path, local=local))
    except UserError:
        raise
    except LOADING_ERRORS as error:  # sizes that no tensor has
        raise UserError(f"The configuration of {path!r} describes no model ({reason_of(error)}).") from error


@cache
def config_of(path: str, *, local: bool = False) -> PreTrainedConfig:
    """The configuration at `path`."""
    if not path:
        raise UserError("No model was given; name a folder, a config.json or a hub model with --model (model.path).")
    path = meant(path)
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=local, trust_remote_code=False)
        return found
    except LOADING_ERRORS as error:
        reason = reason_of(error)
        raise UserError(f"No model configuration could be read from {path!r} ({reason}); give a folder or a hub name.") from error


def count_shape(config: PreTrainedConfig) -> Shape:
    """The shape of what `config` describes, built on the meta device, where tensors have sizes and no memory."""
    with torch.device("meta"):
        model: Any = WeightsOnly(config, None) if weights_only.describes(config) else _built(config)
    text = config.get_text_config()
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or table is None:
        raise UserError(f"{type(config).__name__} describes no causal language model; give the folder of one.")
    tied = head.weight is table.weight
    looked_up = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    body = [p for name, p in model.named_parameters() if p.dim() > 1 and p is not head.weight]
    matrices = sum(p.numel() for p in body) - looked_up + (table.weight.numel() if tied else 0)
    hidden, heads = size(text, "hidden"), size(text, "heads")
    linears = tuple((name, *_ends(m)) for name, m in model.named_modules() if m is not head and isinstance(m, nn.Linear | Conv1D))
    return Shape(
        parameters=sum(p.numel() for p in model.parameters()),
        embeddings=looked_up,
        head=head.weight.numel(),
        tied=tied,
        matrices=matrices,
        hidden=hidden,
        layers=size(text, "layers"),
        heads=heads,
        key_heads=size(text, "keys"),
        head_dim=getattr(text, "head_dim", None) or hidden // max(heads, 1),
        inner=size(text, "inner") or 4 * hidden,
        vocabulary=int(text.vocab_size),
        linears=linears,
        active=matrices - _idle(model, text),
    )


def _idle(model: Any, text: Any) -> int:
    """Parameters of the experts that a token is not sent to."""
    every, chosen = size(text, "experts"), size(text, "chosen")
    held = [p for name, p in model.named_parameters() if ".experts." in name and p.dim() > 1]
    return round(sum(p.numel() for p in held) * (1 - chosen / every)) if every and chosen else 0


def _built(config: PreTrainedConfig) -> Any:
    try:
        return model_of(config)
    except Exception as error:  # an architecture's own code, which may raise anything at sizes that it does not expect
        raise UserError(f"{type(config).__name__} describes no causal language model; give the folder of one.") from error


def model_of(config: PreTrainedConfig, **options: Any) -> Any:
    """The causal language model that `config` describes, with random weights."""
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, **options)


def size(config: Any, what: str) -> int:
    """One size of a configuration, by whichever name it has; 0 where it has none."""
    return next((int(value) for name in _NAMES[what] if (value := getattr(config, name, None)) is not None), 0)


def resize(config: PreTrainedConfig, **sizes: int) -> PreTrainedConfig:
    """The same architecture with other sizes, by the names of `_NAMES` and `vocab_size`, `head_dim`."""
    given = config.to_dict()
    for what, value in sizes.items():
        names = [name for name in _NAMES.get(what, (what,)) if name in given]
        if what != "keys" or names[0] == "num_key_value_heads":
            given |= {names[0]: value} if names else {}
    # sizes of the layers one by one would contradict the new number of layers
    given = {name: value for name, value in given.items() if name not in ("layer_types", "dtype", "torch_dtype", "architectures")}
    return type(config).from_dict(given)


def _ends(module: Any) -> tuple[int, int]:
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)
