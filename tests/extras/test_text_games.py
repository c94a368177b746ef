"""Games of several seats: a trajectory for each learner's seat, what a seat reads, and the gradient at a fixed opponent."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch
from in_memory import rollout_of
from PIL import Image
from tiny_rewards import Keyed, Team, Wrong

from psigrad.config import Data, Model, OnlineConfig, Optim, Run, Sampling
from psigrad.config.algorithms import resolve_online
from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.templates import decode
from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import InProcess, resolve
from psigrad.language.episodes.episodes import Episodes
from psigrad.language.episodes.players import PlayRequest
from psigrad.language.episodes.seats import Games
from psigrad.language.models.language_model import prepare
from psigrad.language.models.tiny import model as tiny_model
from psigrad.language.recipes.online_settings import check
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Completion, Prompt, Sampler, SamplingParams, State
from psigrad.language.training.online import online_rl
from psigrad.language.training.online.annotators.past_policies import PastPolicies
from psigrad.language.training.online.collect import group_scored
from psigrad.language.training.online.online_run import OnlineRun
from psigrad.optim import Optimizer
from psigrad.tabular.extensive_form import KuhnPoker, MatchingPennies
from psigrad_extras.text_games import Kuhn, Pennies, WithForfeits, text_policy
from studies.self_play import letters


class Pictured(Team):
    def reset(self, row):
        return 0, [{"type": "image", "image": Image.new("RGB", (4, 4))}]


class Scripted(Sampler):
    """Says what `answer` says of a context, with the model's log-probs."""

    def __init__(self, model, answer):
        self.model, self.answer = model, answer

    def steps(self, requests, params, cache=None):
        found = []
        for place, request in enumerate(requests):
            ids = tuple(self.model.tokenizer(self.answer(decode(self.model.tokenizer, request.prompt_ids))).input_ids)
            (logps,) = EmbeddedSampler(self.model).log_probs(request.prompt_ids, [ids], params)
            found.append((place, [Completion(ids, tuple(logps), tuple(logps), "length", seed) for seed in request.seeds]))
        yield found


def new_model(text=":JQKpb", seed=0):
    tokenizer = letters(text)
    network = tiny_model("qwen3", len(tokenizer), hidden=32, layers=1, max_length=32, seed=seed, tied=False)
    for weight in network.parameters():
        weight.data *= 5 if weight.dim() > 1 else 1
    return prepare(network, tokenizer)


MODEL = new_model()


def play(sampler, game=Kuhn, count=2, nature=("JQ",), model=MODEL, playing=None, opponents=None, params=None):
    games = Games(Episodes(playing or InProcess(game)), game.seats, opponents)
    row = Row("x", prompt=":", columns={"nature": list(nature)})
    prompt = tuple(model.tokenizer(":").input_ids)
    asked = PlayRequest(count, lambda i, k: 10 * i + k, version=0, model=model)
    return games.play(sampler, [(0, prompt, row)], params or SamplingParams(1), asked)


