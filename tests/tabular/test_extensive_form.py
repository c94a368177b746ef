"""Games of several seats: values and best responses by hand and by brute force, and which self-play converges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import slow

from psigrad.tabular.extensive_form import GameTree, KuhnPoker, MatchingPennies, fictitious_play, self_play

KUHN = GameTree(KuhnPoker())


def kuhn(bets: dict[str, float]):
    """The policy of Kuhn 1950 with these probabilities of `b`; a seat's sets are named by card and moves."""
    return {key: np.array([1 - bets[key[1]], bets[key[1]]]) for key in KUHN.sets}


def equilibrium(alpha: float) -> dict[str, float]:
    return {"J": alpha, "Q": 0, "K": 3 * alpha, "Jpb": 0, "Qpb": alpha + 1 / 3, "Kpb": 1,
            "Jp": 1 / 3, "Qp": 0, "Kp": 1, "Jb": 0, "Qb": 1 / 3, "Kb": 1}  # fmt: skip


@pytest.mark.parametrize("alpha", [0, 1 / 6, 1 / 3])
def test_kuhns_equilibria_cannot_be_exploited_and_others_can(alpha):
    bets = equilibrium(alpha)
    assert KUHN.values(kuhn(bets))[0] == pytest.approx([-1 / 18, 1 / 18])
    assert KUHN.exploitability(kuhn(bets)) == pytest.approx(0, abs=1e-12)
    assert KUHN.exploitability(kuhn(bets | {"Jp": 0.5})) > 0.01


def test_exploitability_by_hand():
    assert KUHN.exploitability(KUHN.uniform()) == pytest.approx(11 / 24)  # NashConv 11/12, as in OpenSpiel
    assert KUHN.exploitability(kuhn(dict.fromkeys(equilibrium(0), 0.0))) == pytest.approx(1)  # who always folds loses 1
    pennies = GameTree(MatchingPennies(3))
    third = {key: np.array([1 / 3, 2 / 3]) for key in pennies.sets}
    assert pennies.exploitability(third) == pytest.approx(0, abs=1e-12)
    assert pennies.exploitability(pennies.uniform()) == pytest.approx(0.5)  # heads earns 1 and the mean is 0.5; tails −0 and −0.5


def test_a_best_response_is_the_best_of_all_pure_policies():
    rng = np.random.default_rng(0)
    policy = {key: rng.dirichlet(np.ones(2)) for key in KUHN.sets}
    for seat in range(2):
        own = [key for key in KUHN.sets if key[0] == seat]
        payoffs = [
            KUHN.values(policy | {key: np.eye(2)[a] for key, a in zip(own, choice, strict=True)})[0][seat]
            for choice in itertools.product(range(2), repeat=len(own))
        ]
        value, best = KUHN.best_response(policy, seat)
        assert value == pytest.approx(max(payoffs))
        assert KUHN.values(policy | best)[0][seat] == pytest.approx(value)


def test_the_update_of_self_play_is_the_gradient_of_the_payoff():
    (one,) = itertools.islice(self_play(KUHN, rate=1e-4, seed=3), 1)
    rng = np.random.default_rng(3)
    logits = {key: rng.normal(0, 0.3, 2) for key in KUHN.sets}
    soft = lambda x: {key: np.exp(v) / np.exp(v).sum() for key, v in x.items()}  # noqa: E731
    for key in KUHN.sets:
        up, down = ({**logits, key: logits[key] + np.array([0, sign * 1e-5])} for sign in (1, -1))
        slope = (KUHN.values(soft(up))[0][key[0]] - KUHN.values(soft(down))[0][key[0]]) / 2e-5
        moved = np.log(one.last[key][1] / one.last[key][0]) - (logits[key][1] - logits[key][0])
        assert moved == pytest.approx(2e-4 * slope, rel=1e-3, abs=1e-9)  # the other logit moves as much the other way


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_the_last_policy_converges_only_with_a_reference_that_is_reset(seed):
    rules = {
        "plain": self_play(KUHN, rate=3, seed=seed),
        "fixed": self_play(KUHN, rate=3, kl=0.2, seed=seed),
        "reset": self_play(KUHN, rate=3, kl=0.2, reset_every=30, seed=seed),
        "fictitious": fictitious_play(KUHN),
    }
    end = {name: list(itertools.islice(rule, 600))[299::30] for name, rule in rules.items()}
    last = {name: [KUHN.exploitability(play.last) for play in plays] for name, plays in end.items()}
    average = {name: KUHN.exploitability(plays[-1].average) for name, plays in end.items()}
    assert max(last["reset"]) < 0.005
    assert min(last["plain"]) > 0.05  # it circles
    assert min(last["fixed"]) > 0.03  # it converges to another point
    assert min(last["fictitious"]) > 0.05
    assert average["plain"] < 0.03 and average["fictitious"] < 0.02  # their averages converge, slowly
