"""The machine that a run is planned for: its memory and the speed of its matrix products."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from psigrad.errors import UserError
from psigrad.kernels.kernels import multiply
from psigrad.language.models.backbone import DTYPES
from psigrad.language.models.free_memory import available_memory, installed_memory
from psigrad.runs.machine import cores, default_threads

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# GPU -> GB of memory; TFLOP/s of dense products in bfloat16; TB/s of memory bandwidth, from the makers' data sheets. All are
# peaks, including those of AMD and PCIe cards. `arithmetic.REACHED` has the shares that are reached in practice.
GPUS = {
    "l4": (24, 121, 0.3),
    "a10g": (24, 70, 0.6),
    "rtx4090": (24, 165, 1.008),
    "l40s": (48, 362, 0.864),
    "a100-40gb": (40, 312, 1.555),
    "a100": (80, 312, 2.039),
    "h100-pcie": (80, 756, 2.0),
    "h100": (80, 989, 3.35),
    "h20": (96, 148, 4.0),
    "h200": (141, 989, 4.8),
    "b200": (180, 2250, 8.0),
    "gb200": (186, 2500, 8.0),
    "mi300x": (192, 1307, 5.3),
}


@dataclass(frozen=True)
class Machine:
    """A machine: `device` cpu or cuda, `memory` in bytes, `peak` FLOP/s of products (0: unknown), `bandwidth` in bytes/s."""

    device: str
    memory: int
    peak: float = 0.0
    bandwidth: float = 0.0

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The type of device, cpu or cuda: the key of the constants in this package."""
        return "cpu" if self.device == "cpu" else "cuda"


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as "24GB", "24 GiB" or "512m"."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?)b?\s*", text.lower())
    try:
        assert match is not None
        value = float(match[1]) * {**_UNITS, **_BINARY}[match[2]]
        assert value >= 1
    except (AssertionError, KeyError, ValueError):
        raise UserError(f"The memory {text!r} is not a size; write it as 24GB, 80GiB or 512MB.") from None
    return int(value)


def named_gpu(name: str, dtype: str) -> Machine:
    """Return a GPU of the table as a machine. Float32 products use TF32, which takes twice as long as bfloat16."""
    if name.lower() not in GPUS:
        raise UserError(f"gpu is {name!r}; expected one of {', '.join(GPUS)}. For another GPU give --memory and --tflops.")
    memory, tflops, bandwidth = GPUS[name.lower()]
    return Machine("cuda", memory * 10**9, tflops * 1e12 / (1 if dtype == "bfloat16" else 2), bandwidth * 1e12)


def nominal(name: str, dtype: str) -> tuple[float, float]:
    """Return the peaks (FLOP/s, bytes/s) of a GPU by the name that its driver reports; for an unknown name, those of an H100."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    known = named_gpu(max((gpu for gpu in GPUS if gpu.replace("-", "") in plain), key=len, default="h100"), dtype)
    return known.peak, known.bandwidth


def machine(
    device: str,
    dtype: str,
    threads: int = 0,
    memory: str = "",
    tflops: float = 0.0,
    *,
    measure: bool = True,
    roughly: bool = False,
) -> Machine:
    """Return this machine, or one with the given `memory` and `tflops`.

    Without `tflops`, the speed is measured; with `roughly`, this takes a fifth of the time and little memory. For a GPU that this
    machine lacks, `memory` is required, and the speed is unknown without `tflops`.
    """
    here = device == "cpu" or torch.cuda.is_available()
    if not here and not memory:
        raise UserError("The plan is for a GPU, but this machine has none; give the GPU's memory, for example --memory 80GB.")
    if memory:
        size = parse_bytes(memory)
    elif device == "cpu":
        size = installed_memory()
    else:
        try:
            size = int(torch.cuda.get_device_properties(device).total_memory)
        except (RuntimeError, AssertionError) as error:  # such as cuda:7 with two devices
            raise UserError(f"device is {device!r}, but only {torch.cuda.device_count()} GPUs are visible.") from error
    if not measure:
        return Machine(device, size, *(nominal(torch.cuda.get_device_name(device), dtype) if device != "cpu" and here else ()))
    peak, bandwidth = _speed(device, dtype, threads, roughly) if here else (0.0, 0.0)
    if tflops:
        # Assume the bandwidth of the GPU in the table with the nearest speed; for a CPU, one byte in the time of 10 operations.
        near = min(GPUS.values(), key=lambda gpu: abs(gpu[1] - tflops))
        bandwidth = bandwidth or (near[2] * 1e12 if device != "cpu" else tflops * 1e11)
        peak = tflops * 1e12
    return Machine(device, size, peak, bandwidth)


def busy(device: str) -> str:
    """Return a sentence if other programs use half of the processor, which lengthens measured times; "" on a GPU."""
    load = os.getloadavg()[0]
    if device != "cpu" or load < 0.5 * cores():
        return ""
    return f"The machine is busy (load {load:.1f} on {cores()} cores), so the run would be faster on an idle one."


def last_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of the processor's last-level cache; 0 if the system does not report it."""
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max((parse_bytes(f"{size}iB") for size in sizes if size[-1:] in ("K", "M")), default=0)


def _speed(device: str, dtype: str, threads: int, roughly: bool) -> tuple[float, float]:
    """Measure and return (FLOP/s of a matrix product, bytes/s of a copy), each the best within a quarter of a second.

    On a CPU, source and copy together are twice as large as the last-level cache, so that memory is measured and not the cache.
    With `roughly` they are 64 MiB.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or default_threads())
    try:
        n = 1024 if device == "cpu" else 8192
        a = torch.ones(n, n, dtype=DTYPES[dtype], device=device)
        size = 1 << 30 if device != "cpu" else max(1 << 25, 0 if roughly else min(last_cache(), available_memory() // 8))
        block = torch.ones(size, dtype=torch.uint8, device=device)
        other, least = torch.empty_like(block), 0.05 if roughly else 0.25
        flops, copied = _best(lambda: multiply(a, a), device, least), _best(lambda: other.copy_(block), device, least)
        return 2 * n**3 / flops, 2 * size / copied
    finally:
        torch.set_num_threads(before)


def _best(work: Callable[[], object], device: str, least: float) -> float:
    """Return the shortest time of a call of `work` in seconds, over at least five calls and `least` seconds."""
    best, count, end = float("inf"), 0, time.perf_counter() + least
    while count < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        best, count = min(best, time.perf_counter() - start), count + 1
    return best
