"""Episodes of several turns: whose token is whose, what is never re-encoded, rewards in their places, tools."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from inline_scorer import InlineScorer

from psigrad.errors import UserError
from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import score
from psigrad.language.data.templates import CHATML, decode, prompt_ids
from psigrad.language.episodes.environments import InProcess, Playing, resolve
from psigrad.language.episodes.episodes import Episodes, play
from psigrad.language.episodes.tools import ToolBox, schemas
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rewards import resolve as reward
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import SamplingParams
from psigrad.language.training.online.batching import to_batch


def judged(trajectories, row):
    """With the rewards of their environment alone."""
    return score(None, trajectories, {t.row: row for t in trajectories})


class Countdown:
    """Three turns; the reward of a turn is its number."""

    def reset(self, row):
        self.turn = 0

    def step(self, completion):
        self.turn += 1
        return f"turn {self.turn}", float(self.turn), self.turn == 3


class Shouting(Countdown):
    def reset(self, row):
        super().reset(row)
        return " LOUD:"


class Broken(Countdown):
    def step(self, completion):
        if self.turn == 1:
            raise RuntimeError("the game board fell over")
        return super().step(completion)


class Fickle(Countdown):
    def reset(self, row):
        return str(random.random())


class Endless:
    def reset(self, row):
        pass

    def step(self, completion):
        return "more", 0.0, False


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny.tokenizer(["say a: turn 1 2 3 user assistant more"], 280)
    made.chat_template = CHATML
    return made


@pytest.fixture(scope="module")
def model(tokenizer):
    return prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=2, heads=2, max_length=128), tokenizer)


CHAT = Row("chat", prompt=[{"role": "user", "content": "say a"}])
PLAIN = Row("plain", prompt="say a:")
# half of the vocabulary ends a turn, so that turns end
PARAMS = SamplingParams(max_tokens=6, stop_token_ids=tuple(range(140, 280)))


def played(model, factory, row, *, count=6, turns=8, params=PARAMS, seed=0, max_length=128):
    return play(
        Episodes(factory if isinstance(factory, Playing) else InProcess(factory), turns),
        EmbeddedSampler(model),
        [(0, tuple(prompt_ids(model.tokenizer, row)), row)],
        params,
        num_generations=count,
        seed_of=lambda i, k: 100 * seed + k,
        tokenizer=model.tokenizer,
        version=0,
        max_length=max_length,
    )


@pytest.mark.parametrize("row", [PLAIN, CHAT], ids=["plain", "chat"])
def test_every_token_has_its_author_and_the_sampler_saw_what_the_trainer_sees(row, model):
    trajectories = played(model, Countdown, row)
    finished = [t for t in trajectories if t.completion.finish_reason == "stop"]
    assert finished and all(t.turns == 3 for t in finished)
    for t in trajectories:
        assert len(t.mask) == len(t.completion.ids) == len(t.completion.logprobs)
        assert all(lp == 0.0 for lp, own in zip(t.completion.logprobs, t.mask, strict=True) if not own)
    logp = model.evaluate(Groups([trajectories[0].prompt_ids], [[t.completion.ids for t in trajectories]])).logp
    for n, t in enumerate(trajectories):
        own = torch.tensor(t.mask)
        gap = (logp[n, : len(own)] - torch.tensor(t.completion.logprobs))[own].abs().max()
        assert gap < 1e-4
        assert (logp[n, : len(own)][~own] != 0).any() or bool(own.all()), "negative control: the others' tokens have log-probs"


def test_the_environments_turn_is_what_the_template_writes_between_turns(model):
    t = next(t for t in played(model, Countdown, CHAT) if t.completion.finish_reason == "stop")
    between = [i for i, own in enumerate(t.mask) if not own]
    text = model.tokenizer.decode(
        [
            t.completion.ids[i]
            for i in between[: between.index(next(i for i in range(between[0], len(t.mask)) if t.mask[i]) - 1) + 1]
        ]
    )
    assert text.endswith("<|im_start|>assistant\n") and "<|im_start|>user\nturn 1" in text


def test_rewards_stand_on_the_last_token_of_their_turn_and_the_mask_is_the_policys(model):
    trajectories = judged(played(model, Countdown, PLAIN), PLAIN)
    batch = to_batch([trajectories])
    for n, t in enumerate(trajectories):
        assert t.reward == t.step_return == sum(range(1, t.turns + 1))
        ends = [i for i in range(len(t.mask)) if t.mask[i] and (i + 1 == len(t.mask) or not t.mask[i + 1])]
        assert [place for place, _ in t.step_rewards] == ends[: len(t.step_rewards)]
        assert batch.mask[n, : len(t.mask)].tolist() == list(t.mask)
        assert batch.reward[n, ends].tolist() == [r for _, r in t.step_rewards]
        assert float(batch.sequence_reward[n]) == pytest.approx(t.reward)


def test_reward_functions_see_the_conversation_and_are_added_to_the_environment(model):
    shown = []

    def says(completions, **columns):
        shown.extend(completions)
        return [10.0] * len(completions)

    raw = played(model, Countdown, CHAT)
    trajectories = score(InlineScorer([reward(says)]), raw, {t.row: CHAT for t in raw})
    assert [t.reward for t in trajectories] == [10 + t.step_return for t in trajectories]
    assert [m["role"] for m in shown[0]][:2] == ["assistant", "user"] and shown[0][1]["content"] == "turn 1"
    batch = to_batch([trajectories])
    assert float(batch.sequence_reward[0]) == pytest.approx(trajectories[0].reward)


def test_an_episode_does_not_depend_on_its_company(model):
    together = played(model, Countdown, PLAIN, count=6)
    alone = [played(model, Countdown, PLAIN, count=k + 1)[k] for k in range(6)]
    assert [t.completion.ids for t in together] == [t.completion.ids for t in alone]
    other = played(model, Countdown, PLAIN, seed=1)
    assert [t.completion.ids for t in together] != [t.completion.ids for t in other], "negative control: seeds matter"


def test_turns_are_drawn_with_seeds_of_their_own(model):
    t = next(t for t in played(model, Endless, PLAIN, count=12, turns=4) if t.turns >= 3)
    turns, current = [], []
    for token, own in zip(t.completion.ids, t.mask, strict=True):
        if own:
            current.append(token)
        elif current:
            turns.append(current)
            current = []
    assert len({tuple(turn) for turn in turns}) > 1


def test_an_opening_is_read_behind_the_prompt(model):
    t = played(model, Shouting, PLAIN)[0]
    assert decode(model.tokenizer, t.prompt_ids) == "say a: LOUD:"
    t = played(model, Shouting, CHAT)[0]
    assert "LOUD:" in decode(model.tokenizer, t.prompt_ids)


def test_an_environment_that_breaks_leaves_its_episode_unscored(model):
    trajectories = judged(played(model, Broken, PLAIN), PLAIN)
    broken = [t for t in trajectories if t.turns > 1]
    assert broken and all(t.status == "unscored" and "fell over" in t.reason and t.reward is None for t in broken)


def test_an_environment_that_says_something_else_to_each_of_a_group_is_refused(model):
    with pytest.raises(UserError, match="depend only on the row"):
        played(model, Fickle, PLAIN)


@pytest.mark.parametrize(("turns", "room"), [(2, 128), (50, 40)], ids=["turns", "length"])
def test_an_episode_without_end_is_cut_and_says_so(turns, room, model):
    for t in played(model, Endless, PLAIN, turns=turns, max_length=room):
        assert t.completion.finish_reason == "length"
        assert t.turns <= turns and len(t.prompt_ids) + len(t.completion.ids) <= room


def test_a_turn_that_the_limit_cut_ends_the_episode(model):
    cut = played(model, Endless, PLAIN, params=SamplingParams(max_tokens=1), turns=5)
    assert all(t.turns == 1 or t.completion.ids[0] in model.eos_token_ids for t in cut)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def test_tools_are_called_by_type_and_their_mistakes_are_answers():
    box = ToolBox([add])
    step = box.step('let me see <tool_call>{"name": "add", "arguments": {"a": 2, "b": "3"}}</tool_call>')
    assert step.observation == [{"role": "tool", "name": "add", "content": "5"}] and not step.done
    assert "valid integer" in box.step('{"name": "add", "arguments": {"a": "x", "b": 1}}').observation[0]["content"]
    assert "no tool 'sub'" in box.step('{"name": "sub", "arguments": {}}').observation[0]["content"]
    assert "must be an object" in box.step('{"name": "add", "arguments": [1]}').observation[0]["content"]
    assert box.step("the answer is 5")[:3] == ("", 0.0, True)
    two = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>' * 2
    assert len(box.step(two).observation) == 2
    for answer in ("{not json}", "[1]", '{"name": "Rome", "people": 3}'):
        assert box.step(answer).done


def test_tools_without_types_are_refused():
    assert schemas([add])[0]["function"]["parameters"]["required"] == ["a", "b"]
    with pytest.raises(UserError, match="type hints"):
        schemas([lambda x: x])


def test_environments_are_named_or_refused():
    assert resolve(Countdown) is Countdown
    with pytest.raises(UserError, match="cannot be imported"):
        resolve("no_such_module:Game")
    with pytest.raises(UserError, match="no reset"):
        resolve("json:JSONDecoder")


def test_a_single_turn_is_what_plain_sampling_gives(model):
    """With an environment that ends at once, the episode is the completion."""

    class Once(Countdown):
        def step(self, completion):
            return "", 1.0, True

    episodes = played(model, Once, PLAIN)
    from psigrad.language.rollout.types import Request

    request = Request(tuple(prompt_ids(model.tokenizer, PLAIN)), tuple(range(6)))
    (plain,) = EmbeddedSampler(model).sample([request], PARAMS)
    assert [t.completion.ids for t in episodes] == [c.ids for c in plain]
    assert [t.completion.logprobs for t in episodes] == [c.logprobs for c in plain]
    assert all(all(replace(t).mask) for t in episodes)
