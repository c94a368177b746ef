"""What an environment says is cut before it breaks the context, before all of it is tokenised, and the rollouts say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psigrad.config import EvalConfig, OnlineConfig, Sampling
from psigrad.language.data import templates
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import score
from psigrad.language.data.templates import CHATML, decode, prompt_ids
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import CHARACTERS, Episodes, cut, fit, play
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.language.recipes.scorers import reserved_tokens
from psigrad.language.rollout.collectors import rollout_row
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Collected, Cut, SamplingParams
from psigrad.language.training.online.figures import collection_metrics

CHAT, PLAIN = Row("chat", prompt=[{"role": "user", "content": "say a"}]), Row("plain", prompt="say a:")
# every token of a turn ends it, so each has one
PARAMS = SamplingParams(max_tokens=6, stop_token_ids=tuple(range(280)))


class Wordy:
    """Says `words` to each of four turns, and `opening` first."""

    opening, words = None, "more " * 3000

    def reset(self, row):
        self.turn = 0
        return self.opening

    def step(self, text):
        self.turn += 1
        return self.words, 1.0, self.turn == 4


def wordy(words, opening=None):
    return type("Wordy", (Wordy,), {"words": words, "opening": opening})


@pytest.fixture(scope="module")
def models():
    tokenizer = tiny.tokenizer(["say a: turn 1 2 3 user assistant more"], 280)
    tokenizer.chat_template = CHATML
    made = {name: tiny.model(name, len(tokenizer), hidden=32, layers=2, heads=2, max_length=128) for name in ("qwen3", "gpt2")}
    return {name: prepare(model, tokenizer) for name, model in made.items()}


def played(model, factory, row=CHAT, params=PARAMS, **rules):
    return play(
        Episodes(InProcess(factory), **rules),
        EmbeddedSampler(model),
        [(0, tuple(prompt_ids(model.tokenizer, row)), row)],
        params,
        num_generations=2,
        seed_of=lambda i, k: k,
        tokenizer=model.tokenizer,
        version=0,
        max_length=model.max_length,
    )


@pytest.mark.parametrize("row", [PLAIN, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize("name", ["qwen3", "gpt2"], ids=["rope", "learned positions"])
def test_an_answer_of_3000_tokens_is_cut_to_the_context_and_the_policy_goes_on(name, row, models):
    model, left = models[name], "left besides 6 reserved for the next turn"
    for t in played(model, Wordy, row):
        assert len(t.prompt_ids) + len(t.completion.ids) <= 128 - PARAMS.max_tokens + 1
        assert t.turns == 2 and t.completion.finish_reason == "length", "there is room for one turn behind the first answer"
        assert [(c.turn, c.kind) for c in t.cuts] == [(1, "cut"), (2, "dropped")]
        assert t.cuts[0].reason == f"15000 characters: of the context's 128 tokens, {121 - len(t.prompt_ids)} are {left}"
        logp = model.evaluate(Groups([t.prompt_ids], [[t.completion.ids]])).logp
        assert logp[0, -1].item() == pytest.approx(t.completion.logprobs[-1], abs=1e-4), "the last turn is the trainer's too"
    shown = decode(model.tokenizer, t.completion.ids)
    assert "more more" in shown and "…" in shown


def test_the_template_around_a_cut_answer_stays_whole(models):
    (t, _) = played(models["qwen3"], Wordy)
    ids = list(t.completion.ids)
    text = models["qwen3"].tokenizer.decode(ids[t.mask.index(False) : len(ids) - 1])
    assert text.startswith("<|endoftext|>\n<|im_start|>user\nmore"), "the end of the turn, which a token of another kind stopped"
    assert text.endswith("…<|endoftext|>\n<|im_start|>assistant\n")


def test_a_limit_of_answers_is_a_setting(models):
    found = played(models["qwen3"], wordy("1 2 3 " * 50), PLAIN, max_observation_length=10)
    for t in found:
        assert t.turns == 4 and t.mask.count(False) <= 30
        assert t.cuts == tuple(Cut(turn, "cut", "300 characters: max_observation_length is 10") for turn in (1, 2, 3))
    assert not played(models["qwen3"], wordy("1 2 3"), PLAIN, max_observation_length=10)[0].cuts


def test_what_is_not_cut_is_as_it_was(models):
    (t, _) = played(models["qwen3"], wordy("1 2 3"))
    assert t.turns == 4 and t.completion.finish_reason == "stop" and not t.cuts
    assert [m["content"] for m in t.messages if m["role"] == "user"] == ["1 2 3"] * 3


def test_three_megabytes_are_never_tokenised(models, monkeypatch):
    lengths, whole = [], templates._encode
    monkeypatch.setattr(
        templates, "_encode", lambda tokenizer, text, **more: lengths.append(len(text)) or whole(tokenizer, text, **more)
    )
    (t, _) = played(models["qwen3"], wordy("x" * 3_000_000))
    assert t.turns == 2 and max(lengths) <= CHARACTERS * 128 + 200 and len(lengths) < 60


def test_an_opening_is_cut_too_or_its_episodes_have_no_reward(models):
    for t in played(models["qwen3"], wordy("1", opening="loud " * 900)):
        assert len(t.prompt_ids) <= 122 and t.cuts[0].turn == 0 and t.cuts[0].kind == "cut"
    long = replace(PLAIN, prompt="say a " * 22)
    model = models["qwen3"]
    assert len(prompt_ids(model.tokenizer, long)) == 66, "of 68: less than a letter and the mark have"
    (t, _) = score(None, played(model, wordy("1", opening="loud " * 9), long, SamplingParams(max_tokens=60)), {0: long})
    assert t.status == "unscored" and t.reason.startswith("the text that reset() returned is too long (45 characters")


def test_turns_have_a_limit_of_their_own_and_all_of_them_the_completions(models):
    """20 tokens in turns of at most 6: a fourth turn could have too many, so there are three."""
    never = SamplingParams(max_tokens=20, stop_token_ids=tuple(range(140, 280)))
    for t in played(models["qwen3"], wordy("1"), params=never, max_turn_length=6):
        runs = "".join("x" if own else " " for own in t.mask).split()
        assert max(map(len, runs)) <= 6 and t.num_chosen <= 20
    ends = played(models["qwen3"], wordy("1"), max_turn_length=2)
    assert all(t.turns == 4 for t in ends), "turns of one token: 4 of 6"
    ends = played(models["qwen3"], wordy("1"), max_turn_length=4)
    assert all(t.turns == 3 and t.completion.finish_reason == "length" for t in ends), "3 + 4 is more than 6"


def one_each(said) -> list[str]:
    """A token for each character, and four around."""
    texts = [said] if isinstance(said, str) else [message["content"] for message in said]
    return list("".join(texts)) + ["around"] * 4


def test_fit_by_hand():
    assert fit(one_each, "abcdefghij", 14) == (one_each("abcdefghij"), "abcdefghij")
    assert fit(one_each, "abcdefghij", 9) == (one_each("abcd…"), "abcd…")
    assert fit(one_each, "abcdefghij", 5) is None, "nothing of it is no answer"
    assert fit(one_each, "", 4) == (one_each(""), "") and fit(one_each, "", 3) is None
    assert fit(one_each, "ab", 0) is None and fit(one_each, "ab", -5) is None


def test_every_tool_call_keeps_its_answer():
    said = [{"role": "tool", "name": n, "content": n * 4} for n in "abc"] + [{"role": "tool", "content": None}]
    shown = cut(said, 6)
    assert [m["content"] for m in shown] == ["aaaa", "bb…", "…", None] and [m.get("name") for m in shown] == ["a", "b", "c", None]
    found = fit(one_each, said[:3], 12)
    assert found is not None and len(found[0]) <= 12 and len(found[1]) == 3


def test_the_rollouts_and_the_metrics_say_what_was_cut(models):
    found = score(None, played(models["qwen3"], Wordy), {0: CHAT})
    row = rollout_row(found[0], 1, "train", "say a")
    assert row["cuts"][0] == {"turn": 1, "kind": "cut", "reason": found[0].cuts[0].reason}
    figures = collection_metrics(found, 2)
    assert figures["observations/cut"] == 2 and figures["observations/dropped"] == 2
    held = Collected(found, [found], 1, {})
    assert Collected.from_json(held.to_json()).trajectories == found
    quiet = score(None, played(models["qwen3"], wordy("1")), {0: CHAT})
    assert "cuts" not in rollout_row(quiet[0], 1, "train", "say a") and "observations/cut" not in collection_metrics(quiet, 2)


def test_a_prompt_must_leave_room_for_a_turn():
    config = OnlineConfig(sampling=Sampling(max_completion_length=64))
    assert reserved_tokens(config) == 64
    assert reserved_tokens(replace(config, environment="guess")) == 64
    assert reserved_tokens(replace(config, environment="guess", max_turn_length=8)) == 8
    assert reserved_tokens(EvalConfig(sampling=Sampling(max_completion_length=64), max_turn_length=8)) == 64
