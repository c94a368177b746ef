"""AdamW with moments of 8 bits, and bfloat16 weights without float32 masters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from kernel_choices import without_adamw_kernels
from torch import nn

from psigrad.config import Optim
from psigrad.optim import Optimizer, low_memory
from psigrad.optim import optimizer as loop
from psigrad.optim.low_memory import decode, encode, join, levels, middles, round_stochastically, split

SHAPES = {"layer.weight": (80, 67), "embed_tokens.weight": (64, 65), "norm.weight": (80,)}


def parameters_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def take_steps(optimizer: Optimizer, count: int, first: int = 0, lr: float = 1e-2) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + step)
        for name, p in optimizer.parameters.items():
            # of very different sizes, as those of a network's rows are
            sizes = torch.logspace(-4, 0, SHAPES[name][0]).view(-1, *[1] * (p.dim() - 1))
            p.grad = (torch.randn(p.shape, generator=generator) * sizes).to(p.dtype)
        optimizer.finish_backward()
        optimizer.apply(optimizer.norm(), lr)
        optimizer.clear()


def test_the_levels_by_hand():
    signed, unsigned = levels(True), levels(False)
    for own in (signed, unsigned):
        assert len(own) == 256 and torch.equal(own, own.unique()) and own[-1] == 1.0 and (own == 0).sum() == 1
    # of [0.1, 1] 64 parts, or 128 without a sign; of [1e-7, 1e-6] one, or two
    assert float(signed[-2]) == pytest.approx(0.1 + 0.9 * 63.5 / 64) and float(signed[0]) == pytest.approx(-0.1 - 0.9 * 63.5 / 64)
    assert float(unsigned[-2]) == pytest.approx(0.1 + 0.9 * 127.5 / 128)
    assert float(signed[signed > 0][0]) == pytest.approx(0.55e-6)
    assert unsigned[1:3].tolist() == pytest.approx([0.325e-6, 0.775e-6])


@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_becomes_the_nearest_level_times_the_largest_of_its_block(signed):
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 3, 256)
    x = x if signed else x**2
    x[3] = 0.0
    codes, scales = encode(x, signed)
    assert torch.equal(scales, x.abs().amax(1)) and scales[3] == 0
    shares = x / scales.clamp(min=1e-38)[:, None]
    nearest = (shares[..., None] - levels(signed)).abs().argmin(-1)
    if not signed:  # what is above 0 stays above 0
        nearest[(shares > 0) & (nearest == 0)] = 1
    assert torch.equal(codes.long()[scales > 0], nearest[scales > 0])
    assert torch.equal(decode(codes, scales, signed)[3], torch.zeros(256))


@pytest.mark.parametrize("signed", [True, False])
def test_no_cell_of_the_kernels_table_has_two_middles(signed):
    tables = low_memory._tables()[0 if signed else 3 :]
    edges = ((torch.arange((24 << 7) + 2) + (103 << 7)) << 16).to(torch.int32).view(torch.float32)
    own = middles(signed)[:-1]
    inside = (own[:, None] >= edges[:-1]) & (own[:, None] < edges[1:])
    below = (own[:, None] > -edges[1:]) & (own[:, None] <= -edges[:-1])
    assert int(inside.sum(0).max()) == 1 and int(below.sum(0).max()) <= 1
    assert len(tables[2]) == 2 * (len(edges) - 1)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(
    ("dtype", "optim"),
    [(torch.float32, Optim(optimizer="adamw_8bit")), (torch.bfloat16, Optim(optimizer="adamw_8bit")),
     (torch.bfloat16, Optim(bf16_stochastic_round=True)),
     (torch.bfloat16, Optim(optimizer="adamw_8bit", bf16_stochastic_round=True))],
)  # fmt: skip
def test_the_kernel_steps_as_torch_does(dtype, optim, monkeypatch):
    made = []
    for native in (True, False):
        if not native:
            without_adamw_kernels(monkeypatch)
        optimizer = Optimizer(parameters_of(dtype), optim, seed=3)
        take_steps(optimizer, 4)
        moments = {key: x for key, x in optimizer.state_dict().items() if not key.startswith("master.")}
        made.append(({name: p.detach().clone() for name, p in optimizer.parameters.items()}, moments))
    (fast, state), (slow, oracle) = made
    for key, held in state.items():
        if held.dtype == torch.uint8:  # where the sum before it is rounded otherwise, a neighbour
            assert (held == oracle[key]).float().mean() > 0.999
            own = levels(key.startswith("exp_avg."))
            assert (own[held.int()] - own[oracle[key].int()]).abs().max() <= 0.015
        else:
            torch.testing.assert_close(held, oracle[key], rtol=1e-4, atol=1e-9)
    for name, p in fast.items():
        close = torch.isclose(p.float(), slow[name].float(), rtol=1e-5 if dtype == torch.float32 else 0, atol=1e-6)
        assert close.float().mean() > 0.998, name
        torch.testing.assert_close(p, slow[name], rtol=1e-2, atol=1e-2)  # no more than the rate


def test_a_step_of_8_bits_is_nearly_adamws_and_takes_a_quarter_of_its_memory():
    full, small = (Optimizer(parameters_of(), Optim(optimizer=name)) for name in ("adamw", "adamw_8bit"))
    for optimizer in (full, small):
        take_steps(optimizer, 20)
    # what both have moved, in one direction: the largest error of a moment in 8 bits is 0.9 / 128 of its block's largest
    start = parameters_of()
    for name in SHAPES:
        one, other = ((o.parameters[name] - start[name]).detach().flatten() for o in (full, small))
        assert float(torch.cosine_similarity(one, other, dim=0)) > (0.99 if name == "layer.weight" else 0.99999)
    state = small.state_dict()
    assert state["exp_avg.embed_tokens.weight"].dtype == torch.float32 == state["exp_avg.norm.weight"].dtype
    held = sum(x.numel() * x.element_size() for key, x in state.items() if key.endswith("layer.weight") and key[:3] == "exp")
    assert held == 2 * 80 * 67 + 2 * 4 * math.ceil(80 * 67 / 256)


@pytest.mark.parametrize("native", [True, False])
def test_a_weight_whose_gradient_has_gone_takes_no_leap(native, monkeypatch):
    """Beside one 10⁴ times as large a second moment would be rounded to 0; the next step, without a gradient, is 0.9 of the first
    moment over its root. AdamW itself never moves by more than a few rates.
    """
    if not native:
        without_adamw_kernels(monkeypatch)
    p = {"weight": nn.Parameter(torch.zeros(64, 64))}
    optimizer = Optimizer(p, Optim(optimizer="adamw_8bit", max_grad_norm=0.0))
    for size in (1e-4, 1e-9):
        p["weight"].grad = torch.full((64, 64), size)
        p["weight"].grad[0, 0] = 1.0
        optimizer.apply(1.0, 1e-3)
    assert float(p["weight"].detach().abs().max()) < 3e-3


def test_rounding_by_chance_has_the_right_mean_and_only_neighbours():
    x = torch.full((200_000,), 1 + 1 / 1024)  # bfloat16 has 1 and 1 + 1 / 128
    made = round_stochastically(x, 7).float()
    assert set(made.tolist()) == {1.0, 1 + 1 / 128}
    share, sigma = float((made > 1).float().mean()), math.sqrt(1 / 8 * 7 / 8 / 200_000)
    assert abs(share - 1 / 8) < 5 * sigma
    assert torch.equal(made, round_stochastically(x, 7).float()) and not torch.equal(made, round_stochastically(x, 8).float())
    assert float(x.bfloat16().float().mean()) == 1.0  # to the nearest: the control
    exact = torch.tensor([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf])
    assert torch.equal(round_stochastically(exact, 1).float(), exact)


@pytest.mark.parametrize(("rounds", "moved"), [(True, True), (False, False)])
def test_steps_below_a_256th_of_a_weight_happen_without_masters(rounds, moved, monkeypatch):
    """100 of AdamW's steps of 1e-4 from 1: 0.99. Rounded to the nearest, where half a unit is 0.002, none happens."""
    p = {"weight": nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))}
    optimizer = Optimizer(p, Optim(bf16_stochastic_round=True, max_grad_norm=0.0))
    if not rounds:
        without_adamw_kernels(monkeypatch)
        monkeypatch.setattr(low_memory, "round_stochastically", lambda x, seed, first: x.bfloat16())
    for _ in range(100):
        p["weight"].grad = torch.ones(64, 64, dtype=torch.bfloat16)
        optimizer.finish_backward()
        optimizer.apply(optimizer.norm(), 1e-4)
        optimizer.clear()
    mean = float(p["weight"].detach().float().mean())
    assert abs(mean - 0.99) < 5e-4 if moved else mean == 1.0
    assert "master.weight" not in optimizer.state_dict()


