"""The properties of this processor on which the choice of arithmetic depends."""

from __future__ import annotations

import functools
import itertools
import os
import platform
from pathlib import Path

SWITCH = "PSIGRAD_NATIVE"
"""0 disables the kernels. The name of a level hides the instructions that this processor has beyond that level."""

_V4, _AVX512 = "-march=x86-64-v4 -mprefer-vector-width=512", "avx512f avx512bw avx512cd avx512dq avx512vl"
_BF16 = f"{_V4} -mavx512bf16", f"{_AVX512} avx512_bf16"
LEVELS = {
    "x86_64": {
        "x86-64-v4-amx": (f"{_BF16[0]} -mamx-tile -mamx-bf16", f"{_BF16[1]} amx_tile amx_bf16"),
        "x86-64-v4-bf16": _BF16,
        "x86-64-v4": (_V4, _AVX512),
        "x86-64-v3": ("-march=x86-64-v3", "avx2 bmi1 bmi2 f16c fma movbe"),
    },
    "aarch64": {"armv8-a": ("-march=armv8-a", "asimd")},
}
"""The processors for which a wheel has compiled kernels, best first: the compiler's flags and the required instructions."""

_LIBRARIES = {
    "x86-64-v4-amx": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "x86-64-v4-bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "x86-64-v4": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "x86-64-v3": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}


def environment_of(level: str) -> dict[str, str]:
    """Return the variables that restrict a new process to a level, its kernels and PyTorch; 0 disables the kernels."""
    return {SWITCH: level, **_LIBRARIES.get(level, {})}


def forced_level() -> str | None:
    """Return the level that the environment names; `levels` need not contain it."""
    return os.environ.get(SWITCH) or None


def _hidden() -> set[str]:
    """Return the instructions that only the levels above the forced one have."""
    needed = [(name, set(words.split())) for name, (_, words) in LEVELS.get(platform.machine(), {}).items()]
    if forced_level() not in dict(needed):
        return set()
    above = len(list(itertools.takewhile(lambda level: level[0] != forced_level(), needed)))
    return set().union(*(words for _, words in needed[:above])).difference(*(words for _, words in needed[above:]))


@functools.cache
def _described() -> tuple[str, ...]:
    """Return the distinct lines of Linux's processor description, without the hidden instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    kinds, hidden = ("vendor_id", "flags", "Features", "model name"), _hidden()
    seen = {line for line in lines if line.startswith(kinds)}
    return tuple(sorted(" ".join(word for word in line.split(" ") if word not in hidden) for line in seen))


def identity() -> str:
    """Return a string that is equal on processors that run the same compiled code."""
    return "".join(_described()) or platform.platform() + platform.processor()


def _has(word: str) -> bool:
    return any(word in line.split() for line in _described())


def levels() -> list[str]:
    """Return the names of the `LEVELS` whose code this processor runs, best first."""
    known = LEVELS.get(platform.machine(), {}).items()
    return [name for name, (_, needed) in known if all(map(_has, needed.split()))]


def fast_bfloat16() -> bool:
    """Return True if a product of bfloat16 numbers takes less time than one of float32.

    Intel's avx512_bf16 without AMX computes no more products per cycle than float32. There, oneDNN's bfloat16 was two to three
    times slower than MKL's float32. AMD's computes twice as many: 300 to 380 GFLOP/s, where float32 could reach 228 at most (Zen
    4, two cores).
    """
    return _has("amx_bf16") or (_has("AuthenticAMD") and _has("avx512_bf16"))


def multiplies_bfloat16() -> bool:
    """Return True if the kernels have instructions for products of bfloat16 numbers: vectors, with or without AMX's tiles."""
    return _has("avx512_bf16")


def slow_onednn() -> bool:
    """Return True if PyTorch's bfloat16 products take as long as the kernels' or longer.

    By vectors, without AMX, oneDNN is as fast only for a large product whose shape has occurred before. Otherwise the kernels
    take 0.6 to 0.9 of its time, as it compiles code for every new shape. With AMX's tiles the two were never compared.
    """
    return _has("avx512_bf16") and not _has("amx_bf16")


def slow_mkl() -> bool:
    """Return True if PyTorch's float32 products leave much of the processor idle.

    MKL uses AVX2 on processors that are not Intel's, and reaches 60 to 80 % of Zen 4's peak. The kernels' `product` reaches 80 to
    90 % there with AVX-512, and 65 to 80 % with AVX2 alone. In no shape was it measurably slower than MKL.
    """
    return _has("AuthenticAMD") and _has("avx2")
