"""The optimiser's step and its state, against torch's own AdamW."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from kernel_choices import without_adamw_kernels
from torch import nn

from psigrad.config import Optim
from psigrad.errors import UserError
from psigrad.optim import Optimizer, gradients
from psigrad.optim.low_memory import dither
from psigrad.records import checkpoint

SHAPES = {"a.weight": (3, 4), "b.weight": (4, 3), "a.bias": (4,), "b.bias": (4,)}


def optimizer_of(shapes: dict[str, tuple[int, ...]], **settings) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    optim = Optim(adam_beta2=0.95, adam_epsilon=1e-7, weight_decay=0.1, **settings)
    return Optimizer(parameters, optim), parameters


def give_gradients(parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)


def stepped(optimizer: Optimizer, seeds) -> None:
    for seed in seeds:
        give_gradients(optimizer.parameters.values(), seed)
        optimizer.apply(1.0, 1e-2)


def peer_of(parameters) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-7, fused=True)


class Deferred:
    """A use of a weight whose gradient is known."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient, self.size = gradient, 1

    def add_to(self, out: torch.Tensor, rows: slice) -> None:
        out += self.gradient[rows]


def defer(optimizer: Optimizer, *names: str) -> None:
    """Leave the gradients of these parameters to be computed by rows."""
    for p in map(optimizer.parameters.get, names):
        optimizer.sums.uses[p], p.grad = [Deferred(p.grad)], None


@pytest.mark.parametrize("norm", [1.0, 2.5], ids=["whole", "clipped"])
def test_gradients_that_come_in_blocks_of_rows_give_the_same_step(norm, monkeypatch):
    monkeypatch.setattr(gradients, "BLOCK_ELEMENTS", 4)  # one row of a.weight at a time
    whole, _ = optimizer_of(SHAPES)
    parts, parameters = optimizer_of(SHAPES)
    for seed in range(3):
        for optimizer in (whole, parts):
            give_gradients(optimizer.parameters.values(), seed)
        whole.apply(norm, 1e-2)
        defer(parts, "a.weight", "a.bias")
        versions = {name: p._version for name, p in parameters.items()}
        parts.apply(norm, 1e-2)
        assert all(p._version > versions[name] for name, p in parameters.items())
        # torch rounds once in whole registers, twice in what is left of a block
        for key, tensor in whole.state_dict().items():
            assert torch.allclose(parts.state_dict()[key], tensor, rtol=1e-6), key
        assert all(torch.allclose(p, whole.parameters[name], rtol=1e-6) for name, p in parameters.items())


def test_every_step_is_torchs_fused_adamw_bit_for_bit():
    optimizer, ours = optimizer_of(SHAPES)
    _, theirs = optimizer_of(SHAPES)
    peer = peer_of(theirs)
    for seed, rate in enumerate((1e-2, 3e-3, 2e-2)):
        give_gradients(ours.values(), seed)
        give_gradients(theirs.values(), seed)
        if seed == 1:  # a parameter that had no part in the loss is left alone
            ours["a.weight"].grad = theirs["a.weight"].grad = None
        optimizer.apply(1.0, rate)
        for group in peer.param_groups:
            group["lr"] = rate
        peer.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)
    for name, p in theirs.items():
        assert all(torch.equal(optimizer.weights[name].state[key], value) for key, value in peer.state[p].items())


def test_a_step_counts_the_parameters_versions_up():
    optimizer, parameters = optimizer_of(SHAPES)
    before = [p._version for p in parameters.values()]
    stepped(optimizer, [1])
    assert all(p._version > v for p, v in zip(parameters.values(), before, strict=True))


