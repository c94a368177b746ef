"""The rules for a flat vector against torch.optim's, and the guard."""

from __future__ import annotations

import pytest
import torch

from psigrad.config import Optim
from psigrad.optim import NonFiniteError, Optimizer, apply_together
from psigrad.optim.flat_rules import Adam, RMSprop
from psigrad.optim.optimizer import check_gradients


def optimizer_of(flat, kind, max_norm) -> Optimizer:
    return Optimizer({"flat": flat}, Optim(max_grad_norm=max_norm), rule=(Adam if kind == "adam" else RMSprop)(1e-5))


def step(optimizer, gradient, rate) -> float:
    optimizer.parameters["flat"].grad = gradient
    (norm,) = apply_together([(optimizer, rate)])
    return norm


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.double, torch.float32])  # PyTorch's operations, and the kernel
def test_a_hundred_steps_are_torchs(kind, max_norm, dtype):
    torch.manual_seed(0)
    start = torch.randn(50, dtype=dtype)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    made = optimizer_of(ours, kind, max_norm)
    options = {"lr": 1.0, "eps": 1e-5}
    peer = torch.optim.Adam([theirs], **options) if kind == "adam" else torch.optim.RMSprop([theirs], alpha=0.99, **options)
    for i in range(100):
        gradient, rate = torch.randn(50, dtype=dtype), 0.01 * (1 - i / 100)
        theirs.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([theirs], max_norm) if max_norm else gradient.norm()
        peer.param_groups[0]["lr"] = rate
        peer.step()
        assert step(made, gradient.clone(), rate) == pytest.approx(float(norm))
    bounds = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.double else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(ours, theirs, **bounds)  # clip_grad_norm_ adds 1e-6 to the norm


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_an_optimizer_resumes_from_its_state(kind):
    first, gradients = torch.nn.Parameter(torch.ones(5)), torch.randn(6, 5)
    made = optimizer_of(first, kind, 0.0)
    for g in gradients[:3]:
        step(made, g.clone(), 0.1)
    second = torch.nn.Parameter(first.detach().clone())
    other = optimizer_of(second, kind, 0.0)
    other.load_state_dict({name: x.clone() for name, x in made.state_dict().items()})
    for g in gradients[3:]:
        step(made, g.clone(), 0.1)
        step(other, g.clone(), 0.1)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_moves_nothing_and_three_stop_the_run():
    flat = torch.nn.Parameter(torch.ones(3))
    made, bad = optimizer_of(flat, "adam", 0.5), torch.tensor([1.0, torch.nan, 0.0])
    step(made, bad.clone(), 0.1)
    step(made, torch.zeros(3), 0.1)  # a finite one between: the count begins again
    step(made, bad.clone(), 0.1)
    step(made, bad.clone(), 0.1)
    torch.testing.assert_close(flat.detach(), torch.ones(3))
    check_gradients(made.nonfinite, 4)
    step(made, bad.clone(), 0.1)
    with pytest.raises(NonFiniteError, match=r"for 3 steps in a row, up to step 5.*learning_rate"):
        check_gradients(made.nonfinite, 5)
