"""Counter-based randomness."""

from __future__ import annotations

import numpy as np

from psigrad import seeds


def splitmix64(state: int, steps: int) -> int:
    """The reference algorithm with a live state, in Python integers."""
    mask = (1 << 64) - 1
    z = 0
    for _ in range(steps):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z


def test_uniform_jumps_to_where_the_sequential_generator_would_be():
    for seed in (0, 1, 2**63 - 1, 1234567890123):
        for counter in (0, 1, 7):
            expected = (splitmix64(seed, counter + 1) >> 11) / 2**53
            assert seeds.uniform(np.array([seed], dtype=np.uint64), counter)[0] == expected


def test_the_published_first_output_of_splitmix64_from_zero():
    assert splitmix64(0, 1) == 0xE220A8397B1DCDAF
    assert seeds.uniform(np.zeros(1, dtype=np.uint64), 0)[0] == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_neighbouring_seeds_and_counters_are_uncorrelated():
    a = np.stack([seeds.uniform(np.arange(4000, dtype=np.uint64), t) for t in range(8)])
    assert abs(a.mean() - 0.5) < 0.01 and abs(a.std() - 12**-0.5) < 0.01
    assert np.abs(np.corrcoef(a) - np.eye(8)).max() < 0.06
    assert abs(np.corrcoef(a[0, :-1], a[0, 1:])[0, 1]) < 0.06


def test_derive_tells_names_numbers_and_their_grouping_apart():
    made = [seeds.derive(*p) for p in ((1, 2), (12,), ("1", 2), (1, "2"), (2, 1), ("a", "b"), ("ab",), (0,))]
    assert len(set(made)) == len(made)
    assert all(0 <= s < 2**63 for s in made)
    assert seeds.derive(0, "sample", 3, 1) == seeds.derive(0, "sample", 3, 1)


def test_permutation_depends_on_its_names_only():
    p = seeds.permutation(100, 5, "order", 0)
    assert sorted(p) == list(range(100))
    assert (p == seeds.permutation(100, 5, "order", 0)).all()
    assert (p != seeds.permutation(100, 5, "order", 1)).any()
