"""The machine and the process: threads and device of a run, and when, on what and by which command something ran."""

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
# Shapes whose products in bfloat16 oneDNN, and torch's layer over it, keep code for, a third of a MB each: more than a pass has.
# By default it is a thousand, and numbers of tokens are seldom the same twice.
_PRODUCTS = "64"
# Bytes of the blocks that are kept: where memory is short, so few that no hole is as large as a tensor.
_ALL, _PIECE = 1 << 30, 1 << 20
# The most that glibc itself comes to keep, once large blocks have been freed.
_USUAL = 1 << 25


def cores() -> int:
    """Cores that this process may use. macOS cannot be asked that: there it is all of the machine's."""
    asked = getattr(os, "sched_getaffinity", None)
    return len(asked(0)) if asked else os.cpu_count() or 1


def default_threads() -> int:
    """Threads for torch where no setting says how many: OMP_NUM_THREADS, or one per core. Several processes on one machine share
    its cores: torchrun sets OMP_NUM_THREADS=1 for those by itself, so that it says nothing there.
    """
    here, asked = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if here == 1 and asked.isdecimal() and int(asked) else max(1, cores() // here)


def provenance(device: str) -> dict[str, Any]:
    """What figures need to be read next to those from another day or machine: `when` (UTC), `processor`, its `cores` for this
    process, its `vectors` as torch uses them (AVX2, AVX512, …), the `gpu` where `device` is one, and `versions`.
    """
    found: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": _processor(),
        "cores": cores(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    others = {name: version for name in _LIBRARIES if (version := _version(name))}
    return found | {"versions": {"psigrad": __version__, "python": platform.python_version()} | others}


def command() -> str:
    """What was typed to start this process: `psigrad grpo --model …`, or the script that calls psigrad."""
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
    """Threads as asked for, and a loud refusal of a device that is not there."""
    torch.set_num_threads(run.threads or default_threads())
    for kept in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(kept, _PRODUCTS)
    keep_freed_memory(up_to=_PIECE if recompute or run.max_memory else _ALL)
    check_device(run)


def check_device(run: Run) -> None:
    """Raises `UserError` where the device is not here."""
    if run.device == "auto":
        return
    try:
        there = torch.device(run.device)
    except RuntimeError:
        raise UserError(f"device is {run.device!r}; expected auto, cpu, cuda or one of several, as cuda:1.") from None
    if there.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device is {run.device!r} and this torch sees no CUDA device; use device=cpu or install a CUDA build of torch."
        )
    if there.type == "cuda" and (there.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device is {run.device!r} and there are {torch.cuda.device_count()} CUDA devices, from cuda:0 on.")


@contextlib.contextmanager
def prepared_torch(run: Run, *, recompute: bool = False, tf32: bool = False) -> Iterator[None]:
    """The same while the block lasts, with `tf32` products of float32 on a GPU in TF32. Whoever called psigrad then has their
    threads again, and malloc gives large blocks back.
    """
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
    """Let glibc keep blocks of `up_to` so many bytes that torch frees, for the next tensor of that size.

    By default it gives every large block back to the kernel at once, and takes a new one, page fault by page fault, a moment
    later: on a CPU a fifth of a training step and more, and half of it where the vocabulary is large. What is kept lies in pieces
    that not every tensor fits into. Other C libraries have no such setting.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, up_to)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * up_to if up_to == _USUAL else (1 << 31) - 1)


def device(run: Run) -> str:
    """The device of the run: what was asked for, or cuda where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if run.device == "auto" else run.device


def pins_of(run: Run, kernels: object) -> dict[str, str]:
    """Pins of the machine: threads and kernels change the last bits of sums, and a device more. `kernels` is the reason, a
    string, where there are none.
    """
    return {
        "threads": str(torch.get_num_threads()),
        "kernels": "off" if isinstance(kernels, str) else "on",
        "device": torch.device(device(run)).type,
    }


def versions() -> dict[str, str]:
    """The versions of what computes, as a checkpoint's manifest records them."""
    libraries = {name: version for name in ("torch", "transformers") if (version := _version(name))}
    return {"psigrad": __version__, **libraries}
