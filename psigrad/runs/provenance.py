"""When, on what, with which versions and by which command something ran."""

from __future__ import annotations

import platform
import re
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from psigrad import __version__
from psigrad.language.models.native.processor import cores

_LIBRARIES = ("torch", "transformers", "trl")


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
