"""The figures of a step are read once, at its end: a GPU would run dry if each micro-batch waited for a number."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from psigrad.language.training.loss_sums import LossSums
from psigrad.objective import Loss


class Reads(TorchDispatchMode):
    """How often a number is read off a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def losses() -> list[Loss]:
    weight = torch.tensor(0.1, requires_grad=True)
    return [Loss(weight * k, {"entropy": (weight * k * k).detach(), "clipped": torch.tensor(0.3)}) for k in (1, 2, 3)]


def expected(name: str, losses: list[Loss]) -> float:
    total = 0.0
    for one in losses:
        total += float(one.value.detach() if name == "loss" else one.terms[name])
    return total


def test_online_terms_are_read_at_once_at_the_end_of_a_step_and_add_up_to_the_same_bits(monkeypatch):
    tally, made, lists, read = LossSums(), losses(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(len(x)) or read(x))
    with Reads() as reads:
        for one in made:
            tally.add(one)
        assert reads.count == 0 and not lists
        tally.end_step(None)
    assert reads.count == 0 and lists == [3]
    assert tally.last == {name: expected(name, made) for name in ("loss", "entropy", "clipped")}
    assert tally.last["entropy"] == pytest.approx(1.4)


def test_a_share_of_weight_0_counts_nowhere():
    sums, made = LossSums(), losses()
    with torch.no_grad():
        for one in made:
            assert float(sums.of(lambda one=one: one).detach()) == float(one.value.detach())
        assert float(sums.of(lambda: made[0], 0.0).detach()) == 0.0
    assert not sums.last
    sums.end_step(None)
    assert sums.last == {name: expected(name, made) for name in ("loss", "entropy", "clipped")}
