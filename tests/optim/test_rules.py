"""Schedules with parameters against transformers' over all steps; Muon and Adafactor against torch's and transformers'."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor, get_scheduler

from psigrad.config import Optim
from psigrad.errors import UserError
from psigrad.optim import Optimizer, check_schedule, learning_rate

SCHEDULES = {
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0, "lr_end": 1e-4},
    "inverse_sqrt": {"timescale": 7},
    "cosine_with_min_lr": {"min_lr_rate": 0.25},
    "warmup_stable_decay": {"num_decay_steps": 8, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
    "linear": {},
    "cosine": {},
    "constant": {},
}


def theirs(name: str, warmup: int, total: int, kwargs: dict, rate: float = 0.5) -> list[float]:
    """The rates of transformers' scheduler, stepped."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    name = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=kwargs)
    rates = []
    for _ in range(total):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_of_a_schedule_is_transformers(name):
    def ours(warmup: int) -> list[float]:
        kwargs = SCHEDULES[name]
        optim = Optim(learning_rate=0.5, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs or "", warmup_steps=warmup)
        return [learning_rate(optim, step, 30) for step in range(30)]

    assert ours(0) == pytest.approx(theirs(name, 0, 30, SCHEDULES[name]))
    after = theirs(name, 5, 30, SCHEDULES[name])
    assert ours(5)[5:] == pytest.approx(after[5:])
    # the warm-up is theirs of one step more, without its first, which moves nothing
    assert ours(5) == pytest.approx(theirs(name, 6, 31, SCHEDULES[name])[1:])
    assert after[0] == 0.0 or "min_lr_ratio" in SCHEDULES[name]
    assert ours(5)[0] > after[0]


def rate(name: str, step: int, total: int, warmup: int = 0, **kwargs) -> float:
    return learning_rate(
        Optim(learning_rate=1.0, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, warmup_steps=warmup), step, total
    )


def test_rates_by_hand():
    # a quarter is kept: 0.25 + 0.75 · ½(1 + cos(π/2))
    assert rate("cosine_with_min_lr", 5, 10, min_lr_rate=0.25) == pytest.approx(0.625)
    # two cycles of 5 steps: step 5 begins the second at the peak
    assert rate("cosine_with_restarts", 5, 10, num_cycles=2) == pytest.approx(1.0)
    assert rate("polynomial", 5, 10, power=2.0, lr_end=0.0) == pytest.approx(0.25)
    assert rate("inverse_sqrt", 12, 99, timescale=4) == pytest.approx(math.sqrt(4 / 16))
    # 10 steps of which the last 4 decay: flat to step 6, half of the way at step 8
    assert [rate("warmup_stable_decay", s, 10, num_decay_steps=4, decay_type="linear") for s in (0, 6, 8)] == [1.0, 1.0, 0.5]
    # its warm-up is its own: half of the peak at the first of two steps
    assert rate("cosine_warmup_with_min_lr", 0, 10, 2, min_lr_rate=0.1) == pytest.approx(0.5)


def test_parameters_that_a_schedule_has_not_are_refused():
    with pytest.raises(UserError, match=r"polynomial cannot have lr_scheduler_kwargs .*'powr'"):
        check_schedule(Optim(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"powr": 2}))
    with pytest.raises(UserError, match="linear takes no lr_scheduler_kwargs"):
        check_schedule(Optim(lr_scheduler_kwargs={"power": 2}))
    with pytest.raises(UserError, match="num_decay_steps"):
        check_schedule(Optim(lr_scheduler_type="warmup_stable_decay"))
    check_schedule(Optim(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-7}))