@pytest.mark.parametrize("optim", [Optim(optimizer="adamw_8bit"), Optim(optimizer="adamw_8bit", bf16_stochastic_round=True)])
def test_it_goes_on_bitwise_from_what_was_saved(optim):
    whole, part = (Optimizer(parameters_of(torch.bfloat16), optim, seed=5) for _ in range(2))
    take_steps(whole, 4)
    take_steps(part, 2)
    saved = {key: x.clone() for key, x in part.state_dict().items()}
    resumed = Optimizer({name: nn.Parameter(p.detach().clone()) for name, p in part.parameters.items()}, optim, seed=5)
    resumed.load_state_dict(saved)
    take_steps(resumed, 2, first=2)
    for name, p in whole.parameters.items():
        assert torch.equal(p, resumed.parameters[name]), name
    for key, x in whole.state_dict().items():
        assert torch.equal(x, resumed.state_dict()[key]), key


@pytest.mark.parametrize("optim", [Optim(optimizer="adamw_8bit"), Optim(bf16_stochastic_round=True)])
def test_gradients_of_several_passes_are_summed_in_float32(optim):
    """Half of a unit in the last place, 256 times: bfloat16 would lose all of it."""
    p = {"weight": nn.Parameter(torch.ones(64, 80, dtype=torch.bfloat16))}
    optimizer = Optimizer(p, optim)
    scales = [1.0, *([1 / 512] * 256)]
    losses = [lambda s=s: s * p["weight"].float().sum() for s in scales]
    norm = optimizer.step(losses, 1e-3)
    assert norm == pytest.approx(1.5 * math.sqrt(64 * 80), rel=1e-3)
    stepped = p["weight"] if optimizer.weights["weight"].no_master else optimizer.masters["weight"]
    assert float(stepped.detach().float().mean()) == pytest.approx(0.999, abs=2e-4)


