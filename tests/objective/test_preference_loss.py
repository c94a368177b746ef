"""Preference and reward-model losses: hand-worked numbers, the closed-form optimum, expected gradients, and any split."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from psigrad.config.algorithms import resolve_loss
from psigrad.objective.preferences.preference_catalog import METHODS as LOSSES
from psigrad.objective.preferences.preference_loss import (
    KahnemanTversky,
    Labelled,
    Pairs,
    Preference,
    kl_of_mismatched,
    log_odds,
    logistic,
    mean_logp,
    robust,
)

PREFERENCES = [name for name in LOSSES if name != "kto"]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def some_pairs(n: int = 7, margin: bool = False) -> Pairs:
    g = torch.Generator().manual_seed(3)

    def logps() -> torch.Tensor:
        return -(torch.rand(n, generator=g, dtype=torch.float64) * 6 + 2)

    return Pairs(
        logp_chosen=logps().requires_grad_(),
        logp_rejected=logps().requires_grad_(),
        tokens_chosen=torch.randint(1, 6, (n,), generator=g),
        tokens_rejected=torch.randint(1, 6, (n,), generator=g),
        ref_chosen=logps(),
        ref_rejected=logps(),
        margin=torch.linspace(0, 0.6, n, dtype=torch.float64) if margin else None,
    )


def by_hand(name: str, p: Pairs, i: int) -> float:
    """The loss of pair i with the presets' numbers, in Python floats."""
    w, z = float(p.logp_chosen[i].detach()), float(p.logp_rejected[i].detach())
    rw, rl = float(p.ref_chosen[i]), float(p.ref_rejected[i])
    nw, nl = int(p.tokens_chosen[i]), int(p.tokens_rejected[i])
    d = (w - rw) - (z - rl)
    odds = [x / n - math.log(1 - math.exp(x / n)) for x, n in ((w, nw), (z, nl))]
    return {
        "dpo": lambda: -math.log(sigmoid(0.1 * d)),
        "cdpo": lambda: -0.9 * math.log(sigmoid(0.1 * d)) - 0.1 * math.log(sigmoid(-0.1 * d)),
        "robust_dpo": lambda: (-0.9 * math.log(sigmoid(0.1 * d)) + 0.1 * math.log(sigmoid(-0.1 * d))) / 0.8,
        "ipo": lambda: ((w - rw) / nw - (z - rl) / nl - 1 / 0.2) ** 2,
        "hinge": lambda: max(0.0, 1 - 0.1 * d),
        "ln_dpo": lambda: -math.log(sigmoid(2 * ((w - rw) / nw - (z - rl) / nl))),
        "simpo": lambda: -math.log(sigmoid(2 * (w / nw - z / nl) - 1)),
        "orpo": lambda: -0.1 * math.log(sigmoid(odds[0] - odds[1])),
        "apo_zero": lambda: 1 - sigmoid(0.1 * (w - rw)) + sigmoid(0.1 * (z - rl)),
        "apo_down": lambda: sigmoid(0.1 * (w - rw)) + 1 - sigmoid(0.1 * d),
    }[name]()


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_preset_is_its_formula(name):
    pairs, loss = some_pairs(), resolve_loss(name)
    targets = int(pairs.tokens_chosen.sum())
    expected = sum(by_hand(name, pairs, i) for i in range(7)) / 7
    if name == "orpo":
        expected += -float(pairs.logp_chosen.sum()) / targets
    assert float(loss.loss(pairs, 7, targets).value.detach()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", PREFERENCES)
def test_the_gradient_is_that_of_finite_differences(name):
    pairs, loss = some_pairs(), resolve_loss(name)
    targets = int(pairs.tokens_chosen.sum())
    loss.loss(pairs, 7, targets).value.backward()
    for field in ("logp_chosen", "logp_rejected"):
        leaf = getattr(pairs, field)
        for i in range(7):
            step = torch.zeros(7, dtype=torch.float64)
            step[i] = 1e-6
            up, down = (
                loss.loss(replace(pairs, **{field: leaf.detach() + sign * step}), 7, targets).value.detach() for sign in (1, -1)
            )
            assert float(leaf.grad[i]) == pytest.approx(float(up - down) / 2e-6, abs=1e-7)


@pytest.mark.parametrize("name", PREFERENCES)
def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_terms(name):
    loss = resolve_loss(name)
    whole = some_pairs(margin=True)
    targets = int(whole.tokens_chosen.sum())
    together = loss.loss(whole, 7, targets)
    together.value.backward()
    parts = some_pairs(margin=True)
    total, terms = 0.0, {}
    for rows in ([0, 3], [1], [2, 4, 5, 6]):
        share = loss.loss(picked(parts, rows), 7, targets)
        share.value.backward()
        total += float(share.value.detach())
        terms = {key: terms.get(key, 0.0) + float(value) for key, value in share.terms.items()}
    assert total == pytest.approx(float(together.value.detach()), abs=1e-12)
    assert terms == pytest.approx({key: float(value) for key, value in together.terms.items()}, abs=1e-12)
    assert torch.allclose(whole.logp_chosen.grad, parts.logp_chosen.grad, atol=1e-12)
    assert torch.allclose(whole.logp_rejected.grad, parts.logp_rejected.grad, atol=1e-12)


def picked(pairs: Pairs, rows: list[int]) -> Pairs:
    return Pairs(**{name: None if value is None else value[rows] for name, value in vars(pairs).items()})


def test_negative_control_means_of_micro_batches_are_not_the_mean():
    loss, pairs = resolve_loss("dpo"), some_pairs()
    local = [float(loss.loss(picked(pairs, rows), len(rows), 1).value.detach()) for rows in ([0, 3], [1], [2, 4, 5, 6])]
    assert abs(sum(local) / 3 - float(loss.loss(pairs, 7, 1).value.detach())) > 1e-3


def test_kto_is_its_formula_and_splits():
    loss = KahnemanTversky(0.3, 1.5, 0.5)
    logp = torch.tensor([-2.0, -3.0, -4.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-2.5, -2.0, -4.5, -1.5], dtype=torch.float64)
    good, z = torch.tensor([True, False, True, False]), torch.tensor(0.4, dtype=torch.float64)
    expected = 0.0
    for i, (a, b) in enumerate(zip(logp.tolist(), ref.tolist(), strict=True)):
        r = a - b
        expected += 1.5 * (1 - sigmoid(0.3 * (r - 0.4))) if good[i] else 0.5 * (1 - sigmoid(0.3 * (0.4 - r)))
    whole = loss.loss(Labelled(logp, ref, good, z), 4, 2)
    assert float(whole.value.detach()) == pytest.approx(expected / 4, abs=1e-12)
    shares = [loss.loss(Labelled(logp[r], ref[r], good[r], z), 4, 2) for r in ([0], [1, 2, 3])]
    assert float(sum(s.value for s in shares).detach()) == pytest.approx(expected / 4, abs=1e-12)
    for key, value in whole.terms.items():
        assert float(sum(s.terms[key] for s in shares)) == pytest.approx(float(value), abs=1e-12), key


def test_ktos_reference_point_is_never_negative_and_carries_no_gradient():
    logp = torch.tensor([-3.0, -4.0], requires_grad=True)
    assert float(kl_of_mismatched(logp, torch.tensor([-1.0, -1.0]))) == 0.0
    z = kl_of_mismatched(logp, torch.tensor([-5.0, -5.0]))
    assert float(z) == pytest.approx(1.5) and not z.requires_grad


def population(rewards: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every ordered pair of completions, with the probability that the first is preferred: Bradley–Terry on `rewards`."""
    order = list(itertools.permutations(range(len(rewards)), 2))
    first, second = (torch.tensor(x) for x in zip(*order, strict=True))
    chance = torch.tensor([sigmoid(rewards[a] - rewards[b]) for a, b in order], dtype=torch.float64)
    return first, second, chance


def descend(link, beta: float, rewards: np.ndarray, reference: torch.Tensor, swapped: float = 0.0) -> torch.Tensor:
    """The policy that minimises the population loss, by descent on its logits; a share of the labels may be `swapped`."""
    first, second, chance = population(rewards)
    chance = (1 - swapped) * chance + swapped * (1 - chance)
    logits = torch.zeros(len(rewards), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], lr=1, max_iter=500, tolerance_grad=1e-13, tolerance_change=1e-16)
    ones = torch.ones(len(first))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        logp = logits.log_softmax(0)
        loss = Preference(lambda p, r, t: p - r, link, beta=beta)
        value = torch.zeros((), dtype=torch.float64)
        for i in range(len(first)):  # one pair at a time, weighted by how often it is seen
            pair = Pairs(
                logp[first[i]][None], logp[second[i]][None], ones[:1], ones[:1], *(reference[x[i]][None] for x in (first, second))
            )
            value = value + chance[i] * loss.loss(pair, 1, 1).value
        value.backward()
        return value

    optimizer.step(closure)
    return logits.detach().log_softmax(0)


def test_the_minimiser_of_dpo_is_the_optimum_of_rlhf():
    """Rafailov et al. 2023: pi ∝ pi_ref · exp(r / beta) where preferences are Bradley–Terry in r."""
    rewards = np.array([0.3, -0.8, 1.1, 0.0])
    reference = torch.tensor([0.1, 0.4, -0.6, 0.2], dtype=torch.float64).log_softmax(0)
    found = descend(logistic(), 0.7, rewards, reference)
    optimum = (reference + torch.tensor(rewards) / 0.7).log_softmax(0)
    assert torch.allclose(found, optimum, atol=1e-6)
    other = (reference + torch.tensor(rewards) / 0.5).log_softmax(0)
    assert not torch.allclose(found, other, atol=1e-2), "negative control: another beta has another optimum"


def test_robust_dpo_finds_the_optimum_from_labels_that_are_sometimes_swapped():
    """Chowdhury et al. 2024, arXiv:2403.00409: with the true share of swapped labels the minimiser is that of clean labels."""
    rewards, share = np.array([0.3, -0.8, 1.1, 0.0]), 0.25
    reference = torch.tensor([0.1, 0.4, -0.6, 0.2], dtype=torch.float64).log_softmax(0)
    optimum = (reference + torch.tensor(rewards) / 0.7).log_softmax(0)
    assert torch.allclose(descend(robust(share), 0.7, rewards, reference, swapped=share), optimum, atol=1e-6)
    misled = descend(logistic(), 0.7, rewards, reference, swapped=share)
    assert not torch.allclose(misled, optimum, atol=1e-2), "negative control: plain DPO believes the swapped labels"


@pytest.mark.parametrize("name", ["dpo", "ln_dpo", "simpo", "orpo"])
def test_an_answer_that_the_policy_never_writes_is_lost_for_good(name):
    """−log σ(∞) = 0 with slope 0; ORPO's likelihood of the chosen one stays: 3 nats over 3 tokens."""
    chosen, rejected = torch.tensor([-3.0], requires_grad=True), torch.tensor([-math.inf], requires_grad=True)
    loss = LOSSES[name].algorithm.loss(Pairs(chosen, rejected, *[torch.tensor([3])] * 2, *[torch.tensor([-2.0])] * 2, None), 1, 3)
    assert float(loss.value.detach()) == pytest.approx(float(name == "orpo"))
    loss.value.backward()
    assert rejected.grad.tolist() == [0.0] and chosen.grad.tolist() == pytest.approx([-1 / 3 if name == "orpo" else 0.0])
    other = torch.tensor([-4.0])
    beyond = LOSSES["cdpo"].algorithm.loss(Pairs(other, rejected, *[torch.tensor([3])] * 2, other, other, None), 1, 3)
    assert float(beyond.value.detach()) == math.inf, "negative control: with swapped labels it costs without bound"


def test_log_odds_keep_their_digits_where_a_completion_is_almost_sure():
    mean = torch.tensor([-1e-12], dtype=torch.float64)
    assert float(log_odds(mean, None, torch.ones(1))) == pytest.approx(-math.log(1e-12), rel=1e-9)


def test_a_reference_free_score_needs_no_reference():
    assert not resolve_loss("simpo").needs_reference and not resolve_loss("orpo").needs_reference
    assert resolve_loss("dpo").needs_reference and resolve_loss("kto").needs_reference
    assert resolve_loss({"preset": "dpo", "score": "mean_logp"}).score is mean_logp


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("dpoo", "did you mean 'dpo'"),
        ({"preset": "dpo", "betta": 1}, "'betta'"),
        ({"preset": "dpo", "link": "logistik"}, "did you mean 'logistic'"),
        ({"preset": "dpo", "link": {"part": "logistic", "smoothing": 0.1}}, "label_smoothing"),
        ({"preset": "dpo", "beta": 0}, "above 0"),
        ({"preset": "cdpo", "link": {"part": "robust", "label_smoothing": 0.5}}, "0.5"),
        (3, "int"),
    ],
)
def test_a_mistake_is_named(spec, said):
    with pytest.raises(ValueError, match=said):
        resolve_loss(spec)