def test_only_torchs_own_imports_the_compiler():
    code = """
import sys, torch
from psigrad.config import Optim
from psigrad.optim import Optimizer
p = torch.nn.Parameter(torch.ones(2, 2))
p.grad = p.detach()
Optimizer({"p": p}, Optim()).apply(1.0, 0.1)
print("torch._dynamo" in sys.modules)
torch.optim.AdamW([p], fused=True).step()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_an_optimizer_goes_on_bitwise(tmp_path):
    through, through_parameters = optimizer_of(SHAPES)
    stepped(through, range(1, 4))
    checkpoint.save_tensors(tmp_path / "o.safetensors", through.state_dict())
    resumed, resumed_parameters = optimizer_of(SHAPES)
    for name, p in resumed_parameters.items():
        p.data.copy_(through_parameters[name].data)
    resumed.load_state_dict(checkpoint.load_tensors(tmp_path / "o.safetensors"))
    for optimizer in (through, resumed):
        stepped(optimizer, range(4, 7))
    assert all(torch.equal(p, through_parameters[name]) for name, p in resumed_parameters.items())
    ours, theirs = resumed.state_dict(), through.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_what_was_loaded_is_not_shared():
    first, _ = optimizer_of(SHAPES)
    stepped(first, [1])
    second, _ = optimizer_of(SHAPES)
    second.load_state_dict(first.state_dict())
    before = {name: t.clone() for name, t in first.state_dict().items()}
    stepped(second, [2])
    assert all(torch.equal(t, before[name]) for name, t in first.state_dict().items())


def test_parameters_in_another_order_get_their_own_moments():
    """a.bias and b.bias have one shape: by position they would be swapped in silence."""
    first, _ = optimizer_of(SHAPES)
    stepped(first, [1])
    tensors = first.state_dict()
    second, _ = optimizer_of({name: SHAPES[name] for name in reversed(SHAPES)})
    second.load_state_dict(tensors)
    again = second.state_dict()
    assert again.keys() == tensors.keys() and all(torch.equal(again[k], tensors[k]) for k in tensors)
    assert not torch.equal(tensors["exp_avg.a.bias"], tensors["exp_avg.b.bias"])


def test_moments_of_other_parameters_are_refused():
    optimizer, _ = optimizer_of(SHAPES)
    stepped(optimizer, [1])
    tensors = optimizer.state_dict()
    other, _ = optimizer_of({"x": (3, 4), **{name: SHAPES[name] for name in list(SHAPES)[1:]}})
    with pytest.raises(UserError, match=r"run trained 'a\.weight', but this run does not; resume with that run's settings"):
        other.load_state_dict(tensors)
    with pytest.raises(UserError, match=r"The saved state of 'a\.bias' lacks step"):
        optimizer.load_state_dict({key: t for key, t in tensors.items() if key != "step.a.bias"})
    with pytest.raises(UserError, match=r"shape \[5\], not \[4\]; use the model"):
        optimizer.load_state_dict({**tensors, "exp_avg.a.bias": torch.zeros(5)})


def test_what_was_not_saved_is_zero():
    """A checkpoint may leave out what never had a gradient."""
    optimizer, _ = optimizer_of(SHAPES)
    stepped(optimizer, [1])
    saved = {key: t.clone() for key, t in optimizer.state_dict().items() if "a.bias" not in key}
    optimizer.load_state_dict(saved)
    assert all(torch.equal(t, saved[key]) if key in saved else not t.any() for key, t in optimizer.state_dict().items())


def test_gradients_are_divided_as_they_are_read():
    """As if they had been divided before."""
    before, parameters = optimizer_of(SHAPES, max_grad_norm=0.0)
    clipped, others = optimizer_of(SHAPES)
    for seed in range(3):
        give_gradients(parameters.values(), seed)
        give_gradients(others.values(), seed)
        for p in parameters.values():
            p.grad.div_(2.5)
        before.apply(2.5, 1e-2)
        clipped.apply(2.5, 1e-2)
        for name, p in parameters.items():
            assert torch.allclose(p, others[name], rtol=1e-6), name
            assert torch.allclose(p.grad, others[name].grad, rtol=1e-6)
    for key, tensor in before.state_dict().items():
        assert torch.allclose(clipped.state_dict()[key], tensor, rtol=1e-6), key
    unclipped, _ = optimizer_of(SHAPES)
    stepped(unclipped, range(3))  # the control: Adam's parameters hardly depend on a common factor, its moments do
    assert not torch.allclose(unclipped.state_dict()["exp_avg.a.weight"], before.state_dict()["exp_avg.a.weight"], rtol=0.1)


HALVES = {"a.weight": (70, 300), "b.weight": (3, 5), "a.bias": (33,), "b.bias": (1,)}


def half_optimizer(monkeypatch, native: bool, *, max_grad_norm: float = 1.0) -> tuple[Optimizer, dict[str, nn.Parameter]]:
    if not native:
        without_adamw_kernels(monkeypatch)
    draw = torch.Generator().manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(shape, generator=draw).bfloat16()) for name, shape in HALVES.items()}
    made = Optimizer(weights, Optim(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=max_grad_norm))
    assert all((w.kernels is not None) == native for w in made.weights.values())
    return made, weights


def half_steps(optimizer, weights, *, rate: float = 1e-2, scale: float = 1.0) -> list[float]:
    """Three steps along random gradients, one of them without one of the weights; the norms."""
    norms = []
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        optimizer.clear()
        for p in weights.values():
            p.grad = (torch.randn(p.shape, generator=draw) * scale).bfloat16()
        if seed == 1:
            weights["a.weight"].grad = None
        norms.append(optimizer.norm())
        optimizer.apply(norms[-1], rate)
    return norms


def alike(a, b) -> bool:
    """Up to float32's rounding, some of which is left where almost all cancels."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6 * float(b.abs().max()))


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("scale", [1e-4, 1.0], ids=["as they are", "clipped"])
def test_bfloat16_weights_are_stepped_as_torch_does_it(scale, monkeypatch):
    ours, weights = half_optimizer(monkeypatch, native=True)
    theirs, weights_of_torch = half_optimizer(monkeypatch, native=False)
    found, wanted = half_steps(ours, weights, scale=scale), half_steps(theirs, weights_of_torch, scale=scale)
    assert found == pytest.approx(wanted, rel=1e-5) and (wanted[0] > 1 or scale < 1)
    for key, value in theirs.state_dict().items():
        assert alike(ours.state_dict()[key], value), key
    for name, p in weights.items():
        assert torch.allclose(ours.masters[name], theirs.masters[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(p.detach().flatten(), dither(ours.masters[name].detach().flatten()))
        assert torch.equal(weights_of_torch[name].detach().flatten(), dither(theirs.masters[name].detach().flatten()))


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("wrong", [{"rate": 1.001e-2}, {"scale": 0.9}], ids=["the rate", "the gradient"])
def test_negative_control_another_step_of_bfloat16_weights_is_noticed(wrong, monkeypatch):
    ours, _ = half_optimizer(monkeypatch, native=True, max_grad_norm=0.0)
    theirs, _ = half_optimizer(monkeypatch, native=False, max_grad_norm=0.0)
    half_steps(ours, ours.parameters, **wrong)
    half_steps(theirs, theirs.parameters)
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    moments = all(alike(a, b) for a, b in pairs)
    masters = all(torch.allclose(m, theirs.masters[n], rtol=1e-5, atol=1e-6) for n, m in ours.masters.items())
    assert not (moments and masters)


@pytest.mark.needs("compiler")
def test_steps_of_bfloat16_weights_do_not_depend_on_the_threads(monkeypatch):
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        optimizer, weights = half_optimizer(monkeypatch, native=True)
        found.append((half_steps(optimizer, weights), [m.clone() for m in optimizer.masters.values()]))
    torch.set_num_threads(before)
    for norms, masters in found[1:]:
        assert norms == found[0][0] and all(torch.equal(a, b) for a, b in zip(masters, found[0][1], strict=True))


@pytest.mark.needs("compiler")
def test_a_step_of_bfloat16_weights_counts_their_versions_up(monkeypatch):
    optimizer, weights = half_optimizer(monkeypatch, native=True)
    before = {name: (p._version, optimizer.masters[name]._version) for name, p in weights.items()}
    half_steps(optimizer, weights)
    assert all(p._version > before[n][0] and optimizer.masters[n]._version > before[n][1] for n, p in weights.items())
    assert all(m.grad is None for m in optimizer.masters.values()), "no float32 copy of the gradient is made"


def test_the_kernels_are_not_asked_for_where_no_weight_is_bfloat16(monkeypatch):
    """They may have to be compiled, which takes seconds."""
    monkeypatch.setattr("psigrad.optim.rules.kernels", lambda: pytest.fail("nobody needs them"))
    for kind in (torch.float32, torch.float16):
        weight = nn.Parameter(torch.ones(3, 3, dtype=kind))
        Optimizer({"w": weight}, Optim()).step([lambda weight=weight: weight.float().sum()], 0.1)
