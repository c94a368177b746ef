"""The sizes of a model, from its configuration only. No weights are read or created."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from psigrad.errors import UserError, reason_of
from psigrad.language.loading.model_source import resolve_path
from psigrad.language.models.backbone import LOADING_ERRORS
from psigrad.language.models.lora import is_adapted
from psigrad.language.models.sizes import NAMES, cached_numbers, size
from psigrad.language.models.towers import towers_of
from psigrad.language.models.vision import requires_vision, why_not_text

# The fields that a configuration with other sizes must not have.
_DROPPED = frozenset(("per_layer_config", "dtype", "torch_dtype", "architectures"))


@dataclass(frozen=True)
class Shape:
    """The sizes of a causal language model.

    `parameters` counts tied weights once. `matrices` counts the weights of the layers' matrix products, of which a token uses
    `active` (with experts, only those of its experts). `head` counts the weights of the output layer, which only predicted
    positions use, and `embeddings` those that are only looked up. `linears` are (name, inputs, outputs) of all linear layers
    except the head. `cached` counts the numbers of one token in the KV cache, over all layers. If layers differ, sizes are the
    largest. `beside` counts the parameters of vision or audio towers, which are not trained and get no text tokens.
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
        """The width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """The width of all key heads, which is also that of the values."""
        return self.key_heads * self.head_dim

    @property
    def scalar_parameters(self) -> int:
        """The parameters of the same backbone with one number per token instead of the head."""
        return self.parameters - (0 if self.tied else self.head) + self.hidden

    @property
    def layer_matrices(self) -> int:
        """The number of weights of the linear layers inside layers, which are the ones that quantisation of the base affects."""
        return sum(i * o for name, i, o in self.linears if any(part.isdigit() for part in name.split(".")))

    def lora_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the number of parameters of a LoRA adapter of this rank on the layers `targets`.

        A layer has rank · (inputs + outputs).
        """
        return sum(rank * (i + o) for name, i, o in self.linears if is_adapted(name, targets))


@cache
def shape_of(path: str, *, local: bool = False) -> Shape:
    """Return the shape of the model at `path`: a folder, a config.json, or a hub name. Raises `UserError` if there is none.

    With `local`, a hub name is only looked for among previous downloads.
    """
    try:
        return count_shape(config_of(path, local=local))
    except UserError:
        raise
    except LOADING_ERRORS as error:  # such as sizes that no tensor can have
        raise UserError(f"The configuration of {path!r} describes no model ({reason_of(error)}); correct its values.") from error


@cache
def config_of(path: str, *, local: bool = False) -> PreTrainedConfig:
    """Return transformers' configuration at `path`. Raises `UserError` if there is none."""
    if not path:
        raise UserError("No model was given; name a folder, a config.json or a hub model with --model (model.path).")
    path = resolve_path(path)
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=local, trust_remote_code=False)
        return found
    except LOADING_ERRORS as error:
        reason = reason_of(error)
        raise UserError(f"No model configuration could be read from {path!r} ({reason}); give a folder or a hub name.") from error


def count_shape(config: PreTrainedConfig) -> Shape:
    """Return the shape of the model of `config`, built on the meta device, where tensors have sizes but no memory."""
    with torch.device("meta"):
        model: Any = _built(config)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or table is None:
        raise UserError(f"{type(config).__name__} is not the configuration of a causal language model; give the folder of one.")
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
    """Return the number of parameters of those experts to which a token is not sent."""
    every, chosen = size(config, "experts"), size(config, "chosen")
    held = [p for name, p in model.named_parameters() if ".experts." in name and p.dim() > 1]
    return round(sum(p.numel() for p in held) * (1 - chosen / every)) if every and chosen else 0


def _built(config: PreTrainedConfig) -> Any:
    try:
        return model_of(config)
    except Exception as error:  # the code of an architecture may raise anything for unexpected sizes
        what = why_not_text(config) or "give the folder of one"
        raise UserError(f"{type(config).__name__} is not the configuration of a causal language model; {what}.") from error


def model_of(config: PreTrainedConfig, **options: Any) -> Any:
    """Return the causal or vision-language model of `config`, with random weights."""
    auto: Any = AutoModelForImageTextToText if requires_vision(config.model_type) else AutoModelForCausalLM
    return auto.from_config(config, **options)


def resize(config: PreTrainedConfig, like: Sequence[int] = (), **sizes: int) -> PreTrainedConfig:
    """Return the configuration of the text model with other sizes and fewer layers: the first, or those with the indices `like`.

    Sizes are given by the keys of `models.sizes.NAMES`, or by the configuration's own names.
    """
    text = config.get_text_config()
    given, by_layer = text.to_dict(), _by_layer(text)
    sizes = {**sizes, "layers": len(like)} if like else sizes
    chosen = like or range(sizes.get("layers", size(config, "layers")))
    kept = {name: value for name, value in given.items() if name not in _DROPPED}
    kept |= {name: [value[i % len(value)] for i in chosen] for name, value in by_layer.items()}
    if "kv_lora_rank" in given:  # in multi-head latent attention, head_dim follows from other sizes
        sizes.pop("head_dim", None)
    for what, value in {**sizes, "num_kv_shared_layers": 0}.items():
        names = [name for name in NAMES.get(what, (what,)) if name in given]
        if names and (what != "key_heads" or names[0] == "num_key_value_heads"):
            kept[names[0]] = value
    if "per_layer_config" in given:
        kept["per_layer_config"] = {}
    return type(text).from_dict(kept)


def layer_kinds(config: PreTrainedConfig) -> dict[int, int]:
    """Return {index of the first layer of a kind: number of its layers}.

    Layers are of one kind if all settings that the configuration lists by layer have the same values for them.
    """
    rows = zip(*_by_layer(config.get_text_config()).values(), strict=True)
    kinds = list(map(str, rows)) or [""] * size(config, "layers")
    return {kinds.index(kind): count for kind, count in Counter(kinds).items()}


def _by_layer(text: PreTrainedConfig) -> dict[str, list[Any]]:
    layers = size(text, "layers")
    return {name: value for name, value in text.to_dict().items() if isinstance(value, list) and len(value) == layers}


def _ends(module: Any) -> tuple[int, int]:
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)
