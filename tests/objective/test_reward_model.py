"""Losses and figures of reward models."""

from __future__ import annotations

import math

import pytest
import torch

from psigrad.config.algorithms import resolve_loss
from psigrad.objective.preferences.preference_loss import KahnemanTversky, Labelled, Pairs, correct
from psigrad.objective.preferences.reward_model import BradleyTerry, calibration, process_loss


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_bradley_terry_is_its_formula():
    w, z, m = torch.tensor([1.0, 0.2]), torch.tensor([0.5, 0.9]), torch.tensor([0.1, 0.0])
    loss = BradleyTerry(0.01, 0.05).loss(w, z, m, 2)
    expected = 0.0
    for a, b, c in zip(w.tolist(), z.tolist(), m.tolist(), strict=True):
        expected += -0.95 * math.log(sigmoid(a - b - c)) - 0.05 * math.log(sigmoid(b - a + c)) + 0.01 * (a + b) ** 2
    assert float(loss.value) == pytest.approx(expected / 2, abs=1e-6)
    assert float(loss.terms["accuracy"]) == 0.5
    with pytest.raises(ValueError, match=r"0\.5"):
        BradleyTerry(label_smoothing=0.5)


def test_process_loss_is_the_cross_entropy_of_each_step():
    z, y = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    terms = zip(z.tolist(), y.tolist(), strict=True)
    expected = sum(-b * math.log(sigmoid(a)) - (1 - b) * math.log(1 - sigmoid(a)) for a, b in terms)
    assert float(process_loss(z, y, 3).value) == pytest.approx(expected / 3, abs=1e-12)


def test_calibration_of_a_model_that_knows_its_chances_and_of_one_that_boasts():
    g = torch.Generator().manual_seed(0)
    lead = torch.randn(40000, generator=g, dtype=torch.float64) * 2
    swapped = torch.rand(40000, generator=g, dtype=torch.float64) > torch.sigmoid(lead)
    observed = torch.where(swapped, -lead, lead)
    honest = calibration(observed)
    assert honest.error < 0.01 and sum(honest.counts) == 40000
    assert calibration(observed * 3).error > 0.05


def numbers(terms):
    return {name: pytest.approx(float(term), abs=1e-6) for name, term in terms.items()}


def test_figures_of_a_reward_model():
    """Two pairs of three, a margin of ½ on the second, c = 0.1: leads 1 and 2.5 − 0.5."""
    rewards = torch.tensor([2.0, 1.5]), torch.tensor([1.0, -1.0])
    terms = BradleyTerry(0.1).loss(*rewards, torch.tensor([0.0, 0.5]), 3).terms
    assert numbers(terms) == {
        "loss": (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-2)) + 0.1 * (9 + 0.25)) / 3,
        "accuracy": 2 / 3,
        "margin": 3.5 / 3,
        "mean_reward": 3.5 / 6,
    }


def test_figures_of_steps():
    """σ(0) = ½ is no yes and ½ no label of yes."""
    terms = process_loss(torch.zeros(2), torch.tensor([0.5, 1.0]), 4).terms
    assert numbers(terms) == {"loss": 2 * math.log(2) / 4, "accuracy": 1 / 4}


def test_calibration_in_two_bins():
    """Leads 0, ln 2 and −ln 9: p = ½, ⅔ in the lower bin, half and wholly right; 0.9 in the upper, wrong."""
    found = calibration(torch.tensor([0.0, math.log(2), -math.log(9)]), 2)
    assert (found.lower, found.counts, found.accuracy) == ((0.5, 0.75), (2, 1), (0.75, 0.0))
    assert found.confidence == (pytest.approx(7 / 12), pytest.approx(0.9))
    assert found.error == pytest.approx((2 * abs(0.75 - 7 / 12) + 0.9) / 3)


DPO = resolve_loss("dpo")


def test_ties_count_half():
    assert correct(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 5.0])).tolist() == [0.5, 1.0, 0.0]


@pytest.mark.parametrize("total", [0, 1, 2, 3])
def test_shares_divide_by_the_total_or_by_1(total):
    divisor = max(total, 1)
    pair = Pairs(
        torch.tensor([-1.0]),
        torch.tensor([-2.0]),
        torch.tensor([3]),
        torch.tensor([3]),
        torch.tensor([-1.5]),
        torch.tensor([-1.5]),
    )
    terms = DPO.loss(pair, total, 3).terms
    assert float(terms["loss"]) == pytest.approx(math.log1p(math.exp(-0.1)) / divisor)
    assert float(terms["rewards/chosen"]) == pytest.approx(0.05 / divisor)
    labelled = Labelled(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([True]), torch.tensor(0.0))
    value = float(KahnemanTversky().loss(labelled, total, min(total, 1)).value)
    assert value == pytest.approx((1 - 1 / (1 + math.exp(-0.05))) / divisor)
    logits, labels = torch.tensor([0.5]), torch.tensor([1.0])
    chance = 1 / (1 + math.exp(-0.5))
    found = process_loss(logits, labels, total)
    assert float(found.value) == pytest.approx(-math.log(chance) / divisor)
    assert float(found.terms["accuracy"]) == pytest.approx(1 / divisor)
    means = BradleyTerry().loss(torch.tensor([2.0]), torch.tensor([1.0]), None, total).terms
    assert float(means["mean_reward"]) == pytest.approx(1.5 / divisor) and float(means["margin"]) == pytest.approx(1 / divisor)


@pytest.mark.parametrize("name", ["chosen", "rejected", "margin"])
def test_rewards_of_another_shape_are_refused(name):
    given = {"chosen": torch.zeros(2), "rejected": torch.zeros(2), "margin": torch.zeros(2)}
    wrong = {"chosen": torch.zeros(2, 1), "rejected": torch.zeros(2, 1), "margin": torch.zeros(3)}[name]
    given[name] = wrong
    if name == "chosen":
        given["rejected"] = given["margin"] = wrong
    with pytest.raises(ValueError, match=f"{name} has shape"):
        BradleyTerry().loss(given["chosen"], given["rejected"], given["margin"], 2)


def test_steps_need_labels_of_their_shape():
    with pytest.raises(ValueError, match="logits has shape"):
        process_loss(torch.zeros(2), torch.zeros(3), 2)


def test_bins_of_the_calibration():
    chances = [0.5, 0.55, 0.65, 0.66, 0.95, 0.999]
    leads = torch.tensor([math.log(p / (1 - p)) for p in chances], dtype=torch.float64)
    leads[3] = -leads[3]
    found = calibration(leads, bins=5)
    assert found.counts == (2, 2, 2)
    assert found.lower == pytest.approx((0.5, 0.6, 0.9))
    assert found.confidence == pytest.approx((0.525, 0.655, 0.9745))
    assert found.accuracy == (0.75, 0.5, 1.0)
    assert calibration(torch.tensor([50.0]), bins=5).lower == pytest.approx((0.9,)), "certainty is in the last bin"
