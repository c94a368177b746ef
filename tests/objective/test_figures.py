"""What a run writes down about its losses, worked by hand: numbers that no gradient depends on, and that nobody else checks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from psigrad.config.algorithms import resolve_loss
from psigrad.objective import Batch
from psigrad.objective.catalog import DISTILL, GRPO, PPO_PENALTY
from psigrad.objective.parts.advantage import group_mean
from psigrad.objective.parts.ratio import KL
from psigrad.objective.parts.surrogate import kl_penalty
from psigrad.objective.preferences.preference_loss import KahnemanTversky, Labelled, Pairs


def numbers(terms):
    return {name: pytest.approx(float(term), abs=1e-6) for name, term in terms.items()}


def test_figures_of_kto():
    """Of 5 completions in the step 2 are good; 3 are here, 1 of them good. r = 0.5, −1, 0.75, β = 0.1, z = 0.4."""
    rows = Labelled(
        torch.tensor([-2.0, -3.0, -4.0]), torch.tensor([-2.5, -2.0, -4.75]), torch.tensor([True, False, False]), torch.tensor(0.4)
    )
    terms = KahnemanTversky(0.1).loss(rows, 5, 2).terms
    good, bad = 0.05 / 2, (-0.1 + 0.075) / 3
    assert numbers(terms) == {
        "loss": (3 - sum(1 / (1 + math.exp(-x)) for x in (0.1 * 0.1, 0.1 * 1.4, -0.1 * 0.35))) / 5,
        "rewards/chosen": good,
        "rewards/rejected": bad,
        "rewards/margins": good - bad,
        "logps/chosen": -2.0 / 2,
        "logps/rejected": -7.0 / 3,
        "kl": 0.4 * 3 / 5,
    }
    alone = KahnemanTversky().loss(Labelled(*(x[1:2] for x in (rows.logp, rows.ref, rows.desirable)), rows.kl), 1, 0).terms
    assert float(alone["rewards/chosen"]) == 0 and float(alone["logps/rejected"]) == -3


def test_figures_of_pairs():
    """Two pairs of three: h = 0.5·(0.5, −0.25) against 0.5·(−1, −0.25): one is right, one a tie."""
    pairs = Pairs(
        torch.tensor([-2.0, -3.0]),
        torch.tensor([-5.0, -3.5]),
        torch.tensor([2, 3]),
        torch.tensor([4, 1]),
        torch.tensor([-2.5, -2.75]),
        torch.tensor([-4.0, -3.25]),
    )
    terms = resolve_loss({"preset": "dpo", "beta": 0.5}).loss(pairs, 3, 10).terms
    assert numbers(terms) == {
        "loss": (math.log(1 + math.exp(-0.75)) + math.log(2)) / 3,
        "rewards/chosen": (0.25 - 0.125) / 3,
        "rewards/rejected": (-0.5 - 0.125) / 3,
        "rewards/margins": 0.75 / 3,
        "rewards/accuracies": 1.5 / 3,
        "logps/chosen": -5.0 / 3,
        "logps/rejected": -8.5 / 3,
        "nll_loss": 0.5,
    }


def test_a_penalty_follows_the_steps_that_were_trained_on_alone():
    """Two rows of two steps, the second row filtered out and the first with one step: it moved by ln 2 there, k3 = 1 − ln 2 =
    0.307, above 1.5 · 0.15, so that the coefficient doubles. Over the three steps it would be 0.102, over all four places 0.169:
    then it would stay.
    """
    method = replace(PPO_PENALTY, surrogate=kl_penalty(3.0, 0.15), critic=None, psi=group_mean(), kl=None)
    mask = torch.tensor([[True, False], [True, True]])
    batch = Batch(mask, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.full((2, 2), -1.0), torch.zeros(2).long())
    prepared = replace(method.prepare(batch, method.initial_state()), keep=torch.tensor([True, False]))
    moved = torch.full((2, 2), -1.0)
    moved[0, 0] += math.log(2)
    assert method.adapt(prepared, moved) == {"penalty_coefficient": 6.0}


def test_a_divergence_over_the_vocabulary_is_needed_where_its_weight_is_not_0():
    assert (DISTILL.kl.coefficient, DISTILL.needs_exact_kl, GRPO.needs_exact_kl) == (1.0, True, False)
    for coefficient in (0.5, 0.0):
        method = replace(DISTILL, kl=KL("loss", "exact", coefficient))
        assert method.needs_exact_kl is method.needs_reference is bool(coefficient)