def cut_masters(monkeypatch, divided: bool, chunk: int) -> None:
    """Keep large masters in two parts if `divided`, and step `chunk` elements at a time."""
    monkeypatch.setattr(loop, "has_remainder", lambda p: divided and p.dtype == torch.bfloat16 and p.numel() > 1024)
    monkeypatch.setattr(low_memory, "CHUNK", chunk)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The branches of a GPU on the host: no kernels, and large masters in two parts, stepped 512 elements at a time."""
    without_adamw_kernels(monkeypatch)
    cut_masters(monkeypatch, True, 512)


def peak(work) -> int:
    """The most bytes that `work` holds at once beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


LOW = (Optim(optimizer="adamw_8bit"), Optim(bf16_stochastic_round=True),
       Optim(optimizer="adamw_8bit", bf16_stochastic_round=True))  # fmt: skip


@pytest.mark.parametrize(("passes", "most"), [(1, 14), (3, 16)])
@pytest.mark.parametrize("optim", [Optim(), LOW[2], *(pytest.param(optim, marks=pytest.mark.slow) for optim in LOW[:2])])
def test_a_step_of_a_gpu_takes_at_most_16_bytes_a_parameter(optim, passes, most, as_on_a_gpu, monkeypatch):
    """Weight 2, the rest of its master 2, moments 8, and the gradient: of one pass 2, the sum of several 4."""

    p = {f"{n}.weight": nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16)) for n in range(24)}

    def step() -> float:
        optimizer = Optimizer(p, optim)
        loop.add_up([optimizer], [lambda: sum(weight.float().sum() for weight in p.values())] * passes)
        gradients = [x for w in optimizer.weights.values() for x in (w.gradient, w.parameter.grad, w.buffer) if x is not None]
        held = {x.data_ptr(): x.numel() * x.element_size() for x in [*p.values(), *optimizer.state_dict().values(), *gradients]}
        return (sum(held.values()) + peak(lambda: optimizer.apply(optimizer.norm(), 1e-3))) / (24 * 64 * 256)

    assert step() <= most + 0.3
    if optim == Optim():
        cut_masters(monkeypatch, False, 512)
        assert step() >= most + 2  # with whole masters: the control


@pytest.mark.parametrize("optim", LOW)
def test_temporaries_are_those_of_a_chunk(optim, as_on_a_gpu, monkeypatch, own=low_memory.CHUNK):
    assert own <= 1 << 22, "chunks of a GPU, whose temporaries are then at most 0.3 GB"
    p = {"weight": nn.Parameter(torch.ones(1 << 18, dtype=torch.bfloat16))}
    optimizer = Optimizer(p, optim)
    p["weight"].grad = torch.ones_like(p["weight"])
    for chunk, least, most in ((1 << 14, 1, 16), (1 << 18, 30, 80)):  # all at once: the control
        cut_masters(monkeypatch, True, chunk)
        assert least < peak(lambda: optimizer.apply(1.0, 1e-3)) / (1 << 18) < most


