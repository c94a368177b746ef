"""What the Tinker API trains: losses by hand, gradients by the padded oracle, and states that go on to the same bits."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import OnDevice, fake_gpu
from packed_inputs import oracle

from psigrad.language.models import hf_attention
from psigrad.language.models.packing import Rows
from psigrad.records.checkpoint import restore_folder
from psigrad_serve.api_errors import ApiError
from psigrad_serve.tinker_models import LOSSES, TinkerDatum, TinkerModel

TOKENS = (5, 9, 30, 12, 7, 44, 101)
MORE = (8, 200, 17, 33)


def datum(tokens=TOKENS, **numbers):
    inputs = {"target_tokens": torch.tensor(tokens[1:])} | {name: torch.tensor(values) for name, values in numbers.items()}
    return TinkerDatum.of(tokens[:-1], inputs)


@pytest.fixture
def base(small_model, tmp_path):
    small_model.save(tmp_path / "base")
    return str(tmp_path / "base")


def test_losses_are_the_sums_of_the_formulas():
    own = TinkerDatum(1, (2, 3), {"logprobs": torch.tensor([-1.0, -2.0]), "advantages": torch.tensor([2.0, -1.0])})
    logp = torch.tensor([-1.0 + math.log(1.5), -2.0 + math.log(0.5)])  # ratios 1.5 and 0.5
    values = {name: float(LOSSES[name](logp, own, {})) for name in LOSSES if name != "cross_entropy"}
    assert values["importance_sampling"] == pytest.approx(-(1.5 * 2 + 0.5 * -1))
    assert values["ppo"] == pytest.approx(-(1.2 * 2 + 0.8 * -1)), "clipped where clipping lowers the objective"
    assert values["cispo"] == pytest.approx(-(1.2 * 2 * float(logp[0]) + 0.8 * -1 * float(logp[1])))
    dro = float((logp * own.numbers["advantages"]).sum()) - 0.025 * (math.log(1.5) ** 2 + math.log(0.5) ** 2)
    assert values["dro"] == pytest.approx(-dro)
    weighed = TinkerDatum(1, (2, 3), {"weights": torch.tensor([0.0, 3.0])})
    assert float(LOSSES["cross_entropy"](logp, weighed, {})) == pytest.approx(-3 * float(logp[1]))
    wide = {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}
    assert float(LOSSES["ppo"](logp, own, wide)) == pytest.approx(values["importance_sampling"])


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo"])
@pytest.mark.parametrize(("packed", "gap"), [(True, 1e-6), (False, 1e-5)], ids=["own", "oracle"])
def test_the_gradient_is_psigrads_own_and_that_of_the_padded_oracle(base, loss, packed, gap):
    made, steps = TinkerModel.fresh(base, 4, seed=3), range(len(TOKENS) - 1)
    numbers = {"advantages": [1.0 - i for i in steps], "logprobs": [-5.5 - 0.1 * i for i in steps]}
    if loss == "cross_entropy":
        numbers = {"weights": [0.5 * (i % 3) for i in steps]}
    data = [datum(**numbers), datum(MORE, **{name: values[:3] for name, values in numbers.items()})]
    (first, _), (rest, _) = (made.forward_backward([each], loss, {}) for each in data)
    added = torch.cat([p.grad.flatten() for p in made.model.trainable().values()])
    for p in made.model.trainable().values():
        p.grad = None
    logp = made.model.evaluate(Rows([TOKENS, MORE], [[False, *[True] * 6], [False, *[True] * 3]]), packed=packed).logp
    own = [logp[0, 1:7], logp[1, 1:4]]
    sum(LOSSES[loss](row, each, {}) for row, each in zip(own, data, strict=True)).backward()
    want = torch.cat([p.grad.flatten() for p in made.model.trainable().values()])
    assert float((added - want).norm() / want.norm()) < gap < 1e-3 < float(want.norm())
    assert torch.allclose(rest[0], own[1].detach(), atol=1e-5) and len(first[0]) == 6


def test_a_state_goes_on_to_the_same_bits_and_without_its_optimiser_does_not(base, tmp_path):
    def train(model, steps):
        for _ in range(steps):
            model.forward_backward([datum(weights=[1.0] * 6)], "cross_entropy", {})
            model.step(1e-2, (0.9, 0.95), 1e-12, 0.01, 1.0)
        return [p.detach().clone() for p in model.model.trainable().values()]

    first = TinkerModel.fresh(base, 4, seed=3)
    train(first, 2)
    first.save(tmp_path / "state", optimizer=True)
    first.save(tmp_path / "state", optimizer=True)  # again, in its place
    whole = train(first, 2)
    again = TinkerModel.fresh(base, 4, seed=99)
    again.load(tmp_path / "state", optimizer=True)
    assert all(map(torch.equal, whole, train(again, 2)))
    again.load(tmp_path / "state", optimizer=False)
    assert not all(map(torch.equal, whole, train(again, 2)))


@pytest.mark.parametrize(
    ("tokens", "inputs", "words"),
    [((5, 9), {"target_tokens": [9]}, "2 tokens and 1 targets"), ((5, 9), {"target_tokens": [8, 7]}, "not the next token"),
     ((5,), {"target_tokens": [[9]]}, "one dimension"), ((5,), {"target_tokens": [9], "mask": [1.0]}, "mask"),
     ((5,), {"target_tokens": [9], "weights": [1.0, 2.0]}, "one per target")],
)  # fmt: skip
def test_a_datum_that_cannot_be_had_is_refused(tokens, inputs, words):
    with pytest.raises(ApiError, match=words):
        TinkerDatum.of(tokens, {name: torch.tensor(values) for name, values in inputs.items()})


def test_a_loss_without_its_numbers_and_an_unknown_one_are_refused(base):
    made = TinkerModel.fresh(base, 2, seed=0)
    with pytest.raises(ApiError, match="ppo needs logprobs"):
        made.forward_backward([datum(weights=[1.0] * 6)], "ppo", {})
    with pytest.raises(ApiError, match="no loss 'gspo'"):
        made.forward_backward([datum()], "gspo", {})


def test_targets_over_a_prompt_may_be_anything_where_the_loss_has_no_part(base):
    """As tinker-cookbook's RL loop pads: zeros over the prompt, whose advantages are 0 too."""
    made, count = TinkerModel.fresh(base, 4, seed=3), len(TOKENS) - 1
    numbers = {"advantages": torch.tensor([0.0, 0.0, 0.0, 1.0, -1.0, 2.0]), "logprobs": torch.full((count,), -5.0)}
    padded = torch.tensor([0, 0, 0, *TOKENS[4:]])
    found = []
    for targets in (torch.tensor(TOKENS[1:]), padded):
        for p in made.model.trainable().values():
            p.grad = None
        ((logp,), loss) = made.forward_backward([TinkerDatum.of(TOKENS[:-1], {"target_tokens": targets, **numbers})],
                                                "importance_sampling", {})  # fmt: skip
        found.append((logp, loss, torch.cat([p.grad.flatten() for p in made.model.trainable().values()])))
    (own, loss, gradient), (told, other, same) = found
    assert other == loss and torch.equal(gradient, same) and torch.equal(told[3:], own[3:]) and told[:3].tolist() == [0.0] * 3
    for wrong in ({**numbers, "advantages": torch.ones(count)}, {"logprobs": numbers["logprobs"]}):
        with pytest.raises(ApiError, match="not the next token"):
            TinkerDatum.of(TOKENS[:-1], {"target_tokens": padded, **wrong})


