"""The library of compiled kernels: a wheel's, if it has one for this processor, or one that is compiled and cached on first use.

A cached library is loaded only if its folder and file belong to this user alone. Its SHA-256 must be the one recorded when it was
compiled. A damaged library is compiled again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

from psigrad.cache_folder import cache_folder
from psigrad.errors import NO_LOCKS, UserError
from psigrad.kernels.processor import LEVELS, SWITCH, forced_level, identity, levels

SOURCES = (
    "rows.cpp",
    "attention.cpp",
    "products.cpp",
    "products_bf16.cpp",
    "decoding.cpp",
    "state.cpp",
    "chunks.cpp",
    "convolution.cpp",
    "adamw.cpp",
    "towers.cpp",
)
HEADERS = ("common.h", "codes.h", "amx.h")
# Without -fno-trapping-math, GCC does not vectorise a loop that chooses between floats, such as exp with AVX2.
FLAGS: tuple[str, ...] = ("-O3", "-march=native", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
PORTABLE = tuple(flag for flag in FLAGS if flag not in ("-march=native", "-shared"))  # for objects of one of `LEVELS`
if platform.machine() == "x86_64":
    FLAGS += ("-mprefer-vector-width=512",)  # GCC's default on recent Intel is 256
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def compiler() -> str | None:
    """Return the C++ compiler: the first of `CXX`, g++ and clang++ that exists."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the library of compiled kernels, or a string with the reason why there is none.

    Raises `UserError` if the environment names a level that this processor lacks.
    """
    level = forced_level()
    if level == "0":
        return f"{SWITCH}=0"
    if level is not None and level not in levels():
        raise UserError(f"{SWITCH} is {level}, which this processor lacks; use one of 0, {', '.join(levels())}, or unset it.")
    with contextlib.suppress(OSError):  # the C library may be older than the wheel's
        if (ready := prebuilt()) is not None:
            return _load_prebuilt(ready)
    if (found := compiler()) is None:
        return "no C++ compiler was found (g++ or clang++)"
    try:
        path = cache_folder("native") / f"{_key(found)}.so"
        with _lock(path.parent):
            if not _sound(path):
                print("psigrad: compiling the CPU kernels, once on this machine; this takes about a minute.", file=sys.stderr)
                _compile(found, path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        return f"{error.cmd[0]} failed: {lines[0] if lines else error}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the kernels could not be compiled or loaded: {error}"


def prebuilt() -> Path | None:
    """Return the wheel's library for this processor, or None: a checkout and a pure-Python wheel have none."""
    folder = Path(str(resources.files("psigrad.kernels"))) / "prebuilt"
    return next((path for level in levels() if (path := folder / f"{level}.so").is_file()), None)


def _load_prebuilt(path: Path) -> ctypes.CDLL:
    """Load a wheel's library after torch's OpenMP library. It is not linked to one, because torch's has a name that depends on
    the build of torch.
    """
    import torch

    for threads in Path(torch.__file__).parent.glob("lib/libgomp*.so*"):
        ctypes.CDLL(str(threads), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def bind(loaded: ctypes.CDLL, signatures: Mapping[str, str]) -> SimpleNamespace:
    """Return the library's functions as attributes of a namespace.

    `signatures` has one letter per argument of each function: p is a pointer, i an int64, f a float, and t an int.
    """
    codes = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "t": ctypes.c_int}
    found = SimpleNamespace()
    for name, kinds in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [codes[kind] for kind in kinds], None
        setattr(found, name, function)
    return found


def _key(program: str) -> str:
    """Return a hash of the sources, flags, compiler and processor, which names the library in the cache folder.

    Machines with different processors may share a home folder.
    """
    source = resources.files("psigrad.kernels")
    parts = [(source / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS)]
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    return hashlib.sha256("\0".join([*parts, *_flags(), version, identity()]).encode()).hexdigest()[:20]


def _flags() -> tuple[str, ...]:
    """Return the compiler's flags for this processor, or for the level that the environment names."""
    level = forced_level()
    return FLAGS if level is None else (*LEVELS[platform.machine()][level][0].split(), *PORTABLE, "-shared")


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the folder, so that one process compiles in it and others wait for its library. Remove what killed ones left."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _claim(folder)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            yield  # without locks two processes may compile, each in its own temporary folder
            return
        for leftover in folder.glob("tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _claim(folder: Path) -> None:
    """Prevent other users from writing to the folder. Raises `OSError` if it is a link or belongs to another user."""
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid():
        raise OSError(f"{folder} is a link or belongs to another user; remove it, or name another folder in PSIGRAD_CACHE")
    if found.st_mode & _OTHERS:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)


def _sound(path: Path) -> bool:
    """Return True if the library has its recorded SHA-256, and only its owner, this user, could have written it."""
    try:
        for file in (path, _note(path)):
            found = file.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS:
                return False
        return _note(path).read_text() == _sha256(path)
    except OSError:
        return False


def _note(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(program: str, path: Path) -> None:
    """Compile and test the library under a temporary name, then rename it. A crash leaves nothing or the complete library."""
    with (
        tempfile.TemporaryDirectory(dir=path.parent) as folder,
        resources.as_file(resources.files("psigrad.kernels")) as source,
    ):
        made = Path(folder) / path.name
        command = [program, *_flags(), *(str(source / name) for name in SOURCES), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        subprocess.run(
            [sys.executable, "-I", "-c", _SELF_TEST, str(made)], capture_output=True, text=True, check=True, timeout=60
        )
        made.chmod(0o600)
        with made.open("rb") as stream:
            os.fsync(stream.fileno())
        path.unlink(missing_ok=True)
        noted = _note(made)
        noted.write_text(_sha256(made))
        noted.chmod(0o600)
        noted.replace(_note(path))
        made.replace(path)


# Compute 1² + 2² + … + 100² in a separate process, which is killed if the code needs instructions that this processor lacks.
_SELF_TEST = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
numbers = (ctypes.c_uint16 * 100)(*(int.from_bytes(__import__("struct").pack(">f", float(i + 1))[:2], "big") for i in range(100)))
out, sizes = ctypes.c_double(), (ctypes.c_int64 * 1)(100)
pointers = (ctypes.c_void_p * 1)(ctypes.addressof(numbers))
library.squared_norm.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
library.squared_norm(ctypes.byref(out), pointers, sizes, 1, 1)
sys.exit(0 if out.value == 338350.0 else "the kernels' self-test gave " + str(out.value))
"""
