"""Tensors of which each process holds some rows: what it holds, and writing and reading them as safetensors.

The files are those of torch.distributed.checkpoint's Hugging Face form: no pickle, and what N processes wrote any number of
processes can read, as they can read a plain model.safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from psigrad.errors import UserError, reason_of


def local_of(x: Tensor) -> Tensor:
    """The rows of a tensor in shards that this process holds; another tensor as it is."""
    held: Any = x
    return held.to_local() if in_shards(x) else x


def in_shards(x: Any) -> bool:
    """Whether a tensor is a DTensor, whose class takes half a second to import."""
    return hasattr(x, "to_local")


def copies_of(x: Tensor, size: int) -> int:
    """How many of `size` processes hold the same rows of a tensor in shards; 1 of another tensor."""
    if not in_shards(x):
        return 1
    held: Any = x
    parts = math.prod(n for n, of in zip(held.device_mesh.shape, held.placements, strict=True) if not of.is_replicate())
    return size // int(parts)


@torch.no_grad()
def held_of(parameter: Any) -> nn.Parameter:
    """What this process holds of a parameter, as a parameter around the same memory."""
    if not in_shards(parameter):
        whole: nn.Parameter = parameter
        return whole
    return nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)


def like(local: Tensor, parameter: Tensor) -> Tensor:
    """This process' rows of something as large as the parameter, such as a moment, as a tensor in shards."""
    if not in_shards(parameter) or local.dim() == 0:
        return local
    from torch.distributed.tensor import DTensor

    given: Any = parameter
    layout = (given.device_mesh, given.placements)
    whole: Tensor = DTensor.from_local(local, *layout, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return whole


def written_in(folder: Path) -> bool:
    """Whether a folder holds tensors that several processes wrote."""
    return any(folder.glob("shard-*.safetensors"))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same in the host's memory, each process what it holds."""
    if not any(map(in_shards, tensors.values())):
        return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, False, False))
    found: Any = stager.stage({name: x.detach() for name, x in tensors.items()})  # at once, with these options
    stager.close()
    return dict(found)


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any = None) -> None:
    """Each process writes what it holds of the tensors to `folder`; all of them, or those of the `group`, must call this. Where
    one cannot, all raise what it did.
    """
    dcp = _checkpoints()
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
    except dcp.api.CheckpointException as error:  # no Exception; it has what each process raised
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors, whole or in shards, from the safetensors files in `folder`. Raises `UserError` where one is missing."""
    dcp = _checkpoints()
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    try:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"The tensors in {folder} are not those of this run ({reason_of(error)}).") from error
    for tensor in tensors.values():
        torch.autograd.graph.increment_version(tensor)


def _checkpoints() -> Any:
    """torch.distributed.checkpoint, which takes a second to import."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint
