"""The flat optimisers against torch.optim's."""

from __future__ import annotations

import pytest
import torch

from psigrad.control.methods.trainer import FlatOptimizer
from psigrad.optim.optimizer import NonFiniteError


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.double, torch.float32])  # PyTorch's operations, and the kernel
def test_a_hundred_steps_are_torchs(kind, max_norm, dtype):
    torch.manual_seed(0)
    start = torch.randn(50, dtype=dtype)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    made = FlatOptimizer(ours, kind, 1e-5, max_norm)
    options = {"lr": 1.0, "eps": 1e-5}
    peer = torch.optim.Adam([theirs], **options) if kind == "adam" else torch.optim.RMSprop([theirs], alpha=0.99, **options)
    for i in range(100):
        gradient, rate = torch.randn(50, dtype=dtype), 0.01 * (1 - i / 100)
        theirs.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([theirs], max_norm) if max_norm else gradient.norm()
        peer.param_groups[0]["lr"] = rate
        peer.step()
        assert made.step(gradient.clone(), rate) == pytest.approx(float(norm))
    bounds = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.double else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(ours, theirs, **bounds)  # clip_grad_norm_ adds 1e-6 to the norm


def test_an_optimiser_goes_on_from_its_tensors():
    first, gradients = torch.nn.Parameter(torch.ones(5)), torch.randn(6, 5)
    made = FlatOptimizer(first, "adam", 1e-5, 0.0)
    for g in gradients[:3]:
        made.step(g.clone(), 0.1)
    second = torch.nn.Parameter(first.detach().clone())
    other = FlatOptimizer(second, "adam", 1e-5, 0.0)
    other.load({name: x.clone() for name, x in made.tensors().items()})
    for g in gradients[3:]:
        made.step(g.clone(), 0.1)
        other.step(g.clone(), 0.1)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_moves_nothing_and_three_stop_the_run():
    flat = torch.nn.Parameter(torch.ones(3))
    made, bad = FlatOptimizer(flat, "adam", 1e-5, 0.5), torch.tensor([1.0, torch.nan, 0.0])
    made.step(bad.clone(), 0.1)
    made.step(torch.zeros(3), 0.1)  # a finite one between: the count begins again
    made.step(bad.clone(), 0.1)
    made.step(bad.clone(), 0.1)
    torch.testing.assert_close(flat.detach(), torch.ones(3))
    with pytest.raises(NonFiniteError, match="learning_rate"):
        made.step(bad.clone(), 0.1)