def test_each_seat_is_a_trajectory_of_what_it_read_and_said():
    script = {":J": "p", ":Qp": "b", ":JpJpb": "b"}
    made = play(Scripted(MODEL, script.__getitem__))
    assert [(t.seat, t.k) for t in made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first, second = made[0], made[2]
    assert decode(MODEL.tokenizer, (*first.prompt_ids, *first.completion.ids)) == ":JpJpbb"
    assert first.mask == (True, False, False, False, True) and first.turns == 2
    assert decode(MODEL.tokenizer, (*second.prompt_ids, *second.completion.ids)) == ":Qpb"
    assert (first.step_return, second.step_return) == (-2, 2)
    assert first.completion.finish_reason == second.completion.finish_reason == "stop"
    alone = EmbeddedSampler(MODEL).log_probs(first.prompt_ids, [first.completion.ids], SamplingParams(1))[0]
    assert [p for p, own in zip(alone, first.mask, strict=True) if own] == pytest.approx(
        [first.completion.logprobs[i] for i in (0, 4)]
    )


def test_an_illegal_turn_loses_the_stake_and_a_seat_that_never_acts_is_not_trained():
    made = play(Scripted(MODEL, lambda context: "K"))
    assert [t.step_return for t in made] == [-2, -2, 2, 2] and not made[2].completion.ids
    scored = rollout_of(EmbeddedSampler(MODEL), MODEL, None)
    assert scored.collector.plays is False
    assert [len(g) for g in group_scored([replace(t, reward=t.step_return) for t in made], 2, 2)] == [2]


@pytest.mark.parametrize("pooled", [False, True])
def test_a_team_of_three_shares_its_reward(pooled):
    with EnvironmentPool(Team, timeout=60) if pooled else InProcess(Team) as playing:
        made = play(Scripted(MODEL, lambda context: "b"), Team, 1, playing=playing)
        assert [t.step_return for t in made] == [1, 1, 0.5]
        assert [t.step_rewards for t in made] == [((0, 0), (2, 0), (2, 1)), ((0, 0), (2, 0), (2, 1)), ((0, -0.5), (2, 1))]
    for wrong in (Wrong, Keyed):
        with EnvironmentPool(wrong, timeout=60) if pooled else InProcess(wrong) as playing:
            made = play(Scripted(MODEL, lambda context: "b"), Team, 1, playing=playing)
            assert all("with 3 seats" in t.reason for t in made)


def test_a_game_with_images_or_undeclared_seats_is_refused():
    with pytest.raises(UserError, match="the model reads only text"):
        play(Scripted(MODEL, lambda context: "b"), Pictured)
    rules, prompt = Episodes(InProcess(lambda: Kuhn())), (0, (0,), Row("x", prompt=":", columns={"nature": ["JQ"]}))
    asked = PlayRequest(1, lambda i, k: k, version=0, model=MODEL)
    with pytest.raises(UserError, match="has no attribute `seats`"):
        rules.play(Scripted(MODEL, lambda context: "b"), [prompt], SamplingParams(1), asked)


def test_the_policy_that_is_solved_is_the_one_that_plays():
    policy = text_policy(MODEL, Kuhn, SamplingParams(1), ":")
    assert all(sum(p) == pytest.approx(1) for p in policy.values())
    turns = 0
    for deal in KuhnPoker.deals:
        for t in play(EmbeddedSampler(MODEL), count=20, nature=[deal]):
            known = decode(MODEL.tokenizer, t.prompt_ids)[1:]
            for text, logp in zip(
                t.policy_turns, [p for p, own in zip(t.completion.logprobs, t.mask, strict=True) if own], strict=True
            ):
                if text in "pb" and text:
                    assert logp == pytest.approx(math.log(policy[t.seat, known]["pb".index(text)]), abs=1e-4)
                    turns += 1
                known = known[0] + "pb"  # a second turn comes after a pass and a bet
    assert turns > 40


@torch.no_grad()
def test_several_ways_to_write_an_action_count_together():
    one, two = (text_policy(MODEL, Kuhn, SamplingParams(n, temperature=0.7), ":") for n in (1, 2))

    def after(*ids):
        logits = MODEL.network(torch.tensor([[*MODEL.tokenizer(":J").input_ids, *ids]])).logits[0, -1].double()
        return (logits / 0.7).softmax(-1)

    first = after()
    p, end, pad = (MODEL.tokenizer.convert_tokens_to_ids(token) for token in ("p", "<eos>", "<pad>"))
    assert one[0, "J"][0] == pytest.approx(float(first[p]), rel=1e-4)
    both = first[p] * (after(p)[end] + after(p)[pad]) + first[pad] * after(pad)[p]
    assert two[0, "J"][0] == pytest.approx(float(both), rel=1e-4)


class Fixed:
    """An opponent for every prompt."""

    def __init__(self, sampler):
        self.sampler = sampler

    def pick(self, seed, version):
        return self.sampler


@pytest.mark.parametrize("seat", [0, 1])
def test_the_expected_gradient_at_a_fixed_opponent_is_the_exact_one(seat, monkeypatch):
    """All games of matching pennies, and all groups of two of them, against the derivative of the expected payoff."""
    text = ":ABht"
    learner, other = new_model(text, 1), new_model(text, 2)
    tokens = ["<eos>", "<pad>", *text]
    rules = WithForfeits(MatchingPennies(3), 3)

    def chances(model, known):
        logits = model.network(torch.tensor([model.tokenizer(":" + known).input_ids])).logits[0, -1]
        return logits.softmax(-1)

    own, theirs = chances(learner, "AB"[seat]), chances(other, "AB"[1 - seat]).detach()
    payoff = torch.zeros(len(tokens), len(tokens))
    games = {}
    for a, mine in enumerate(tokens):
        for b, yours in enumerate(tokens):
            turns = [t if t in "ht" else "illegal" for t in ((mine, yours), (yours, mine))[seat]]
            payoff[a, b] = rules.position(tuple(turns[: 1 + (turns[0] != "illegal")])).payoffs[seat]
            opponent = Fixed(Scripted(other, lambda context, b=yours: b))
            made = play(Scripted(learner, lambda context, a=mine: a), Pennies, 1, (), learner, opponents=opponent)
            games[a, b] = made[seat]  # the games of each seat follow each other
    assert [t.seat for t in made] == [0, 1]
    acts = [pair for pair, t in games.items() if t.completion.ids]  # seat 1 does not act after an illegal turn
    weight = {(a, b): float(own[a] * theirs[b]) for a, b in acts}
    groups = []
    for i, j in itertools.product(acts, acts):
        share = weight[i] * weight[j] * 1e3
        group = [replace(games[x], k=k, reward=games[x].step_return * share, step_rewards=()) for k, x in enumerate((i, j))]
        groups.append(group)
    algorithm = {"preset": "rloo", "kl": None, "ratio": "none", "surrogate": "score", "aggregate": "sequence_sum"}
    config = OnlineConfig(algorithm=algorithm, run=Run(max_steps=1, progress=False), optim=Optim(learning_rate=0.1))
    method = resolve_online(algorithm)
    parts = {"prompts": [Prompt(0, (2,), Row("x", prompt=":"))], "params": SamplingParams(1), "total_steps": 1, "annotators": []}
    rollout = rollout_of(EmbeddedSampler(learner), learner, None)
    parts |= {"config": config, "algorithm": method, "model": learner, "rollout": rollout}
    run = OnlineRun(optimizer=Optimizer(learner.trainable(), config.optim), **parts)
    monkeypatch.setattr(online_rl, "step_together", lambda optimizers, losses, read: [one().backward() for one in losses] and {})
    monkeypatch.setattr(online_rl.LossSums, "end_step", lambda self, norms: None)
    online_rl.learn(run, groups, State(algorithm={}), 0.1)
    found = [p.grad.clone() * -len(groups) / 1e3 for p in learner.trainable().values()]
    reached = 1.0 if seat == 0 else float(theirs[tokens.index("h")] + theirs[tokens.index("t")])
    wanted = torch.autograd.grad(reached * (own @ payoff @ theirs), list(learner.trainable().values()))
    scale = max(float(x.abs().max()) for x in wanted)
    assert scale > 0.05
    assert max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) < 1e-4 * scale


