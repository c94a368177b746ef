"""Turns that keep their keys and values, against turns that begin anew."""

from __future__ import annotations

import random

import pytest
import torch
from cases import slow
from hybrid_models import network, packed

from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.samplers.dialogue import CachedDialogue
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import NextTurn, RestartedDialogue, Sampler, SamplingParams

pytestmark = pytest.mark.needs("compiler")

PARAMS = SamplingParams(max_tokens=6, stop_token_ids=tuple(range(200, 264)))
PROMPTS = [(5, 6, 7), (5, 6, 7), (5, 6, 7), (9, 8), (9, 8), tuple(range(20, 44))]


@pytest.fixture(scope="module", params=["fused", "fused with states", "packed with states"])
def model(request):
    tokenizer = tiny.tokenizer(["say a: b"], 270)
    plain = request.param == "fused"
    hf = (
        tiny.model("qwen3", len(tokenizer), hidden=32, layers=2, heads=4, max_length=512)
        if plain
        else network("qwen3_5_text", 270)
    )
    made = (packed if request.param == "packed with states" else prepare)(hf, tokenizer)
    with torch.no_grad():
        for p in made.network.parameters() if plain else ():
            if p.dim() == 2:
                p.mul_(3)
    assert (made.decoder is not None) == request.param.startswith("fused") and not made.why_padded
    return made


def observations(turns: int, longest: int, seed: int = 0) -> list[dict[int, tuple[int, ...]]]:
    """What each live episode hears before each turn; now and then one is over."""
    rng, live, found = random.Random(seed), list(range(len(PROMPTS))), []
    for turn in range(turns):
        found.append({i: tuple(rng.randrange(5, 190) for _ in range(rng.randint(1, longest))) if turn else () for i in live})
        live = [i for i in live if rng.random() < 0.9] or live
    return found


def played(dialogue, heard):
    return [dict(dialogue.turns({i: NextTurn(ids, 1000 * turn + i) for i, ids in now.items()})) for turn, now in enumerate(heard)]


@pytest.mark.parametrize("longest", [1, 4, 9])
@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_every_turn_is_that_of_a_completion_of_all_that_came_before(seed, longest, model):
    sampler, heard = EmbeddedSampler(model), observations(6, longest, seed)
    cached = sampler.dialogue(PROMPTS, PARAMS)
    assert isinstance(cached, CachedDialogue)
    found, expected = played(cached, heard), played(RestartedDialogue(sampler, PROMPTS, PARAMS), heard)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for i, completion in mine.items():
            assert (completion.ids, completion.finish_reason) == (theirs[i].ids, theirs[i].finish_reason)
            assert completion.seed == theirs[i].seed
            assert completion.logprobs == pytest.approx(theirs[i].logprobs, abs=2e-5)
            assert completion.sampling_logprobs == pytest.approx(theirs[i].sampling_logprobs, abs=2e-5)
    assert len({len(c.ids) for turn in found for c in turn.values()}) > 2, "turns of different lengths"


def test_only_the_prompts_are_prefilled_and_each_once(model):
    dialogue = EmbeddedSampler(model).dialogue(PROMPTS, PARAMS)
    played(dialogue, observations(6, 3))
    assert dialogue.prefilled == 3 + 2 + 24


