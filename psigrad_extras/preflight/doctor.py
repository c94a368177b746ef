"""`psigrad doctor`: a report of which features for training this machine has, and which are missing."""

from __future__ import annotations

import importlib
import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

import torch

import psigrad
from psigrad import extras
from psigrad.config import OnlineConfig
from psigrad.config.fields import device_defaults, settings_of
from psigrad.kernels.build import compiler, prebuilt
from psigrad.kernels.kernels import kernels
from psigrad.kernels.processor import fast_bfloat16
from psigrad.language.models.free_memory import available_memory, installed_memory
from psigrad.processes.sandbox import tier_of_this_machine
from psigrad.records.report.terminal import show_size
from psigrad.runs.machine import cores

# Extra -> the package by which it is recognised as installed, if that has another name.
PACKAGES = {
    "cluster": "ray",
    "control": "Box2D",
    "ifeval": "py3langid",
    "lm-eval": "lm_eval",
    "postgres": "psycopg",
    "serve": "uvicorn",
    "studio": "fastapi",
    "sweep": "optuna",
    "tasks": "reasoning_gym",
}


class Check(NamedTuple):
    """A line of the report: the name of the check, its state, and advice if it is not ok."""

    name: str
    state: Literal["ok", "missing", "broken"]
    detail: str
    advice: str = ""


def checks() -> Iterator[Check]:
    """Yield all checks, in the order of the report."""
    yield Check("psigrad", "ok", f"{psigrad.__version__}, Python {platform.python_version()}, {platform.system()}")
    for package in ("torch", "transformers", "peft", "datasets"):
        yield _package(package, f"pip install {package}")
    halves = "bfloat16 is faster than float32" if fast_bfloat16() else "bfloat16 saves memory but no time"
    yield Check("processor", "ok", f"cores: {cores()}, torch threads: {torch.get_num_threads()}; {halves}")
    yield memory(available_memory(), installed_memory())
    yield _gpu()
    yield defaults("cuda" if torch.cuda.is_available() else "cpu")
    yield _compiler()
    yield _kernels()
    tier = tier_of_this_machine()
    yield Check("code sandbox", "missing" if tier.name == "none" else "ok", tier.sentence(), tier.why_not)
    for extra in sorted(set(extras.requirements()) - {"", *extras.DEVELOPERS}):
        yield _package(PACKAGES.get(extra, extra), extras.install_command(extra), f"extra {extra}")
    room = shutil.disk_usage(".").free
    tight = room < 5e9
    advice = "free some space: a checkpoint takes about 12 bytes per weight" if tight else ""
    yield Check("disk", "broken" if tight else "ok", f"{show_size(room)} free in the current folder", advice)


def report(*, as_json: bool = False, looked: Callable[[], Iterator[Check]] = checks) -> str:
    """Return the checks as aligned lines, or as one JSON object {name: {state, detail, advice}}."""
    found = list(looked())
    if as_json:
        return json.dumps({check.name: {k: v for k, v in check._asdict().items() if k != "name"} for check in found}, indent=1)
    absent = [check for check in found if check.name.startswith("extra ") and check.state == "missing"]
    if absent:  # all in one line, since a new user has no extras and needs none
        names = ", ".join(check.name.removeprefix("extra ") for check in absent)
        found = [check for check in found if check not in absent]
        found.append(Check("extras", "missing", names, "optional; a command that needs one names its packages"))
    width, lines = max(len(check.name) for check in found), []
    for check in found:
        lines.append(f"{check.state:<8}{check.name:<{width}}  {check.detail}")
        if check.advice:
            lines.append(" " * (width + 10) + check.advice)
    return "\n".join(lines)


def _package(name: str, advice: str, label: str = "") -> Check:
    try:
        importlib.import_module(name)
        # torch.__version__ includes the build, such as +cu130, which the package's version may lack.
        return Check(label or name, "ok", f"{name} {torch.__version__ if name == 'torch' else version(name)}")
    except PackageNotFoundError:
        return Check(label or name, "ok", name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return Check(label or name, "missing", f"{name} is not installed", advice)
        return Check(label or name, "broken", f"{name} cannot be imported: {error}", advice)


def memory(unused: int, total: int) -> Check:
    """Return the check of memory: `unused` bytes that a run could use now, of the `total` of the machine or container."""
    detail = f"{show_size(unused)} of {show_size(total)} free"
    if unused < 2e9:
        return Check("memory", "broken", detail, "end other programs; `psigrad plan METHOD --model …` predicts a run's memory")
    return Check("memory", "ok", detail)


def _gpu() -> Check:
    if torch.backends.mps.is_available():
        return Check("GPU", "missing", "Apple's GPU is not used; runs use the CPU")
    if not torch.cuda.is_available():
        why = "torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
        return Check("GPU", "missing", f"{why}; runs use the CPU", "docs/install.md has the command for a CUDA build")
    shown = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    halves = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bfloat16: train with --dtype float32"
    return Check("GPU", "ok", "; ".join(f"{gpu.name}, {show_size(gpu.total_memory)}, {halves}" for gpu in shown))


def defaults(device: str) -> Check:
    """Return a line of the report with the defaults of a training run on this type of device."""
    own = {name: settings_of(OnlineConfig)[name].default for name in device_defaults(OnlineConfig, "cuda")}
    found = {name: f"{value}" for name, value in (own | device_defaults(OnlineConfig, device)).items()}
    if found["micro_batch_tokens"] == "0":
        found["micro_batch_tokens"] = "by free memory"
    said = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in found.items())
    more = "; float32 masters, TF32, fused AdamW, decoding with CUDA graphs" if device == "cuda" else ""
    return Check("defaults", "ok", f"on {device}: {said}{more}")


def _compiler() -> Check:
    advice = "apt install g++, or xcode-select --install on macOS, to compile the CPU kernels on first use"
    name = compiler()
    if name is None and prebuilt() is not None:
        return Check("C++ compiler", "ok", "no compiler, but the package has kernels for this processor")
    if name is None:
        return Check("C++ compiler", "missing", "neither g++ nor clang++ was found", advice)
    try:
        said = subprocess.run([name, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check("C++ compiler", "broken", f"{name} does not run: {error}", advice)
    return Check("C++ compiler", "ok", said.splitlines()[0] if said else name)


def _kernels() -> Check:
    """Return the check of psigrad's compiled kernels for CPUs. One of them is compared with PyTorch."""
    found = kernels()
    if isinstance(found, str):
        return Check("CPU kernels", "missing", found, "training on a CPU works without these kernels but is slower")
    x, weight = torch.randn(33, 64), torch.randn(64)
    difference = float((found.rms_norm(x, weight, 1e-6) - torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)).abs().max())
    if difference > 1e-4:
        return Check("CPU kernels", "broken", f"RMSNorm is off by {difference:.1e}", "disable them with PSIGRAD_NATIVE=0")
    ready = prebuilt()
    made = "compiled on this machine" if ready is None else f"prebuilt for {ready.stem}"
    by = ", ".join(f"{kind} by {found.products.instructions(getattr(torch, kind))}" for kind in ("float32", "bfloat16"))
    return Check("CPU kernels", "ok", f"{made}, {by}; RMSNorm agrees with PyTorch")
