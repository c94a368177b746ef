"""Sharded tensors (DTensors): access to this process's rows, and safetensors files with the rows of all processes.

torch.distributed.checkpoint writes the files, in its Hugging Face format. Any number of processes can read them. `read` also
accepts a plain model.safetensors.
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
    """Return this process's rows of a sharded tensor. Return any other tensor unchanged."""
    held: Any = x
    return held.to_local() if is_sharded(x) else x


def is_sharded(x: Any) -> bool:
    """Return True if a tensor is a DTensor. The test does not import the class, which would take half a second."""
    return hasattr(x, "to_local")


def num_replicas(x: Tensor, size: int) -> int:
    """Return how many of `size` processes hold the same rows of a sharded tensor. Return 1 for any other tensor."""
    if not is_sharded(x):
        return 1
    held: Any = x
    parts = math.prod(n for n, of in zip(held.device_mesh.shape, held.placements, strict=True) if not of.is_replicate())
    return size // int(parts)


@torch.no_grad()
def local_parameter(parameter: Any) -> nn.Parameter:
    """Return this process's rows of a sharded parameter, as a parameter in the same memory. Return other parameters unchanged."""
    if not is_sharded(parameter):
        whole: nn.Parameter = parameter
        return whole
    return nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)


def first_element(parameter: Any) -> int:
    """Return the position of this process's first element in the flattened full parameter; 0 if the parameter is not sharded."""
    if not is_sharded(parameter):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return sum(start * math.prod(parameter.shape[axis + 1 :]) for axis, start in enumerate(offset))


def shard_like(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor sharded like `parameter`, made from this process's rows `local`. Return a scalar `local` unchanged."""
    if not is_sharded(parameter) or local.dim() == 0:
        return local
    from torch.distributed.tensor import DTensor

    given: Any = parameter
    layout = (given.device_mesh, given.placements)
    whole: Tensor = DTensor.from_local(local, *layout, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return whole


def has_shards(folder: Path) -> bool:
    """Return True if a folder contains files that `write` has written."""
    return any(folder.glob("shard-*.safetensors"))


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return copies of the tensors in host memory. Each process copies only its own rows of a sharded tensor."""
    if not any(map(is_sharded, tensors.values())):
        return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, False, False))
    found: Any = stager.stage({name: x.detach() for name, x in tensors.items()})  # synchronous with these options
    stager.close()
    return dict(found)


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any = None) -> None:
    """Write this process's rows of the tensors to files in `folder`.

    All processes of `group` (by default, of the run) must call this. If one of them fails, all raise its error.
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
    """Fill the tensors, sharded or not, from the safetensors files in `folder`. Raise `UserError` if they do not match."""
    dcp = _checkpoints()
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    try:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError) as error:
        why = f"The tensors in {folder} do not fit this run ({reason_of(error)})"
        raise UserError(f"{why}; use the settings that the run was started with.") from error
    for tensor in tensors.values():
        torch.autograd.graph.increment_version(tensor)


def _checkpoints() -> Any:
    """Import and return torch.distributed.checkpoint. The import takes a second, so it is done only when needed."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint
