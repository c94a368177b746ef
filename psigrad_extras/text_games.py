"""Games of two seats as text, and the exact exploitability of a language model that plays them.

A turn is one action, such as `b`. Any other text loses the game at the highest stake.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from psigrad.language.data.dataset_layouts import to_model_rows
from psigrad.language.data.sources import from_rows
from psigrad.language.data.templates import decode
from psigrad.language.episodes.episode_history import EpisodeHistory
from psigrad.language.episodes.episodes import EpisodeLimits, LiveEpisode
from psigrad.language.episodes.seats import Entries, SeatedGame
from psigrad.language.episodes.tools import CallForm
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.samplers.distribution import probabilities
from psigrad.language.rollout.samplers.embedded import without_placeholders
from psigrad.language.rollout.types import Completion, SamplingParams
from psigrad.tabular.extensive_form import CHANCE, END, Game, GameTree, Information, KuhnPoker, MatchingPennies, Position
from psigrad.tabular.mdp import FloatArray

ILLEGAL = "illegal"


class TextGame:
    """A game of `psigrad.tabular` as a text environment: each seat reads its information set and writes an action."""

    seats: ClassVar[int] = 2
    game: ClassVar[Game]
    rules: ClassVar[str]
    stake: ClassVar[float]
    """The payoff that a seat pays to the others for an illegal turn."""

    def reset(self, row: Mapping[str, Any]) -> tuple[int, str]:
        """Start a game. The row gives nature's actions, such as the deal. Return (the first seat, its observation)."""
        self.history: tuple[str, ...] = ()
        self.nature = list(row.get("nature", ()))
        position = self._advance()
        return position.seat, position.information

    def step(self, completion: str) -> tuple[int, str, tuple[float, ...], bool]:
        """Play the completion as an action. An illegal one ends the game."""
        position = self.game.position(self.history)
        action = completion.strip()
        if action not in position.actions:
            return 0, "", forfeit(self.seats, position.seat, self.stake), True
        self.history = (*self.history, action)
        position = self._advance()
        if position.seat == END:
            return 0, "", position.payoffs, True
        return position.seat, position.information, (0.0,) * self.seats, False

    def _advance(self) -> Position:
        while (position := self.game.position(self.history)).seat == CHANCE:
            self.history = (*self.history, self.nature.pop(0))
        return position

    @classmethod
    def rows(cls, count: int, seed: int) -> list[dict[str, Any]]:
        """Return rows that take all of nature's first actions in turn, so that all are equally frequent."""
        first = cls.game.position(())
        deals = list(first.actions) if first.seat == CHANCE else []
        random.Random(seed).shuffle(deals)
        nature = [[deals[n % len(deals)]] if deals else [] for n in range(count)]
        return [{"prompt": cls.rules, "nature": one} for one in nature]


class Kuhn(TextGame):
    """Kuhn poker. A turn is `p` (pass) or `b` (bet or call)."""

    game = KuhnPoker()
    rules = "Kuhn poker: p or b?"
    stake = 2.0


class Pennies(TextGame):
    """Matching pennies in which seat 0 wins 3 if both show heads. At equilibrium, it shows heads with probability 1/3."""

    game = MatchingPennies(3.0)
    rules = "Pennies: h or t?"
    stake = 3.0


GAMES: dict[str, Any] = {"kuhn": Kuhn, "pennies": Pennies}


def forfeit(seats: int, loser: int, stake: float) -> tuple[float, ...]:
    """Return the rewards if the seat `loser` pays `stake` to the others, in equal parts."""
    return tuple(-stake if seat == loser else stake / (seats - 1) for seat in range(seats))


class WithForfeits:
    """The game with forfeits: in every position there is one more action, the illegal turn, for which the seat pays `stake`."""

    def __init__(self, game: Game, stake: float) -> None:
        self.game, self.stake, self.seats = game, stake, game.seats

    def position(self, history: tuple[str, ...]) -> Position:
        """Return the position after these actions, with the illegal turn as last action. See `Game`."""
        if history and history[-1] == ILLEGAL:
            return Position(END, payoffs=forfeit(self.seats, self.game.position(history[:-1]).seat, self.stake))
        position = self.game.position(history)
        return position._replace(actions=(*position.actions, ILLEGAL)) if position.seat >= 0 else position


def exploitability(model: LanguageModel, game: type[TextGame], params: SamplingParams, prompt: Any = None) -> tuple[float, float]:
    """Return (the exact exploitability of a model in a game, its mean probability of an illegal turn per information set).

    The illegal turn counts as an action. See `GameTree.exploitability`.
    """
    tree = GameTree(WithForfeits(game.game, game.stake))
    policy = text_policy(model, game, params, prompt)
    return tree.exploitability(policy), float(np.mean([p[-1] for p in policy.values()]))