def test_a_state_that_was_to_be_replaced_when_the_server_was_killed_is_there(base, tmp_path, monkeypatch):
    model, place = TinkerModel.fresh(base, 4, seed=3), tmp_path / "state"
    model.save(place, optimizer=True)
    before = (place / "training_state.safetensors").read_bytes()
    rename = os.rename

    def killed(path, target):
        if Path(path).name == ".state.new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        model.save(place, optimizer=True)
    monkeypatch.undo()
    assert not place.exists() and restore_folder(place) and (place / "training_state.safetensors").read_bytes() == before
    model.save(place, optimizer=True)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "base") == ["state"]
    assert not restore_folder(tmp_path / "none")


class Two:
    """A model whose log-probs of a datum's two targets are what is trained."""

    def __init__(self):
        self.logp = torch.nn.Parameter(torch.tensor([[-1.0, -3.0]]))

    def trainable(self):
        return {"logp": self.logp}

    def evaluate(self, groups):
        return SimpleNamespace(logp=self.logp)


# Of the second target alone, whose ratio is 1: -Σ w log p, -Σ r A, -Σ A log p, and their slopes.
BY_HAND = {"cross_entropy": (9.0, -3.0), "importance_sampling": (-2.0, -2.0), "ppo": (-2.0, -2.0), "cispo": (6.0, -2.0),
           "dro": (6.0, -2.0)}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_has_a_part_where_the_client_named_another_target(loss):
    """The tokens say 9 behind 5, and the client 0: its advantage there is 0, and log q another than log p."""
    numbers = {"advantages": [0.0, 2.0], "logprobs": [-2.0, -3.0]} if loss != "cross_entropy" else {"weights": [0.0, 3.0]}
    inputs = {"target_tokens": torch.tensor([0, 7])} | {name: torch.tensor(values) for name, values in numbers.items()}
    made = TinkerModel("", 1, Two())
    (logp,), total = made.forward_backward([TinkerDatum.of((5, 9), inputs)], loss, {})
    assert (total, made.model.logp.grad.tolist(), logp.tolist()) == (BY_HAND[loss][0], [[0.0, BY_HAND[loss][1]]], [0.0, -3.0])
    inputs["target_tokens"] = torch.tensor([9, 7])  # control: with the targets of the tokens the distance of dro counts
    made.forward_backward([TinkerDatum.of((5, 9), inputs)], loss, {})
    assert made.model.logp.grad[0, 0] == pytest.approx(0.05 if loss == "dro" else 0.0)