class Tiny(nn.Module):
    """An embedding, a hidden matrix with its bias, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 5)
        self.lm_head = nn.Linear(5, 6, bias=False)

    def loss(self) -> torch.Tensor:
        return (self.lm_head(torch.tanh(self.hidden(self.embed(torch.tensor([1, 2, 5]))))) ** 2).sum()


def made(name: str, **settings) -> tuple[Tiny, Optimizer]:
    model = Tiny()
    return model, Optimizer(dict(model.named_parameters()), Optim(optimizer=name, max_grad_norm=0.0, **settings))


def test_muon_steps_hidden_matrices_and_adamw_the_rest():
    ours, optimizer = made("muon", weight_decay=0.1)
    peer = Tiny()
    muon = torch.optim.Muon([peer.hidden.weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    matrices = [peer.embed.weight, peer.lm_head.weight]
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": [peer.hidden.bias], "weight_decay": 0.0}])
    for _ in range(3):
        optimizer.step([ours.loss], 0.02)
        peer.zero_grad()
        peer.loss().backward()
        for group in adamw.param_groups:
            group["lr"] = 0.02
        muon.step()
        adamw.step()
    for (name, a), b in zip(ours.named_parameters(), peer.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name
    plain, other = made("adamw", weight_decay=0.1)
    other.step([plain.loss], 0.02)
    assert not torch.allclose(plain.hidden.weight, ours.hidden.weight, atol=1e-3)


def test_muons_step_has_singular_values_alike():
    ours, optimizer = made("muon")
    before = ours.hidden.weight.detach().clone()
    optimizer.step([ours.loss], 0.01)
    moved = torch.linalg.svdvals((before - ours.hidden.weight.detach()) / (0.01 * 0.2 * math.sqrt(5)))
    again = Tiny()
    again.loss().backward()
    gradient = torch.linalg.svdvals(again.hidden.weight.grad)
    rank = int((gradient > 1e-5).sum())  # three tokens: three directions
    assert rank == 3 and float(moved[rank - 1]) > 0.6 and float(moved[0]) < 1.3
    assert float(gradient[0] / gradient[rank - 1]) > 3


def test_adafactor_is_transformers():
    ours, optimizer = made("adafactor", weight_decay=0.1)
    peer = Tiny()
    matrices, vectors = ([p for p in peer.parameters() if (p.dim() > 1) is flat] for flat in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    their = Adafactor(groups, lr=0.02, scale_parameter=False, relative_step=False)
    for _ in range(3):
        optimizer.step([ours.loss], 0.02)
        peer.zero_grad()
        peer.loss().backward()
        their.step()
    for (name, a), b in zip(ours.named_parameters(), peer.parameters(), strict=True):
        assert torch.equal(a, b), name
    kept = optimizer.state_dict()
    assert kept["exp_avg_sq_row.hidden.weight"].shape == (5,) and "exp_avg_sq.hidden.weight" not in kept


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize("half", [False, True])
def test_its_state_goes_on_bitwise(name, half):
    def build() -> tuple[Tiny, Optimizer]:
        model = Tiny().to(torch.bfloat16) if half else Tiny()
        return model, Optimizer(dict(model.named_parameters()), Optim(optimizer=name, max_grad_norm=0.5))

    whole, long = build()
    first, before = build()
    for _ in range(2):
        long.step([whole.loss], 0.01)
        before.step([first.loss], 0.01)
    again, after = build()
    again.load_state_dict(first.state_dict())
    after.load_state_dict({key: tensor.clone() for key, tensor in before.state_dict().items()})
    for _ in range(2):
        long.step([whole.loss], 0.01)
        after.step([again.loss], 0.01)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    fresh, forgetful = build()
    fresh.load_state_dict(first.state_dict())
    for _ in range(2):
        forgetful.step([fresh.loss], 0.01)
    assert not all(torch.equal(a, b) for a, b in zip(fresh.parameters(), whole.parameters(), strict=True))


def test_the_state_of_another_optimizer_is_refused():
    model, adamw = made("adamw")
    adamw.step([model.loss], 0.01)
    for name in ("muon", "adafactor"):
        with pytest.raises(UserError, match="was saved by another optimizer; set optimizer back"):
            made(name)[1].load_state_dict(adamw.state_dict())
