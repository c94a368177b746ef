"""Segments of a packed row, and what runs along them, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psigrad.kernels.kernels import kernels
from psigrad.language.models.attention import PackedLayout, Pieces
from psigrad.language.models.segments import ShortConvolution


def test_segments_by_hand():
    """A prompt of 5 that sequences leave after 2 and 5 tokens, and one of 1: its first 2 tokens, the other 3, the sequences."""
    pieces = Pieces(np.array([5, 1]), np.array([2, 1, 1]), np.array([0, 0, 1]), np.array([2, 5, 0]))
    layout = PackedLayout(pieces, torch.device("cpu"))
    order, inverse, waves = layout.segments
    assert order.tolist() == [0, 1, 5, -1, 2, 3, 4, 6, 7, 8, -1, 9, -1]
    assert inverse.tolist() == [0, 1, 4, 5, 6, 2, 7, 8, 9, 11]
    shapes = [(tuple(shape), None if source is None else source.tolist()) for shape, source in waves]
    assert shapes == [((2, 2), None), ((1, 3), [0]), ((3, 2), [0, 2, -1])]
    trees = layout._trees(every=False)
    assert trees.segments.tolist() == [[0, 2, -1, 0], [2, 3, 0, 1], [6, 2, 0, -1], [8, 1, 1, -1], [5, 1, -1, -1], [9, 1, -1, -1]]
    assert trees.first.tolist() == [0, 4, 5, 6] and trees.states == 2
    assert layout._trees(every=True).segments[:, 2:].tolist() == [[-1, 0], [0, 2], [0, 3], [2, 4], [-1, 1], [-1, 5]]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.needs("compiler"))])
def test_a_convolution_by_hand(native):
    """Weights 100, 10, 1. The first sequence continues the prompt 1, 2, 3, and the second its first two tokens."""
    layout = PackedLayout(Pieces(np.array([3]), np.array([2, 1]), np.array([0, 0]), np.array([3, 2])), torch.device("cpu"))
    x, weight, bias = torch.tensor([1.0, 2, 3, 4, 5, 6])[:, None], torch.tensor([[100.0, 10, 1]]), torch.tensor([0.5])

    def kernel(x, windows):
        return kernels().states.convolve(x, weight.t().contiguous(), bias, windows, False) if native else None

    found = layout.convolve(0, x, ShortConvolution(weight, bias, lambda made: made, kernel))
    assert found[:, 0].tolist() == [1.5, 12.5, 123.5, 234.5, 345.5, 126.5]
