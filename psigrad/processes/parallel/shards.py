"""Tensors of which each process holds some rows: the local part, and safetensors files of them.

The files are in the Hugging Face form of torch.distributed.checkpoint, without pickle. Any number of processes can read the files
of N processes, and also a plain model.safetensors.
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
    """Return the local rows of a tensor in shards; any other tensor unchanged."""
    held: Any = x
    return held.to_local() if in_shards(x) else x


def in_shards(x: Any) -> bool:
    """Return True if a tensor is a DTensor, whose class takes half a second to import."""
    return hasattr(x, "to_local")


def copies_of(x: Tensor, size: int) -> int:
    """Return the number of processes among `size` that hold the same rows of a tensor in shards; 1 for another tensor."""
    if not in_shards(x):
        return 1
    held: Any = x
    parts = math.prod(n for n, of in zip(held.device_mesh.shape, held.placements, strict=True) if not of.is_replicate())
    return size // int(parts)


@torch.no_grad()
def held_of(parameter: Any) -> nn.Parameter:
    """Return the local part of a parameter, as a parameter that shares its memory."""
    if not in_shards(parameter):
        whole: nn.Parameter = parameter
        return whole
    return nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)


def like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return this process's rows of a tensor of the parameter's shape, such as a moment, as a tensor in shards."""
    if not in_shards(parameter) or local.dim() == 0:
        return local
    from torch.distributed.tensor import DTensor

    given: Any = parameter
    layout = (given.device_mesh, given.placements)
    whole: Tensor = DTensor.from_local(local, *layout, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return whole


def written_in(folder: Path) -> bool:
    """Return True if a folder contains tensors that several processes wrote."""
    return any(folder.glob("shard-*.safetensors"))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return copies of the tensors in the host's memory, of each process's local part."""
    if not any(map(in_shards, tensors.values())):
        return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, False, False))
    found: Any = stager.stage({name: x.detach() for name, x in tensors.items()})  # synchronous with these options
    stager.close()
    return dict(found)


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any = None) -> None:
    """Write the local part of the tensors to `folder`, in each process.

    All processes, or those of the `group`, must call this. If one fails, all raise its error.
    """
    dcp = _checkpoints()
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
    except dcp.api.CheckpointException as error:  # not an Exception; it contains the error of each process
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill the tensors, whole or in shards, from the safetensors files in `folder`. Raise `UserError` if one is missing."""
    dcp = _checkpoints()
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    try:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"The tensors in {folder} are not those of this run ({reason_of(error)}).") from error
    for tensor in tensors.values():
        torch.autograd.graph.increment_version(tensor)


def _checkpoints() -> Any:
    """Import torch.distributed.checkpoint, which takes a second."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint
