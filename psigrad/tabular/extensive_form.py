"""Games of several seats (players) with hidden information: exact best responses, exploitability and self-play, by enumeration.

A policy maps an information set, the pair (seat, its information), to the probabilities of the actions there. Seats remember all
that they knew and did (perfect recall).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from psigrad.tabular.mdp import FloatArray

CHANCE, END = -1, -2
Information = tuple[int, str]
GamePolicy = Mapping[Information, FloatArray]


class Position(NamedTuple):
    """A position of a game. `seat` acts next and knows only `information`. Nature acts if it is `CHANCE`, nobody if `END`."""

    seat: int
    information: str = ""
    actions: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    """The probabilities of nature's actions."""
    payoffs: tuple[float, ...] = ()
    """The payoff of each seat, if the game is over."""


class Game(Protocol):
    """A finite game with perfect recall."""

    seats: int

    def position(self, history: tuple[str, ...]) -> Position:
        """Return the position after these actions of all seats and nature, in order."""


class MatchingPennies:
    """A game in which both seats choose heads or tails at once. Seat 0 wins 1 from seat 1 if they match, and loses 1 if not.

    If both choose heads, seat 0 wins `heads` instead. At equilibrium, each seat chooses heads with probability 2/(3 + heads).
    """

    seats = 2

    def __init__(self, heads: float = 1.0) -> None:
        self.heads = heads

    def position(self, history: tuple[str, ...]) -> Position:
        """Return the position after the seats' choices, `h` or `t`."""
        if len(history) < 2:
            return Position(len(history), "AB"[len(history)], ("h", "t"))
        won = (self.heads if history[0] == "h" else 1.0) if history[0] == history[1] else -1.0
        return Position(END, payoffs=(won, -won))


class KuhnPoker:
    """Kuhn poker. Two seats pay 1 each and get one of the cards J, Q, K each.

    They may bet 1 more (`b`) or pass (`p`); after a bet, `b` calls and `p` folds. The value for seat 0 is −1/18. At equilibrium,
    it bets J with some probability α ≤ 1/3, and K with 3α.

    Source: Kuhn 1950, A simplified two-person poker.
    """

    seats = 2
    deals = ("JQ", "JK", "QJ", "QK", "KJ", "KQ")

    def position(self, history: tuple[str, ...]) -> Position:
        """Return the position after the deal, such as `JQ`, and the moves `p` and `b`."""
        if not history:
            return Position(CHANCE, actions=self.deals, probabilities=(1 / 6,) * 6)
        cards, moves = history[0], "".join(history[1:])
        if moves in ("", "p", "b", "pb"):
            seat = len(moves) % 2
            return Position(seat, cards[seat] + moves, ("p", "b"))
        stake = 2.0 if moves.endswith("bb") else 1.0
        won = {"bp": True, "pbp": False}.get(moves, "JQK".index(cards[0]) > "JQK".index(cards[1]))
        return Position(END, payoffs=(stake, -stake) if won else (-stake, stake))


class _Node(NamedTuple):
    position: Position
    children: tuple[_Node, ...]


class GameTree:
    """The tree of a game, with exact values of policies for all its seats.

    `sets` maps each information set to its actions. The methods take time proportional to the number of positions.
    """

    def __init__(self, game: Game) -> None:
        self.seats = game.seats
        self.sets: dict[Information, tuple[str, ...]] = {}
        self._root = self._grow(game, ())

    def _grow(self, game: Game, history: tuple[str, ...]) -> _Node:
        position = game.position(history)
        if position.seat >= 0:
            known = self.sets.setdefault((position.seat, position.information), position.actions)
            if known != position.actions:
                raise ValueError(
                    f"In the information set {position.information!r}, seat {position.seat} has the actions {known} at one "
                    f"position and {position.actions} at another; expected the same actions."
                )
        return _Node(position, tuple(self._grow(game, (*history, action)) for action in position.actions))

    def uniform(self) -> dict[Information, FloatArray]:
        """Return the policy of all seats that takes every action with equal probability."""
        return {key: np.full(len(actions), 1 / len(actions)) for key, actions in self.sets.items()}

    def values(self, policy: GamePolicy) -> tuple[FloatArray, dict[Information, Counterfactual]]:
        """Return the expected payoff of each seat [seats], and the values of actions in each information set."""
        found = {key: Counterfactual(np.zeros(len(actions)), 0.0, 0.0) for key, actions in self.sets.items()}

        def walk(node: _Node, reach: FloatArray) -> FloatArray:
            seat, position = node.position.seat, node.position
            if seat == END:
                return np.array(position.payoffs)
            key = (seat, position.information)
            chances = position.probabilities if seat == CHANCE else policy[key]
            below = []
            for chance, child in zip(chances, node.children, strict=True):
                further = reach.copy()
                further[seat] *= chance  # the last entry of `reach` belongs to nature (CHANCE is -1)
                below.append(walk(child, further))
            if seat != CHANCE:
                others, before = float(np.delete(reach, seat).prod()), found[key]
                values = before.values + others * np.array([one[seat] for one in below])
                found[key] = Counterfactual(values, float(reach[seat]), before.others + others)
            return np.asarray(sum(chance * one for chance, one in zip(chances, below, strict=True)))

        return walk(self._root, np.ones(self.seats + 1)), found

    def best_response(self, policy: GamePolicy, seat: int) -> tuple[float, dict[Information, FloatArray]]:
        """Return (a seat's greatest expected payoff against `policy` of the others, a policy of the seat with that payoff)."""
        members: dict[Information, list[tuple[float, _Node]]] = {}
        best: dict[Information, FloatArray] = {}

        def collect(node: _Node, reach: float) -> None:
            position = node.position
            key = (position.seat, position.information)
            chances = position.probabilities if position.seat == CHANCE else policy.get(key, ())
            if position.seat == seat:
                members.setdefault(key, []).append((reach, node))
                chances = (1.0,) * len(node.children)
            for chance, child in zip(chances, node.children, strict=True):
                collect(child, reach * chance)

        def value(node: _Node) -> float:
            position = node.position
            key = (position.seat, position.information)
            if position.seat == END:
                return position.payoffs[seat]
            if position.seat == seat and key not in best:
                totals = [sum(reach * value(one.children[a]) for reach, one in members[key]) for a in range(len(node.children))]
                best[key] = np.eye(len(totals))[int(np.argmax(totals))]
            chances = best[key] if position.seat == seat else position.probabilities or policy[key]
            return float(sum(chance * value(child) for chance, child in zip(chances, node.children, strict=True) if chance))

        collect(self._root, 1.0)
        return value(self._root), best

    def exploitability(self, policy: GamePolicy) -> float:
        """Return how much a seat gains on average by switching to a best response: 0 at an equilibrium.

        Formula: 1/n · Σ_i (max_{π'_i} u_i(π'_i, π_−i) − u_i(π)), which is NashConv / n

        Source: Lanctot et al. 2017, arXiv:1711.00832.
        """
        payoffs, _ = self.values(policy)
        return float(np.mean([self.best_response(policy, seat)[0] - payoffs[seat] for seat in range(self.seats)]))


class Counterfactual(NamedTuple):
    """The values of actions in an information set, and the probabilities of reaching it.

    `values[a]` is Σ_h (probability that the others and nature play to h) · (the seat's expected payoff after a), summed over the
    positions h of the set. `own` is the probability that the seat plays to the set. `others` is Σ_h of the probabilities that the
    others and nature play to h.
    """

    values: FloatArray
    own: float
    others: float


class Play(NamedTuple):
    """The policies of self-play after an update: the last one, and the average of all so far.

    In each information set, a policy's weight in the average is the probability that its own seat plays to the set.
    """

    last: dict[Information, FloatArray]
    average: dict[Information, FloatArray]


def self_play(
    tree: GameTree, *, rate: float, kl: float = 0.0, reset_every: int = 0, seed: int = 0, scale: float = 0.3
) -> Iterator[Play]:
    """Yield the `Play` after each update of self-play, in which all seats follow the exact policy gradient at once.

    The initial logits are normal with standard deviation `scale`.

    Formula: θ ← θ + rate · ∇_θ (u_i(π_θ) − kl · Σ_I P(I) · KL(π_θ(I)‖ρ(I))), without the gradient of the reach P(I)

    The reference ρ is the first policy. With `reset_every`, it is replaced by the current policy after every so many updates.
    Then the last policy converges in zero-sum games, in which self-play without KL (kl = 0) circles around the equilibrium.

    Source: Sokota et al. 2023, A unified approach to RL, QREs and two-player zero-sum games, arXiv:2206.05825 (magnet).
    """
    rng = np.random.default_rng(seed)
    logits = {key: rng.normal(0, scale, len(actions)) for key, actions in tree.sets.items()}
    reference, last = logits, {key: _softmax(x) for key, x in logits.items()}
    sums = {key: np.zeros(len(x)) for key, x in logits.items()}
    count = 0
    while True:
        moved: dict[Information, FloatArray] = {}
        for key, (values, own, others) in tree.values(last)[1].items():
            p, apart = last[key], logits[key] - reference[key]  # log(p/ρ) up to a constant
            sums[key] = sums[key] + own * p
            gain = own * (values - p @ values) - kl * own * others * (apart - p @ apart)
            moved[key] = logits[key] + rate * p * gain
        logits, count = moved, count + 1
        last = {key: _softmax(x) for key, x in logits.items()}
        if reset_every and count % reset_every == 0:
            reference = logits
        yield Play(last, {key: x / x.sum() if x.sum() else last[key] for key, x in sums.items()})


def fictitious_play(tree: GameTree) -> Iterator[Play]:
    """Yield the `Play` after each round of fictitious play, in which each seat best responds to the others' average policy.

    The average policy converges to an equilibrium in zero-sum games.

    Source: Brown 1951; Heinrich et al. 2015, Fictitious self-play in extensive-form games.
    """
    average = tree.uniform()
    reach = {key: one.own for key, one in tree.values(average)[1].items()}
    sums = {key: reach[key] * p for key, p in average.items()}
    while True:
        last = tree.uniform() | {key: p for seat in range(tree.seats) for key, p in tree.best_response(average, seat)[1].items()}
        for key, one in tree.values(last)[1].items():
            sums[key] = sums[key] + one.own * last[key]
        average = {key: x / x.sum() for key, x in sums.items()}
        yield Play(last, average)


def _softmax(x: FloatArray) -> FloatArray:
    weights = np.exp(x - x.max())
    return np.asarray(weights / weights.sum())