def test_the_links_without_a_preset_are_their_formulas():
    h, g = torch.tensor([0.7]), torch.tensor([-0.4])
    by_hand_of = {
        "nca_pair": -math.log(sigmoid(0.7)) - 0.5 * math.log(sigmoid(-0.7)) - 0.5 * math.log(sigmoid(0.4)),
        "bco_pair": -math.log(sigmoid(0.7)) - math.log(sigmoid(0.4)),
        "sppo_hard": ((0.7 - 0.5) / 0.1) ** 2 + ((-0.4 + 0.5) / 0.1) ** 2,
    }
    for name, expected in by_hand_of.items():
        assert float(resolve_loss({"preset": "dpo", "link": name}).link(h, g, 0.1)) == pytest.approx(expected, rel=1e-5)


def test_a_sure_completion_has_a_finite_odds_ratio():
    pairs = some_pairs()
    sure = replace(pairs, logp_chosen=torch.zeros(7, dtype=torch.float64, requires_grad=True))
    loss = resolve_loss("orpo").loss(sure, 7, 10)
    loss.value.backward()
    assert torch.isfinite(loss.value) and torch.isfinite(sure.logp_chosen.grad).all()


def test_what_would_broadcast_unseen_or_divide_by_nothing_is_refused():
    pairs = some_pairs()
    with pytest.raises(ValueError, match=r"\[N\]"):
        replace(pairs, margin=torch.ones(7, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="no tokens"):
        replace(pairs, tokens_chosen=torch.zeros_like(pairs.tokens_chosen))
    with pytest.raises(ValueError, match="weights"):
        replace(resolve_loss("dpo"), preference=0.0)


DPO = resolve_loss("dpo")


@pytest.mark.parametrize("beta", [math.inf, math.nan, 0.0])
def test_a_beta_must_be_a_finite_number_above_0(beta):
    with pytest.raises(ValueError, match="expected a number above 0"):
        replace(DPO, beta=beta)


def test_ktos_weights_have_the_precision_of_its_log_probs():
    rows = Labelled(
        torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), torch.tensor([True, False]),
        torch.zeros((), dtype=torch.float64),
    )  # fmt: skip
    loss = KahnemanTversky(desirable_weight=0.65, undesirable_weight=0.35).loss(rows, 2, 1).value
    assert float(loss) == 0.25  # (0.65 + 0.35) · ½ / 2, where float32's weights give 0.2499999925


def test_a_margin_of_a_pair_is_added_to_that_of_the_loss():
    zero = torch.zeros(2, dtype=torch.float64)
    chosen, rejected, lengths = zero - 1.0, zero - 3.0, torch.tensor([2, 2])
    simpo = resolve_loss({"preset": "simpo", "margin": 0.5})

    def value(margin) -> float:
        return float(simpo.loss(Pairs(chosen, rejected, lengths, lengths, margin=margin), 2, 4).value)

    apart = simpo.beta * (-1.0 / 2 + 3.0 / 2)
    for margins in ([0.0, 0.0], [0.3, 1.1]):
        expected = sum(math.log1p(math.exp(-(apart - 0.5 - own))) for own in margins) / 2
        assert value(torch.tensor(margins, dtype=torch.float64)) == pytest.approx(expected)
    assert value(None) == pytest.approx(value(torch.zeros(2, dtype=torch.float64)))


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
