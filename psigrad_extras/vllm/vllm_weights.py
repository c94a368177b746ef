"""The weights that the trainer sends to vLLM: named as in a checkpoint, in buckets of complete layers, as files or GPU memory.

Buckets are bounded in size, and an adapter can be sent without its base model. Sharded weights are gathered one tensor at a time,
so no process has a second full copy of the model for the engine.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from psigrad.language.models import lora, sharded
from psigrad.language.models.coded_linear import CodedLinear
from psigrad.language.models.language_model import LanguageModel
from psigrad.processes.parallel import shards
from psigrad.processes.parallel.world import Ranks

# The size in bytes from which a bucket is closed at the end of a layer.
BUCKET = 1 << 29
# The adapter ranks that vLLM accepts.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_NUMBERS = itertools.count()


def why_merged(model: LanguageModel) -> str:
    """Return the reason why the adapter must be merged before it is sent, or "" if it can be sent alone."""
    config: Any = next(iter(getattr(model.adapter, "peft_config", {}).values()), None)
    if config is None:
        return "the model has no adapter"
    if config.use_dora or config.modules_to_save:
        return "vLLM supports neither DoRA nor fully trained modules (lora_modules_to_save)"
    if any(isinstance(module, CodedLinear) for module in model.network.modules()):
        return "the base model is quantised, but vLLM's copy would not be"
    if strange := _layers(model) & {"lm_head", "embed_tokens"}:
        return f"the adapter is on {', '.join(sorted(strange))}"
    return "" if config.r <= _RANKS[-1] else f"vLLM supports ranks up to {_RANKS[-1]}"


def _layers(model: LanguageModel) -> set[str]:
    """Return the layers that have an adapter, by the last part of their names."""
    return {name.rpartition(".lora_")[0].rpartition(".")[2] for name in model.trainable()}


def adapter_settings(model: LanguageModel) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for the model's adapter, which name the layers that have one.

    Otherwise the head would get one too, and vLLM 0.32 on CPUs then has no log-probs of prompts.
    """
    wrapped: Any = model.adapter
    rank = next(iter(wrapped.peft_config.values())).r
    size = next(size for size in _RANKS if size >= rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": size, "lora_target_modules": sorted(_layers(model))}


def describe(model: LanguageModel, folder: Path) -> None:
    """Write the model's configuration to a folder, from which an engine can start without weights."""
    config: Any = copy.deepcopy(model.network.config)
    config.dtype = str(model.network.dtype).removeprefix("torch.")
    config.architectures = config.architectures or [type(model.network).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)


def write_base(model: LanguageModel, folder: Path) -> None:
    """Write the base model as a checkpoint with one file per bucket, so that only one gathered bucket is in memory at a time."""
    describe(model, folder)
    below = ((name.replace(".base_layer.", "."), weight) for name, weight in sharded.gather(model) if ".lora_" not in name)
    for bucket in in_buckets(pair for name, weight in below for pair in _as_saved(model.network, name, weight)):
        as_file(bucket, folder)


def write_adapter(model: LanguageModel, folder: Path) -> None:
    """Write the adapter in peft's format. If it is sharded, gather one tensor at a time."""
    sharded.write_adapter(model, dict(sharded.gather(model, set(model.trainable()))), folder)


@torch.no_grad()
def outgoing(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full weight) as in a checkpoint, with the adapter merged.

    All processes of a sharded model must iterate over it together.
    """
    if model.shard_root is None:
        whole = lora.merge_adapter(model.network, model.adapter)
        named: Iterable[tuple[str, Tensor]] = ((name, p.detach()) for name, p in whole.named_parameters())
    else:
        whole, named = model.network, _merged(model)
    for name, weight in named:
        yield from _as_saved(whole, name, weight)


def _merged(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    names = [name for name, _ in model.network.named_parameters()]
    added = {name for name in names if ".lora_" in name}
    matrices = dict(sharded.gather(model, added)) if added else {}
    for name, weight in sharded.gather(model, set(names) - added):
        yield from sharded.merge(model, {**matrices, name: weight}).items()


def _as_saved(network: Any, name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Return (name, weight) as in a checkpoint for one weight of transformers, which has the experts of a layer in one weight."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(network, {name: weight})
    return found.items()


def in_buckets(weights: Iterable[tuple[str, Tensor]], size: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yield buckets of `size` bytes (0: `BUCKET`) or more. A layer stays whole, as the engine fuses several of its weights."""
    held: dict[str, Tensor] = {}
    before = None
    for name, weight in weights:
        layer = re.match(r".*?\.\d+\.|", name)
        here = layer.group() if layer else ""
        if here != before and sum(w.numel() * w.element_size() for w in held.values()) >= (size or BUCKET):
            yield held
            held = {}
        held[name], before = weight, here
    if held:
        yield held


def as_file(bucket: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
    """Write a bucket to a file in `folder`, and return its description for the engine."""
    path = folder / f"{next(_NUMBERS)}.safetensors"
    save_file({name: weight.cpu().contiguous() for name, weight in bucket.items()}, path)
    return {"path": str(path)}


def as_handle(bucket: Mapping[str, Tensor], at: Sequence[torch.device]) -> tuple[dict[str, Any], list[Tensor]]:
    """Return (vLLM's `ipc` description of a bucket, the tensors to keep alive until the engine has answered).

    Each of the engine's processes opens the handle of its own GPU, so each GPU in `at` gets a copy.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    pieces = [weight.contiguous().view(-1).view(torch.uint8) for weight in bucket.values()]
    whole = torch.cat(pieces)
    buffers = [whole.to(device) for device in at]
    handles = {str(torch.cuda.get_device_properties(one).uuid): reduce_tensor(b)[1] for one, b in zip(at, buffers, strict=True)}
    for device in dict.fromkeys((whole.device, *at)):
        torch.cuda.current_stream(device).synchronize()
    return {
        "names": list(bucket),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in bucket.values()],
        "shapes": [list(weight.shape) for weight in bucket.values()],
        "tensor_sizes": [piece.numel() for piece in pieces],
        "ipc_handles": handles,
    }, buffers


@contextlib.contextmanager
def shared_folder(size: int) -> Iterator[Path]:
    """Yield a temporary folder, which is in memory if `size` bytes fit there, and else on disk."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1.1 * size + (1 << 20)
    with tempfile.TemporaryDirectory(prefix="psigrad-vllm-", dir=memory if roomy else None) as folder:
        yield Path(folder)


def size_of(model: LanguageModel) -> int:
    """Return the size of all weights of the model in bytes."""
    return sum(p.numel() * p.element_size() for p in model.network.parameters())


def transposed(network: Any) -> list[str]:
    """Return the names of weights that transformers stores as [in, out] and vLLM as [out, in]."""
    from transformers.pytorch_utils import Conv1D

    found = [f"{name}.weight" for name, module in network.named_modules() if isinstance(module, Conv1D)]
    return [name.replace(".base_layer.", ".") for name in found]


def fingerprint(model: LanguageModel) -> tuple[tuple[int, int], ...]:
    """Return a value that changes whenever the weights change.

    For each parameter, it has the count of in-place writes, and the bit sum of this process's part of the parameter.
    """
    parameters = list(model.network.parameters())
    sums = bit_sums([shards.local_of(p.detach()) for p in parameters])
    return tuple(zip((p._version for p in parameters), sums, strict=True))


def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the sum of its elements, whose bits are read as integers of the same width."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    sums = [t.detach().contiguous().view(kinds[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
    found: list[int] = torch.stack(sums).tolist() if sums else []
    return found


def changed_anywhere(model: LanguageModel, changed: bool) -> bool:
    """Return True if weights changed in this process or, for a sharded model, in any process."""
    return changed if model.shard_root is None else any(Ranks().all_gather(changed))