def test_past_selves_are_the_last_snapshots_and_the_share_of_prompts_that_they_play():
    past = PastPolicies([new_model(seed=n) for n in range(3)], every=5, share=0.5)
    at = lambda version: [past.pick(seed, version) for seed in range(400)]  # noqa: E731
    for version, count in ((4, 1), (9, 2), (40, 3)):
        assert {id(one.model) for one in at(version) if one} == {*map(id, past.models[:count])}
    assert 150 < sum(one is None for one in at(9)) < 250
    run = type("Run", (), {"model": new_model(seed=9)})
    for number in range(1, 6):
        past.after_step(run, number)
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a.network.parameters(), b.network.parameters(), strict=True))  # noqa: E731
    assert same(past.models[1], run.model) and not same(past.models[0], run.model)


OPPONENTS = OnlineConfig(model=Model("m"), data=Data("d"), environment="kuhn", past_opponents=0.5)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (replace(OPPONENTS, environment="guess"), "an environment with one seat"),
        (replace(OPPONENTS, model=Model("m", lora_rank=4)), "LoRA"),
        (replace(OPPONENTS, sampling=Sampling(sampler="vllm")), "use embedded"),
        (replace(OPPONENTS, past_opponents=0.0, algorithm="online_dpo"), "the players of a game read different"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, why):
    with pytest.raises(UserError, match=why):
        check(config, resolve_online(config.algorithm))


def test_a_missing_textarena_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.delitem(sys.modules, "psigrad_extras.connect.textarena_environment", raising=False)
    with pytest.raises(UserError, match="pip install 'textarena"):
        resolve("textarena:KuhnPoker-v0")