@torch.no_grad()
def text_policy(
    model: LanguageModel, game: type[TextGame], params: SamplingParams, prompt: Any = None
) -> dict[Information, FloatArray]:
    """Return information set -> probabilities of its actions, and last of the illegal turn, under a model.

    `prompt` is the prompt of the dataset's rows; None: the game's rules. The probabilities are sums over all texts that `params`
    can sample, so they are exact. If an earlier action of a seat can be written in several ways, each is weighted by its
    probability.
    """
    if not params.temperature:
        raise ValueError("temperature is 0; expected a number above 0, so that the policy samples.")
    (row,), _ = to_model_rows(
        model.tokenizer, (from_rows([{"prompt": prompt or game.rules}], "prompt-only", "game").rows, []), False
    )
    entries = Entries(model.tokenizer, EpisodeLimits(params.max_tokens, 0, 0, model.max_length, 1 << 30))
    ways: dict[Information, list[tuple[float, LiveEpisode]]] = {}
    policy: dict[Information, FloatArray] = {}
    written: dict[Information, list[list[tuple[str, tuple[int, ...], float]]]] = {}

    def read(before: Mapping[int, tuple[Information, str]], position: Position) -> list[tuple[float, LiveEpisode]]:
        """Return (probability, the seat's episode in this position) for each way to write its last action."""
        if position.seat not in before:
            history = EpisodeHistory(model.tokenizer, row, CallForm(), [], "")
            return [(1.0, _turned(LiveEpisode(0, 0, row, (), 0, history, seat=0), position, entries))]
        earlier, action = before[position.seat]
        found = []
        for (weight, episode), texts in zip(ways[earlier], written[earlier], strict=True):
            for text, ids, chance in texts:
                if text == action:
                    finish: Any = "stop" if ids[-1] in model.eos_token_ids else "length"
                    own = replace(episode, history=episode.history.copy(), ids=[*episode.ids], mask=[*episode.mask])
                    own = replace(own, policy_turns=[*own.policy_turns], messages=[*own.messages], branches=[*own.branches])
                    own = replace(own, logprobs=[*own.logprobs], sampling_logprobs=[*own.sampling_logprobs])
                    own.say(Completion(ids, (0.0,) * len(ids), (0.0,) * len(ids), finish, 0), text)
                    found.append((weight * chance, _turned(own, position, entries)))
        return found

    def walk(history: tuple[str, ...], before: Mapping[int, tuple[Information, str]]) -> None:
        position = game.game.position(history)
        key = (position.seat, position.information)
        if position.seat >= 0 and key not in policy:
            ways[key] = read(before, position)
            written[key] = [completions(model, one.context, position.actions, params) for _, one in ways[key]]
            total = sum(weight for weight, _ in ways[key])
            found = dict.fromkeys(position.actions, 0.0)
            for (weight, _), texts in zip(ways[key], written[key], strict=True):
                for text, _, chance in texts:
                    found[text] += weight * chance
            legal = list(found.values())
            chances = np.array(legal) / total if total else np.full(len(legal), 1 / len(legal))
            policy[key] = np.append(chances, max(0.0, 1 - chances.sum()))
        for action in position.actions:
            walk((*history, action), before if position.seat < 0 else {**before, position.seat: (key, action)})

    walk((), {})
    return policy


def _turned(episode: LiveEpisode, position: Position, entries: Entries) -> LiveEpisode:
    SeatedGame([episode], [], None).turn_to(0, position.information, entries)
    return episode


def completions(
    model: LanguageModel, context: Sequence[int], actions: Sequence[str], params: SamplingParams
) -> list[tuple[str, tuple[int, ...], float]]:
    """Return (action, tokens, probability) for every completion of the context whose text is an action."""
    found: list[tuple[str, tuple[int, ...], float]] = []
    begun: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    params = without_placeholders(model, params)
    stops = {*model.eos_token_ids, *params.stop_token_ids}
    while begun:
        ids, chance = begun.pop()
        logits = model.network(torch.tensor([[*context, *ids]], device=model.device)).logits[:, -1].double()
        drawn = probabilities(logits, params)[0].tolist()
        for token, share in enumerate(drawn):
            longer = (*ids, token)
            text = decode(model.tokenizer, longer).strip()
            if token in stops or len(longer) == params.max_tokens:
                if text in actions:
                    found.append((text, longer, chance * share))
            elif any(action.startswith(text) for action in actions):
                begun.append((longer, chance * share))
    return found
