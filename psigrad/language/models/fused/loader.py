"""The loader of weights for architectures that the fused decoder supports.

Tests compare these architectures with transformers' modules, so a run need not compare them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError, StrictDataclassError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from psigrad.kernels.codes import CodedMatrix, Kind, can_code, code
from psigrad.kernels.kernels import kernels
from psigrad.language.models.coded_linear import CodedLinear
from psigrad.language.models.fused.families import FAMILIES
from psigrad.language.models.sizes import size

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def suits(config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    """Return True if `load` supports this configuration and dtype, and the kernels run on this CPU."""
    return describes(config) and dtype in (torch.float32, torch.bfloat16) and not isinstance(kernels(), str)


def describes(config: PreTrainedConfig) -> bool:
    """Return True if `load` supports every feature of this configuration, such as rotary embedding and activation."""
    rope = getattr(config, "rope_parameters", None) or {}
    layer_types = set(getattr(config, "layer_types", None) or ())
    family = FAMILIES.get(type(config).__name__.removesuffix("Config"))
    return (
        family is not None
        and family.loads
        and type(config).__module__.startswith("transformers.")
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and rope.get("rope_type") == "default"
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and size(config, "heads") % size(config, "key_heads") == 0
        and layer_types <= {"full_attention", "sliding_attention"}
        and not any(getattr(config, name, None) for name in ("quantization_config", "auto_map", "transformers_weights"))
    )


def _empty(config: PreTrainedConfig, generation: GenerationConfig | None, scalar: bool) -> Any:
    """Return transformers' model without weights (on the meta device). If `scalar`, it is a reward model or a critic."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.initialization import no_init_weights

    auto: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), no_init_weights(), torch.device("meta"):
        network = auto.from_config(config)
    network.tie_weights()
    # The files have no buffers, so those of the rotary embedding are computed.
    network.base_model.rotary_emb = type(network.base_model.rotary_emb)(config=network.config)
    if generation is not None:
        network.generation_config = generation
    return network


def load(
    path: str, dtype: torch.dtype, *, scalar: bool = False, mapped: bool = False, kind: Kind | None = None
) -> tuple[PreTrainedModel, list[str]] | None:
    """Load the model at `path` (a folder or a hub name). Return (the model, the names of weights that its files lack).

    Return None if the model is not supported; the caller must then load it with transformers. If `mapped`, weights that
    already have this dtype are memory-mapped. If a format `kind` is given, the layers' matrices are quantised to it. If
    `scalar`, load a reward model or critic; a missing head is drawn at random. Raises `OSError` if the model is not cached
    and the hub does not answer.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **({"num_labels": 1} if scalar else {}))
        known = suits(config, dtype) and not _file(path, "adapter_config.json")
        files = _files(path) if known else []
        generation = None if scalar else _generation_config(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, StrictDataclassError) as error:
        # A hub that doesn't answer costs half a minute, so transformers must not query it again.
        unanswered = isinstance(error.__cause__, LocalEntryNotFoundError)
        cached = (try_to_load_from_cache(path, name) for name in ("config.json", "adapter_config.json"))
        if unanswered and not any(isinstance(file, str) for file in cached):
            raise
        return None
    if not known or not (files or kind == "gguf"):
        return None
    config.dtype = dtype
    network = _empty(config, generation, scalar)
    wanted = {name: x.shape for name, x in network.named_parameters()}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in files}
        found = {name: file for file in opened.values() for name in file.offset_keys()}
        places = {name: path for path, file in opened.items() for name in file.offset_keys()}
        if scalar:
            found.pop("lm_head.weight", None)
        missing = [name for name in wanted if name not in found]
        if kind != "gguf" and (found.keys() - wanted or missing not in ([], ["score.weight"])):
            return None
        for name, file in found.items():
            if (shape := tuple(file.get_slice(name).get_shape())) != wanted[name]:
                if name == "score.weight":
                    raise ValueError(f"the head has {shape[0]} outputs; the head of a reward model or critic has one")
                raise ValueError(f"{name} has shape {shape}; the configuration says {tuple(wanted[name])}")
        tensors: dict[str, Tensor] = {}  # tensors to be quantised are read below, one by one
        if mapped and kind is None:
            tensors = {name: file.get_tensor(name).to(dtype) for name, file in found.items()}
        elif kind is None:
            tensors = {name: torch.empty(wanted[name], dtype=dtype).copy_(file.get_tensor(name)) for name, file in found.items()}
    if kind is not None:
        of_file = wanted.keys() - {"score.weight"}
        each = _of_gguf(path, config, of_file) if kind == "gguf" else _code_layers(places, found, dtype, kind)
        tensors = _put_codes(network, each, dtype, kind)
        missing = [name for name in missing if name == "score.weight"]
    for name in missing:
        tensors[name] = torch.empty(wanted[name], dtype=dtype).normal_(std=config.initializer_range or 0.02)
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        setattr(network.get_submodule(owner), last, nn.Parameter(tensor))
    network.tie_weights()
    return network.eval(), missing


def _put_codes(
    network: PreTrainedModel, each: Iterator[tuple[str, Tensor | CodedMatrix]], dtype: torch.dtype, kind: Kind
) -> dict[str, Tensor]:
    """Put the matrices of format `kind` that `each` yields into `network`. Return the other tensors by name, cast to `dtype`."""
    rest = {}
    for name, read in each:
        if isinstance(read, CodedMatrix):
            network.set_submodule(name.removesuffix(".weight"), CodedLinear(read, None, kind))
        else:
            rest[name] = torch.empty(read.shape, dtype=dtype).copy_(read)
    return rest


def _of_gguf(path: str, config: PreTrainedConfig, wanted: set[str]) -> Iterator[tuple[str, CodedMatrix | Tensor]]:
    """Yield (name, tensor) for the `wanted` weights of the GGUF file in `path`. Layers' matrices stay quantised if possible."""
    from psigrad.language.models.fused import gguf_weights

    yield from gguf_weights.read(path, config, wanted)


def _code_layers(
    places: Mapping[str, str], wanted: Iterable[str], dtype: torch.dtype, kind: Kind
) -> Iterator[tuple[str, Tensor | CodedMatrix]]:
    """Yield (name, tensor) for the `wanted` tensors, cast to `dtype`. The layers' matrices are quantised to the format `kind`.

    `places` maps a tensor's name to its safetensors file.
    """
    for name in wanted:
        with safe_open(places[name], "pt") as alone:  # closing the file frees its pages
            read = alone.get_tensor(name).to(dtype)
        yield name, code(read, kind) if ".layers." in name and can_code(read, kind) else read


def _files(path: str) -> list[str]:
    """Return the paths of the safetensors files of the model at `path`."""
    if whole := _file(path, "model.safetensors"):
        return [whole]
    index = _file(path, "model.safetensors.index.json")
    names = set(json.loads(Path(index).read_text())["weight_map"].values()) if index else set()
    return [str(cached_file(path, name)) for name in sorted(names)]


def _file(path: str, name: str) -> str | None:
    """Return the path of the file `name` of the model at `path`; None if there is no such file."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return found


def _generation_config(path: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # older models store these settings in config.json, and `AutoConfig` drops them
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)
