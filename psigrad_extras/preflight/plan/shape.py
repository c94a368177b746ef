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
from psigrad.language.models.lora import is_adapted
from psigrad.language.models.sizes import NAMES, cached_numbers, size
from psigrad.language.models.towers import towers_of, why_not_text

# What a configuration of other sizes does without.
_DROPPED = frozenset(("per_layer_config", "dtype", "torch_dtype", "architectures"))


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal language model.

    `parameters` counts tied weights once. `matrices` are those of the layers that tokens are multiplied with, each with `active`
    of them (of experts with those that it is sent to), and `head` those of the output layer, which only predicted positions are.
    `embeddings` are only looked up. `linears` are the (name, inputs, outputs) of the linear layers but the head. `cached` counts
    the numbers that a cache of keys and values holds of one token, in all layers. Where layers differ, sizes are the largest.
    `beside` of the parameters are those of towers beside the text half, which neither learn nor see tokens.
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
    cached: int
    beside: int

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
        return sum(rank * (i + o) for name, i, o in self.linears if is_adapted(name, targets))


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
        model: Any = _built(config)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or table is None:
        raise UserError(f"{type(config).__name__} describes no causal language model; give the folder of one.")
    tied = head.weight is table.weight
    towers = tuple(f"{name}." for name in towers_of(model))
    text = [(name, module) for name, module in model.named_modules() if not f"{name}.".startswith(towers)]
    looked_up = sum(m.weight.numel() for _, m in text if isinstance(m, nn.Embedding))
    learns = [p for name, p in model.named_parameters() if not name.startswith(towers)]
    body = [p for p in learns if p.dim() > 1 and p is not head.weight]
    matrices = sum(p.numel() for p in body) - looked_up + (table.weight.numel() if tied else 0)
    hidden = size(config, "hidden")
    linears = tuple((name, *_ends(m)) for name, m in text if m is not head and isinstance(m, nn.Linear | Conv1D))
    parameters = sum(p.numel() for p in model.parameters())
    return Shape(
        parameters=parameters,
        embeddings=looked_up,
        head=head.weight.numel(),
        tied=tied,
        matrices=matrices,
        hidden=hidden,
        layers=size(config, "layers"),
        heads=size(config, "heads"),
        key_heads=size(config, "key_heads"),
        head_dim=size(config, "head_dim"),
        inner=size(config, "inner") or 4 * hidden,
        vocabulary=size(config, "vocabulary"),
        linears=linears,
        active=matrices - _idle(model, config),
        cached=cached_numbers(config),
        beside=parameters - sum(p.numel() for p in learns),
    )


def _idle(model: Any, config: PreTrainedConfig) -> int:
    """Count the parameters of the experts that a token is not sent to."""
    every, chosen = size(config, "experts"), size(config, "chosen")
    held = [p for name, p in model.named_parameters() if ".experts." in name and p.dim() > 1]
    return round(sum(p.numel() for p in held) * (1 - chosen / every)) if every and chosen else 0


def _built(config: PreTrainedConfig) -> Any:
    try:
        return model_of(config)
    except Exception as error:  # an architecture's own code, which may raise anything at sizes that it does not expect
        what = why_not_text(config) or "give the folder of one"
        raise UserError(f"{type(config).__name__} describes no causal language model; {what}.") from error


def model_of(config: PreTrainedConfig, **options: Any) -> Any:
    """The causal language model that `config` describes, with random weights."""
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, **options)


def resize(config: PreTrainedConfig, **sizes: int) -> PreTrainedConfig:
    """Return the text half with other sizes, by the keys of `models.sizes.NAMES` or their own names, with its first layers."""
    text = config.get_text_config()
    given, layers = text.to_dict(), size(config, "layers")
    by_layer = {name: value for name, value in given.items() if isinstance(value, list) and len(value) == layers}
    kept = {name: value for name, value in given.items() if name not in _DROPPED}
    kept |= {name: [value[i % layers] for i in range(sizes.get("layers", layers))] for name, value in by_layer.items()}
    if "kv_lora_rank" in given:  # of latent attention head_dim is no size of its own
        sizes.pop("head_dim", None)
    for what, value in {**sizes, "num_kv_shared_layers": 0}.items():
        names = [name for name in NAMES.get(what, (what,)) if name in given]
        if names and (what != "key_heads" or names[0] == "num_key_value_heads"):
            kept[names[0]] = value
    if "per_layer_config" in given:
        kept["per_layer_config"] = {}
    return type(text).from_dict(kept)


def _ends(module: Any) -> tuple[int, int]:
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)
