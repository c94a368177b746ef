"""The study of self-play: a tiny language model from random weights comes close to the equilibrium of Kuhn poker."""

from __future__ import annotations

import pytest

from studies.self_play import train


def test_legal_play_is_learned_first(tmp_path):
    (_, before), (_, after) = train("moving reference", 0, tmp_path, steps=50, games=16)
    assert before > 1.5 and after < 0.4  # always legal, with any cards, is 11/24 when play is uniform


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_the_moving_reference_reaches_the_equilibrium_and_plain_self_play_does_not(seed, tmp_path):
    assert train("moving reference", seed, tmp_path)[-1][1] <= 0.05
    assert train("plain", seed, tmp_path)[-1][1] > 0.15