def test_weights_on_another_target_are_refused_by_the_loss_that_reads_them_alone():
    numbers = {"weights": [1.0, 3.0], "advantages": [0.0, 2.0], "logprobs": [-2.0, -3.0]}
    inputs = {"target_tokens": torch.tensor([0, 7])} | {name: torch.tensor(values) for name, values in numbers.items()}
    made, held = TinkerModel("", 1, Two()), TinkerDatum.of((5, 9), inputs)
    with pytest.raises(ApiError, match="not the next token, where its weights are not 0"):
        made.forward_backward([held], "cross_entropy", {})
    assert made.model.logp.grad is None
    made.forward_backward([held], "importance_sampling", {})
    assert made.model.logp.grad.tolist() == [[0.0, -6.0]], "weight 3 of advantage 2"


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 3e38])
def test_a_gradient_that_is_not_finite_is_told_and_the_adapter_is_as_it_was(wrong):
    made, how = TinkerModel("", 1, Two()), (0.5, (0.9, 0.95), 1e-12, 0.0, 1.0)
    with pytest.raises(ApiError, match=r"norm is (inf|nan), so the step was skipped"):
        made.forward_backward([datum((5, 9, 7), weights=[wrong, wrong])], "cross_entropy", {})
        made.step(*how)
    assert made.model.logp.tolist() == [[-1.0, -3.0]] and made.model.logp.grad is None and not made.optimizer.state
    made.forward_backward([datum((5, 9, 7), weights=[3.0, 4.0])], "cross_entropy", {})
    assert made.step(*how) == 5.0
    assert made.model.logp.tolist() == [[pytest.approx(-0.5), pytest.approx(-2.5)]], "AdamW's first step is the rate"


@pytest.mark.parametrize("loss", ["cross_entropy", "dro"])
def test_training_on_a_gpu_goes_on_from_a_state_of_the_cpu(base, tmp_path, monkeypatch, loss):
    """The GPU is one that computes on the host, and refuses numbers of the host beside its own."""
    padded, count = torch.tensor([0, 0, *TOKENS[3:]]), len(TOKENS) - 1
    numbers = {"weights": [0.0, 0.0] + [0.5] * 4, "advantages": [0.0, 0.0, 1.0, -1.0, 2.0, 0.5], "logprobs": [-5.5] * count}
    inputs = {"target_tokens": padded} | {name: torch.tensor(values) for name, values in numbers.items()}

    def train(model):
        (logp,), total = model.forward_backward([TinkerDatum.of(TOKENS[:-1], inputs)], loss, {})
        return [*logp.tolist(), total, model.step(1e-2, (0.9, 0.95), 1e-12, 0.01, 1.0)]

    here = TinkerModel.fresh(base, 4, seed=3)
    train(here)
    here.save(tmp_path / "state", optimizer=True)
    want = [*train(here), *train(here)]
    monkeypatch.setattr(hf_attention, "varlen_kernel", lambda: oracle)
    with fake_gpu(monkeypatch):
        there = TinkerModel.fresh(base, 4, seed=99, device="cuda")
        there.load(tmp_path / "state", optimizer=True)
        assert all(isinstance(p, OnDevice) for p in there.model.trainable().values())
        found = [*train(there), *train(there)]
        weights = [p.detach().cpu() for p in there.model.trainable().values()]
    assert found == pytest.approx(want, rel=1e-5, abs=1e-4)
    for a, b in zip(weights, here.model.trainable().values(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-5)
