"""The properties of this processor that decide which kernels and which dtypes are fast."""

from __future__ import annotations

import functools
import itertools
import os
import platform
from pathlib import Path

SWITCH = "PSIGRAD_NATIVE"
"""The environment variable that restricts the kernels. 0 disables them.

With the name of one of `LEVELS`, kernels use only the instructions of that level.
"""

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
"""The levels of instructions for which a wheel has compiled kernels, best first, by machine.

A level has the compiler's flags and the instructions that a processor needs.
"""


def forced_level() -> str | None:
    """Return the level that the environment variable `SWITCH` names, or None. The processor may lack it."""
    return os.environ.get(SWITCH) or None


def _hidden() -> set[str]:
    """Return the instructions that only levels above the forced level have. They are treated as missing."""
    needed = [(name, set(words.split())) for name, (_, words) in LEVELS.get(platform.machine(), {}).items()]
    if forced_level() not in dict(needed):
        return set()
    above = len(list(itertools.takewhile(lambda level: level[0] != forced_level(), needed)))
    return set().union(*(words for _, words in needed[:above])).difference(*(words for _, words in needed[above:]))


@functools.cache
def _described() -> tuple[str, ...]:
    """Return the distinct lines of /proc/cpuinfo on the processor's kind and instructions, without those in `_hidden()`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    kinds, hidden = ("vendor_id", "flags", "Features", "model name"), _hidden()
    seen = {line for line in lines if line.startswith(kinds)}
    return tuple(sorted(" ".join(word for word in line.split(" ") if word not in hidden) for line in seen))


def identity() -> str:
    """Return a description of this processor, which is equal on processors that can run the same compiled code."""
    return "".join(_described()) or platform.platform() + platform.processor()


def _has(word: str) -> bool:
    return any(word in line.split() for line in _described())


def levels() -> list[str]:
    """Return the names of the `LEVELS` whose code can run on this processor, best first."""
    known = LEVELS.get(platform.machine(), {}).items()
    return [name for name, (_, needed) in known if all(map(_has, needed.split()))]


def fast_bfloat16() -> bool:
    """Return True if matrix products in bfloat16 take less time than in float32.

    On Intel, avx512_bf16 without AMX computes no more products per cycle than float32, and oneDNN in bfloat16 was two to three
    times slower than MKL in float32. On AMD it computes twice as many: 300 to 380 GFLOP/s, where float32 could reach 228 at most
    (Zen 4, two cores).
    """
    return _has("amx_bf16") or (_has("AuthenticAMD") and _has("avx512_bf16"))


def multiplies_bfloat16() -> bool:
    """Return True if this processor multiplies bfloat16 numbers by vector instructions (avx512_bf16), which kernels can use."""
    return _has("avx512_bf16")


def slow_onednn() -> bool:
    """Return True if PyTorch's bfloat16 products, computed by oneDNN, take as long as the kernels' or longer.

    Without AMX, oneDNN is as fast as the kernels only for a large product whose shape has occurred before, because it compiles
    code for every new shape. Otherwise the kernels take 0.6 to 0.9 of its time. With AMX the two were never compared.
    """
    return _has("avx512_bf16") and not _has("amx_bf16")


def slow_mkl() -> bool:
    """Return True if PyTorch's float32 products, computed by MKL, are slower than the kernels'.

    MKL uses only AVX2 on processors that are not Intel's, and reaches 60 to 80 % of Zen 4's peak. The kernels' `product` reaches
    80 to 90 % there with AVX-512, and 65 to 80 % with AVX2. It was not measurably slower than MKL for any shape.
    """
    return _has("AuthenticAMD") and _has("avx2")
