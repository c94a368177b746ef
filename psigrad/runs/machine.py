"""The machine and the process of a run: threads, device, hardware, versions, time and command."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from psigrad import __version__
from psigrad.config import Run
from psigrad.errors import UserError

_LIBRARIES = ("torch", "transformers", "trl")
# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# For how many shapes of bfloat16 matrix products oneDNN, and torch's layer over it, cache code. A shape takes a third of a MB.
# The default is 1000. A pass has fewer than 64 shapes, which depend on its number of tokens and so seldom occur again.
_PRODUCTS = "64"
# The largest freed block that malloc keeps, in bytes: `_ALL`, or `_PIECE` if memory is short, so that the memory of large tensors
# always goes back to the system.
_ALL, _PIECE = 1 << 30, 1 << 20
# The limit up to which glibc raises its own default while a program runs.
_USUAL = 1 << 25


def cores() -> int:
    """Return the number of cores that this process may use. On systems that do not report it (macOS), return all cores."""
    asked = getattr(os, "sched_getaffinity", None)
    return len(asked(0)) if asked else os.cpu_count() or 1


def default_threads() -> int:
    """Return the default number of threads for torch: OMP_NUM_THREADS, or this process's share of the cores."""
    # torchrun sets OMP_NUM_THREADS to 1, so several processes ignore it
    here, asked = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if here == 1 and asked.isdecimal() and int(asked) else max(1, cores() // here)


def provenance(device: str) -> dict[str, Any]:
    """Return facts about this machine and `device` that are stored with measurements: processor, GPU, versions, and so on."""
    found: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": _processor(),
        "cores": cores(),
        "vectors": torch.backends.cpu.get_cpu_capability(),  # AVX2, AVX512, …
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    others = {name: version for name in _LIBRARIES if (version := _version(name))}
    return found | {"versions": {"psigrad": __version__, "python": platform.python_version()} | others}


def command() -> str:
    """Return this process's command line, such as `psigrad grpo --model …` or `python train.py`; in Jupyter, "a notebook"."""
    program, *arguments = sys.argv or [""]
    path = Path(program)
    if path.stem == "psigrad" or path.parts[-2:] == ("psigrad", "__main__.py"):
        return shlex.join(["psigrad", *arguments])
    if path.stem in ("ipykernel_launcher", "colab_kernel_launcher"):
        return "a notebook"
    return shlex.join(["python", path.name, *arguments]) if program and program not in ("-", "-c") else "python"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return name[1].strip() if name else platform.processor() or platform.machine()


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def prepare_torch(run: Run, *, recompute: bool = False) -> None:
    """Configure torch, malloc and oneDNN for the run, and check its device. `recompute`: True with gradient checkpointing."""
    torch.set_num_threads(run.threads or default_threads())
    for kept in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(kept, _PRODUCTS)
    keep_freed_memory(up_to=_PIECE if recompute or run.max_memory else _ALL)
    check_device(run)


def check_device(run: Run) -> None:
    """Raise `UserError` if the machine does not have the device `run.device`."""
    if run.device == "auto":
        return
    try:
        there = torch.device(run.device)
    except RuntimeError:
        raise UserError(f"device is {run.device!r}; expected auto, cpu, cuda, or one device such as cuda:1.") from None
    if there.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device is {run.device!r}, but this torch finds no CUDA device; use device=cpu or install a CUDA build of torch."
        )
    if there.type == "cuda" and (there.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device is {run.device!r}, but there are {torch.cuda.device_count()} CUDA devices, numbered from cuda:0."
        )


@contextlib.contextmanager
def prepared_torch(run: Run, *, recompute: bool = False, tf32: bool = False) -> Iterator[None]:
    """Apply `prepare_torch` while the block runs. With `tf32`, float32 matrix products on a GPU use TF32."""
    before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    prepare_torch(run, recompute=recompute)
    if tf32 and device(run).startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cuda.matmul.allow_tf32 = before[1]
        keep_freed_memory(up_to=_USUAL)


def keep_freed_memory(up_to: int = _ALL) -> None:
    """Make glibc's malloc keep freed blocks of at most `up_to` bytes, so that later tensors can reuse them."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        # The page faults of new blocks take 20 % or more of a training step on a CPU, but kept blocks fragment the memory.
        libc.mallopt(_M_MMAP_THRESHOLD, up_to)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * up_to if up_to == _USUAL else (1 << 31) - 1)


def device(run: Run) -> str:
    """Return the device of the run, `run.device`. If that is "auto", return "cuda" if it is available, and otherwise "cpu"."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if run.device == "auto" else run.device


def pins_of(run: Run, kernels: object) -> dict[str, str]:
    """Return the pins (see `psigrad.records.pins`) that affect rounding: the threads, the kernels and the device.

    `kernels` has psigrad's compiled kernels, or is a text that says why they are off.
    """
    return {
        "threads": str(torch.get_num_threads()),
        "kernels": "off" if isinstance(kernels, str) else "on",
        "device": torch.device(device(run)).type,
    }


def versions() -> dict[str, str]:
    """Return the versions of psigrad, torch and transformers, for a checkpoint's manifest."""
    libraries = {name: version for name in ("torch", "transformers") if (version := _version(name))}
    return {"psigrad": __version__, **libraries}
