"""TRPO's step at its edges: no curvature, no gradient, gradients of any scale."""

from __future__ import annotations

import pytest
import torch

from psigrad.objective.trust_region import conjugate_gradients, step


def test_a_step_along_which_nothing_curves_is_not_taken():
    gradient = torch.tensor([1.0, 0.0])
    taken = step(gradient, lambda v: torch.zeros_like(v), lambda shift: (1.0, 0.0), max_kl=0.1)
    assert (taken.improvement, taken.kl, taken.tries) == (0.0, 0.0, 0) and not taken.shift.any()


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-12])
def test_conjugate_gradients_do_not_depend_on_the_scale_of_the_gradient(scale):
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    matrix, b = root @ root.T + torch.eye(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    found = conjugate_gradients(lambda v: matrix @ v, scale * b, 20)
    torch.testing.assert_close(found / scale, torch.linalg.solve(matrix, b), rtol=1e-4, atol=1e-5)


def test_a_gradient_of_zero_is_no_direction():
    zero = torch.zeros(3)
    assert conjugate_gradients(lambda v: v, zero, 5).tolist() == [0.0, 0.0, 0.0]
