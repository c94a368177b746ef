"""Counter-based randomness: every random number is a pure function of names and counters.

No generator state is ever saved, so results do not depend on worker order, batch composition or where a run was resumed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive(*parts: int | str) -> int:
    """Return a 63-bit seed from any sequence of integers and strings (BLAKE2b of their unambiguous encoding).

    `derive(run_seed, "sample", step, prompt, k)` is the seed of the k-th completion of one prompt at one step.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def uniform(seeds: np.ndarray, counter: int | np.ndarray) -> np.ndarray:
    """Return uniform doubles in [0, 1). Element i depends only on `seeds[i]` and `counter` (or `counter[i]`).

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") at position `counter` of the
    stream that starts at `seeds[i]`; 53 bits of each word are used.
    """
    with np.errstate(over="ignore"):  # wrap-around modulo 2^64 is the algorithm
        x = seeds.astype(np.uint64) + (np.asarray(counter).astype(np.uint64) + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    uniform: np.ndarray = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


def uniform_on_device(seeds: Tensor, counter: Tensor) -> Tensor:
    """Return the numbers of `uniform`, bit for bit, on a device. `seeds` [B] are int64 with the bits of the unsigned seeds."""
    return _shift(words_on_device(seeds, counter), 11).double() * 2.0**-53


def words_on_device(seeds: Tensor, counter: Tensor) -> Tensor:
    """Return the 64-bit words, as int64, from which `uniform_on_device` makes its numbers, for the same arguments."""
    x = seeds + (counter + 1) * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right by `bits` with zeros from the left. On int64, `>>` alone would copy the sign."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(word: int | np.uint64) -> int:
    """Return the int64 that has the same bits as an unsigned 64-bit word."""
    return (int(word) ^ 1 << 63) - (1 << 63)


def permutation(n: int, *parts: int | str) -> np.ndarray:
    """Return a permutation of range(n) that depends only on `n` and `parts`."""
    return np.random.Generator(np.random.Philox(key=derive(*parts))).permutation(n)