def test_where_there_is_much_to_read_the_episodes_begin_anew(model):
    sampler = EmbeddedSampler(model)
    dialogue = sampler.dialogue(PROMPTS, PARAMS)
    heard = [dict.fromkeys(range(6), ()), dict.fromkeys(range(6), (50,) * 60), dict.fromkeys(range(6), (7, 8))]
    found, expected = played(dialogue, heard), played(RestartedDialogue(sampler, PROMPTS, PARAMS), heard)
    assert dialogue.prefilled > 6 * 60, "60 tokens each at once are no 60 steps"
    assert [{i: c.ids for i, c in turn.items()} for turn in found] == [{i: c.ids for i, c in turn.items()} for turn in expected]
    before = dialogue.prefilled
    dict(dialogue.turns({0: NextTurn((9,), 5)}))
    assert dialogue.prefilled == before


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_episodes_that_wait_for_an_answer_keep_what_they_have(seed, model):
    """Some take part in each round; now and then there is so much to read that those begin anew, beside the waiting ones."""
    rng, sampler = random.Random(seed), EmbeddedSampler(model)
    cached, restarted = sampler.dialogue(PROMPTS, PARAMS), RestartedDialogue(sampler, PROMPTS, PARAMS)
    begun: set[int] = set()
    for turn in range(9):
        longest = 40 if turn % 4 == 3 else 5
        some = [i for i in range(len(PROMPTS)) if (turn == 0 and seed % 2) or rng.random() < 0.5] or [0]
        heard = {
            i: NextTurn(
                tuple(rng.randrange(5, 190) for _ in range(rng.randint(1, longest))) if i in begun else (), 1000 * turn + i
            )
            for i in some
        }
        if turn % 3 == 2:  # a template rewrote what one of them had said
            one = rng.choice(some)
            heard[one] = NextTurn((5, 6, *heard[one].ids), heard[one].seed, restart=True)
        begun.update(some)
        mine, theirs = dict(cached.turns(heard)), dict(restarted.turns(heard))
        assert {i: c.ids for i, c in mine.items()} == {i: c.ids for i, c in theirs.items()}
        for i, completion in mine.items():
            assert completion.logprobs == pytest.approx(theirs[i].logprobs, abs=2e-5)
    assert cached.prefilled > sum(map(len, set(PROMPTS))), "some began anew"


def test_a_turn_is_told_as_it_ends(model):
    sampler = EmbeddedSampler(model)
    for dialogue in (sampler.dialogue(PROMPTS, PARAMS), RestartedDialogue(sampler, PROMPTS, PARAMS)):
        dict(dialogue.turns({i: NextTurn((), i) for i in range(len(PROMPTS))}))
        ended = dialogue.turns({i: NextTurn((9,), 100 + i) for i in range(len(PROMPTS))})
        lengths = [len(completion.ids) for _, completion in ended]
        assert lengths == sorted(lengths) and len(set(lengths)) > 1


def test_the_log_probs_are_the_trainers(model):
    heard = observations(4, 5)
    contexts = [list(prompt) for prompt in PROMPTS]
    for now, turn in zip(heard, played(EmbeddedSampler(model).dialogue(PROMPTS, PARAMS), heard), strict=True):
        for i, (ids, completion) in ((i, (now[i], turn[i])) for i in now):
            contexts[i] += ids
            with torch.no_grad():
                (logp,) = model.evaluate(Groups([contexts[i]], [[completion.ids]])).logp
            assert completion.logprobs == pytest.approx(logp.tolist(), abs=2e-5)
            contexts[i] += completion.ids


def test_control_without_the_token_that_ended_the_turn_the_log_probs_are_others(model, monkeypatch):
    """What was drawn last was never read: to leave it out is the fault that is easy to make."""
    heard = observations(3, 3)
    sampler = EmbeddedSampler(model)
    expected = played(RestartedDialogue(sampler, PROMPTS, PARAMS), heard)
    dialogue = sampler.dialogue(PROMPTS, PARAMS)
    original = CachedDialogue.turns

    def forgetful(self, said):
        for i in said:
            if self.cached[i]:
                del self.contexts[i][-1]
        return original(self, said)

    monkeypatch.setattr(CachedDialogue, "turns", forgetful)
    found = played(dialogue, heard)
    assert any(
        a[i].logprobs[0] != pytest.approx(b[i].logprobs[0], abs=1e-3) for a, b in zip(found, expected, strict=True) for i in a
    )


def test_other_samplers_and_crowds_begin_anew(model):
    class Other(Sampler):
        def steps(self, requests, params, cache=None):
            yield from EmbeddedSampler(model).steps(requests, params)

    assert isinstance(Other().dialogue(PROMPTS, PARAMS), RestartedDialogue)
    assert isinstance(EmbeddedSampler(model, max_batch=5).dialogue(PROMPTS, PARAMS), RestartedDialogue)