@pytest.mark.parametrize("optim", [Optim(max_grad_norm=0.1), *LOW])
def test_chunks_and_masters_in_two_parts_step_to_the_same_bits(optim, as_on_a_gpu, monkeypatch):
    parts = Optimizer(parameters_of(torch.bfloat16), optim, seed=3)
    take_steps(parts, 4)
    saved = {key: x.clone() for key, x in parts.state_dict().items()}
    cut_masters(monkeypatch, False, 1 << 20)
    whole = Optimizer(parameters_of(torch.bfloat16), optim, seed=3)
    take_steps(whole, 4)
    for name, p in whole.parameters.items():
        assert torch.equal(p, parts.parameters[name]), name
    other = Optimizer({name: nn.Parameter(p.detach().clone()) for name, p in parts.parameters.items()}, optim, seed=3)
    other.load_state_dict(saved)  # a checkpoint of a GPU where masters are whole, and back
    assert ("remainder.layer.weight" in saved) is not optim.bf16_stochastic_round
    for key, x in whole.state_dict().items():
        assert torch.equal(x, other.state_dict()[key]), key
    cut_masters(monkeypatch, True, 1 << 20)
    back = Optimizer(parts.parameters, optim, seed=3)
    back.load_state_dict(whole.state_dict())
    for key, x in saved.items():
        assert torch.equal(x, back.state_dict()[key]), key


def dithered_by_hand(x: float, index: int) -> float:
    """The formula of `dither` with floor and frexp: in [2^(e-1), 2^e) bfloat16's 8 digits are 2^(e-8) apart."""
    unit = 2.0 ** (math.frexp(x)[1] - 8)
    below, threshold = math.floor(abs(x) / unit), math.floor(index * 0x9E3779B9 / 2**16) % 2**16 / 2**16
    return math.copysign((below + (abs(x) / unit - below + threshold >= 1)) * unit, x)


@pytest.mark.parametrize("first", [0, 12_345, (1 << 32) - 3])
def test_dithering_follows_its_formula_and_keeps_what_bfloat16_has(first):
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 2000)
    wanted = torch.tensor([dithered_by_hand(value, (first + i) % (1 << 32)) for i, value in enumerate(x.tolist())])
    assert torch.equal(low_memory.dither(x, first).float(), wanted)
    assert not torch.equal(low_memory.dither(x, first + 1).float(), wanted)
    exact = torch.tensor([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan]).repeat(100)
    torch.testing.assert_close(low_memory.dither(exact, first).float(), exact, rtol=0, atol=0, equal_nan=True)


def test_dithered_weights_move_together_as_their_masters_do():
    """Of 1 to 1 + 1/128, 1/1024 is an eighth: of each 4,096 weights 512 move, and to the nearest none (the control)."""
    x = torch.full((16, 4096), 1 + 1 / 1024)
    assert ((low_memory.dither(x.view(-1)).view(16, 4096) > 1).sum(1) - 512).abs().max() <= 2
    assert x.bfloat16().max() == 1.0


@pytest.mark.parametrize(
    "native", [pytest.param(True, marks=pytest.mark.needs("compiler")), False], ids=["by the kernel", "by torch"]
)
def test_masters_of_every_layout_are_copied_by_the_same_rounding(native, monkeypatch):
    if not native:
        without_adamw_kernels(monkeypatch)
        monkeypatch.setattr(low_memory, "SPLIT", 1000), monkeypatch.setattr(low_memory, "CHUNK", 700)
        low_memory._first_thresholds.cache_clear()
    draw = torch.Generator().manual_seed(0)
    layouts = [
        (torch.empty(10, 31), 0),
        (torch.empty(7), 0),
        (torch.empty(50, 33), 0),
        (torch.empty(9, 30), 77),
        (torch.empty(6, 40).t(), 0),
    ]
    pairs = [(x.bfloat16(), torch.randn(x.shape, generator=draw), first) for x, first in layouts]
    low_memory.copy_masters(pairs)
    for weight, master, first in pairs:
        assert torch.equal(weight.reshape(-1), low_memory.dither(master.reshape(-1), first)), weight.shape
    half, master = torch.empty(5, dtype=torch.float16), torch.tensor([1 / 3, 1e-4, -2.0, 0.0, 7.7])
    low_memory.copy_masters([(half, master, 0)])
    assert torch.equal(half, master.half())
    low_memory._first_thresholds.cache_clear()


def test_a_master_in_two_parts_is_joined_again_to_the_last_bit():
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-40, 38, 1 << 16)
    x = torch.cat([x, torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4e38, 1 + 1 / 256, -1 - 3 / 256])])
    for first in (0, 99):
        stored, remainder = split(x, first)
        assert torch.equal(stored, low_memory.dither(x, first)) and remainder.dtype == torch.int16
        assert torch.equal(join(stored, remainder, first).view(torch.int32), x.view(torch.int32))
        assert not torch.equal(join(stored, remainder, first + 1), x)
