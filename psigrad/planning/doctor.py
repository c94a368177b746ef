"""`psigrad doctor`: what this machine offers for training, and what is missing."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

import torch

import psigrad
from psigrad.native.kernels import kernels
from psigrad.planning.hardware import installed
from psigrad.sandbox import tier_of_this_machine

# extra -> the package that shows whether it is installed
_EXTRAS = {
    "control": "Box2D",
    "studio": "fastapi",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "vllm": "vllm",
    "wandb": "wandb",
}


class Check(NamedTuple):
    """One line: what was looked at, how it is, and what to do where it is not well."""

    name: str
    state: Literal["ok", "missing", "broken"]
    detail: str
    advice: str = ""


def checks() -> Iterator[Check]:
    """Everything that is looked at, in the order that it is printed."""
    yield Check("psigrad", "ok", f"{psigrad.__version__}, Python {platform.python_version()}, {platform.system()}")
    for package in ("torch", "transformers", "peft", "datasets"):
        yield _package(package, f"pip install {package}")
    yield Check(
        "processor", "ok", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, {_size(installed())} memory"
    )
    yield _gpu()
    yield _kernels()
    tier = tier_of_this_machine()
    yield Check("code sandbox", "missing" if tier.name == "none" else "ok", tier.sentence(), tier.why_not)
    for extra, package in _EXTRAS.items():
        yield _package(package, f'pip install "psigrad[{extra}]"', f"extra {extra}")
    free = shutil.disk_usage(".").free
    tight = free < 5e9
    advice = "checkpoints need room: about 12 bytes per weight for each" if tight else ""
    yield Check("disk", "broken" if tight else "ok", f"{_size(free)} free in the current folder", advice)


def report(*, as_json: bool = False, looked: Callable[[], Iterator[Check]] = checks) -> str:
    """The checks as aligned lines, or as one JSON object {name: {state, detail, advice}}."""
    found = list(looked())
    if as_json:
        return json.dumps({check.name: {k: v for k, v in check._asdict().items() if k != "name"} for check in found}, indent=1)
    width, lines = max(len(check.name) for check in found), []
    for check in found:
        lines.append(f"{check.state:<8}{check.name:<{width}}  {check.detail}")
        if check.advice:
            lines.append(" " * (width + 10) + check.advice)
    return "\n".join(lines)


def _package(name: str, advice: str, label: str = "") -> Check:
    try:
        importlib.import_module(name)
        return Check(label or name, "ok", f"{name} {version(name)}")
    except PackageNotFoundError:
        return Check(label or name, "ok", name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return Check(label or name, "missing", f"{name} is not installed", advice)
        return Check(label or name, "broken", f"{name} cannot be imported: {error}", advice)


def _gpu() -> Check:
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
        return Check("GPU", "missing", f"{why}; runs use the CPU", "the README's table of installs has the build for CUDA")
    shown = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Check("GPU", "ok", "; ".join(f"{gpu.name}, {_size(gpu.total_memory)}" for gpu in shown))


def _kernels() -> Check:
    """The compiled kernels for a CPU, one of them checked against PyTorch."""
    found = kernels()
    if isinstance(found, str):
        return Check("CPU kernels", "missing", found, "with a C++ compiler (g++ or clang++) training on a CPU is faster")
    x, weight = torch.randn(33, 64), torch.randn(64)
    difference = float((found.rms_norm(x, weight, 1e-6) - torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)).abs().max())
    if difference > 1e-4:
        return Check("CPU kernels", "broken", f"a result differs from PyTorch's by {difference:.1e}", "set PSIGRAD_NATIVE=0")
    return Check("CPU kernels", "ok", "compiled and loaded; a result agrees with PyTorch's")


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
