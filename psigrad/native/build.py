"""Compiles the kernels for this very processor on first use and keeps the result."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

from psigrad.native.processor import identity

SOURCES = ("rows.cpp", "attention.cpp", "products.cpp", "products_bf16.cpp", "decoding.cpp", "adamw.cpp")
HEADERS = ("common.h",)
# without masks GCC takes no loop apart that chooses between floats, as that may trap where the program would not: exp in AVX2
FLAGS: tuple[str, ...] = ("-O3", "-march=native", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
if platform.machine() == "x86_64":
    FLAGS += ("-mprefer-vector-width=512",)  # GCC's choice on recent Intel is 256
SWITCH = "PSIGRAD_NATIVE"  # 0 switches the kernels off


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled kernels, or why there are none."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler was found (g++ or clang++)"
    try:
        path = _folder() / f"{_key(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {error.stderr.strip().splitlines()[0] if error.stderr.strip() else error}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the kernels could not be compiled or loaded: {error}"


def bind(loaded: ctypes.CDLL, signatures: Mapping[str, str]) -> SimpleNamespace:
    """Functions of the library by name, from the kinds of their arguments: p pointer, i int64, f float, t int."""
    codes = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "t": ctypes.c_int}
    found = SimpleNamespace()
    for name, kinds in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [codes[kind] for kind in kinds], None
        setattr(found, name, function)
    return found


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "psigrad" / "native"


def _key(compiler: str) -> str:
    """A hash of sources, flags, compiler and processor: machines of different kinds may share a home folder."""
    source = resources.files("psigrad.native")
    parts = [(source / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS)]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    return hashlib.sha256("\0".join([*parts, *FLAGS, version, identity()]).encode()).hexdigest()[:20]


def _compile(compiler: str, path: Path) -> None:
    """Compile to a temporary name, then rename: another process finds either the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, resources.as_file(resources.files("psigrad.native")) as source:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, *(str(source / name) for name in SOURCES), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        made.replace(path)
