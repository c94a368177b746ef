"""The memory of this machine, and how much of it may be used to cache the activations of sampled tokens for training."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

# A larger number means that there is no limit, like the "max" of most cgroups.
_NO_LIMIT = 1 << 60
WHOLE, ADAPTER = 8, 1
"""The memory of training, as a multiple of the size of the weight files: `WHOLE` if all weights are trained (with float32
masters and moments), `ADAPTER` if only an adapter is.
"""


def share_for_activations(model: str, times: int) -> float:
    """Return a quarter of the memory that training is expected to leave free, in units of 1e9 bytes.

    Training is expected to use `times` × the size of the weight files of `model` (a folder or hub name).
    """
    files = list(Path(model).glob("*.safetensors")) if model and Path(model).is_dir() else []
    if model and not files and isinstance(cached := _cached(model), str):
        files = list(Path(cached).parent.glob("*.safetensors"))
    free = available_memory() - times * sum(file.stat().st_size for file in files)
    return max(0, free // 4) // 10**8 / 10


def _cached(name: str) -> object:
    try:
        return try_to_load_from_cache(name, "config.json")
    except ValueError:  # neither a folder nor a hub name
        return None


def installed_memory() -> int:
    """Return this machine's memory in bytes. If the process runs in a container with less, return the container's limit."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        if 0 < limit < _NO_LIMIT:
            size = min(size, limit)
    return size


def available_memory() -> int:
    """Return how many bytes a new program could use without swapping. If this is unknown, return `installed_memory()`."""
    found = [installed_memory()]
    try:
        told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(told["MemAvailable"].split()[0]))
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError, KeyError):
        pass  # not Linux, or a control group without a limit ("max")
    return max(0, min(found))
