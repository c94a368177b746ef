"""What an episode reads is what the chat template renders of its conversation, also where that rewrites the past."""

from __future__ import annotations

import itertools

import pytest
import torch

from psigrad.language.data.dataset_rows import Row
from psigrad.language.data.reward_view import score
from psigrad.language.data.templates import CHATML, prompt_ids
from psigrad.language.episodes.environments import InProcess
from psigrad.language.episodes.episodes import Episodes, play
from psigrad.language.episodes.tools import ToolBoxes
from psigrad.language.models import tiny
from psigrad.language.models.language_model import prepare
from psigrad.language.models.packing import Groups
from psigrad.language.rollout.collectors import rollout_row
from psigrad.language.rollout.samplers.embedded import EmbeddedSampler
from psigrad.language.rollout.types import Completion, Sampler, SamplingParams
from psigrad.language.training.online.batching import inputs_of, to_batch
from psigrad.language.training.online.online_preferences import pick_pairs

# As Qwen3 with thinking off: an empty thought before the turn that is sampled, and none before those of the past.
FORGETS = CHATML.replace("assistant\\n' -}}{%- endif -%}", "assistant\\n<think></think>' -}}{%- endif -%}")
TRIMS = CHATML.replace("message['content']", "(message['content'] | trim)")
PROMPT = [{"role": "user", "content": "say a"}]
ROW = Row("chat", prompt=PROMPT)
# half of the vocabulary ends a turn, so that turns end
PARAMS = SamplingParams(max_tokens=6, stop_token_ids=tuple(range(140, 280)))


class Countdown:
    """Three turns; the reward of a turn is its number."""

    said = "turn {}"

    def reset(self, row):
        self.turn = 0

    def step(self, completion):
        self.turn += 1
        return self.said.format(self.turn), float(self.turn), self.turn == 3


class Wordy(Countdown):
    said = "more " * 300


class Counting(Countdown):
    """The reward of a turn is its length."""

    def step(self, completion):
        return (*super().step(completion)[:1], float(len(completion)), self.turn == 3)


class Reciting(Sampler):
    """Says one turn after the other, and keeps what it reads."""

    def __init__(self, tokenizer, *turns):
        self.turns, self.read, self.tokenizer = iter(turns), [], tokenizer

    def steps(self, requests, params, cache=None):
        for place, request in enumerate(requests):
            self.read.append(self.tokenizer.decode(request.prompt_ids))
            ids = tuple(self.tokenizer(next(self.turns), add_special_tokens=False)["input_ids"])
            yield [(place, [Completion(ids, (0.0,) * len(ids), (0.0,) * len(ids), "stop", request.seeds[0])])]


def tokenizer_of(template):
    made = tiny.tokenizer(["say a: turn 1 2 3 user assistant more tool_call name arguments"], 280)
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def model():
    tokenizer = tokenizer_of(FORGETS)
    return prepare(tiny.model("qwen3", len(tokenizer), hidden=32, layers=2, heads=2, max_length=256), tokenizer)


def played(tokenizer, sampler, factory, row=ROW, *, count=1, max_length=256, **rules):
    return play(
        Episodes(InProcess(factory), **rules),
        sampler,
        [(0, tuple(prompt_ids(tokenizer, row)), row)],
        PARAMS,
        num_generations=count,
        seed_of=lambda i, k: k,
        tokenizer=tokenizer,
        version=0,
        max_length=max_length,
    )


def histories(trajectory):
    """The conversation before each turn of the policy."""
    messages = list(trajectory.messages)
    return [PROMPT + messages[:i] for i, message in enumerate(messages) if message["role"] == "assistant"]


def test_each_turn_is_sampled_and_trained_behind_what_the_template_renders(model):
    trajectories = score(None, played(model.tokenizer, EmbeddedSampler(model), Countdown, count=6), {0: ROW})
    whole = [t for t in trajectories if t.turns == 3]
    assert whole
    for t in whole:
        assert [c.prompt_ids for c in t.contexts] == [
            tuple(prompt_ids(model.tokenizer, Row("x", prompt=said))) for said in histories(t)
        ]
        assert all(t.mask) and [place for place, _ in t.step_rewards] == [b.start - 1 for b in t.branches] + [len(t.mask) - 1]
        logps = [model.evaluate(Groups([c.prompt_ids], [[c.ids]])).logp[0] for c in t.contexts]
        assert torch.cat(logps).tolist() == pytest.approx(list(t.completion.logprobs), abs=1e-4)
        assert "turn 1" in t.text and rollout_row(t, 0, "train", PROMPT)["contexts"][1][1] == list(t.contexts[1].prompt_ids)
    batch = to_batch([whole])
    read = inputs_of(batch, [list(range(len(whole)))])
    assert sum(len(own) for own in read.completions) == 3 * len(whole) and len(read.prompts[0]) == len(whole[0].prompt_ids)


def test_control_a_template_that_keeps_the_past_gives_one_context(model):
    tokenizer = tokenizer_of(CHATML)
    (t,) = played(tokenizer, EmbeddedSampler(prepare(model.network, tokenizer)), Countdown)
    assert t.branches == () and t.turns == 3 and not all(t.mask)


@pytest.mark.parametrize(("template", "branches"), [(CHATML, 0), (TRIMS, 1)])
def test_what_the_template_changes_of_a_turn_is_read_as_it_changes_it(template, branches):
    """A server renders the answer that it sent; where the template trims it, the policy reads it trimmed."""
    tokenizer = tokenizer_of(template)
    sampler = Reciting(tokenizer, " a <|endoftext|>", "a<|endoftext|>", "a<|endoftext|>")
    (t,) = played(tokenizer, sampler, Countdown)
    assert sampler.read[1:] == [
        tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False) for said in histories(t)[1:]
    ]
    assert len(t.branches) == branches and t.policy_turns[0] == " a "


def test_an_answer_is_cut_to_the_room_that_the_rewritten_past_leaves(model):
    tokenizer, turns = model.tokenizer, ["a<|endoftext|>"] * 3
    (t,) = played(tokenizer, Reciting(tokenizer, *turns), Wordy)
    assert t.turns == 2 and [(cut.turn, cut.kind) for cut in t.cuts] == [(1, "cut"), (2, "dropped")]
    assert 256 - PARAMS.max_tokens - 8 <= len(t.contexts[1].prompt_ids) <= 256 - PARAMS.max_tokens
    (t,) = played(tokenizer, Reciting(tokenizer, *turns), Wordy, max_observation_length=10)
    bare = len(prompt_ids(tokenizer, Row("x", prompt=[*histories(t)[1][:-1], {"role": "user", "content": "…"}])))
    assert bare < len(t.contexts[1].prompt_ids) <= bare + 10 and "max_observation_length is 10" in t.cuts[0].reason


def add(a: int, b: int) -> int:
    """The sum.

    Args:
        a: one.
        b: other.
    """
    return a + b


def test_a_call_is_read_as_the_template_writes_it_and_what_is_no_call_stays_as_it_was_sampled():
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    tokenizer, row = tokenizer_of(FORGETS), Row("chat", prompt=PROMPT, columns={"tools": [schema]})
    loose = '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'
    sampler = Reciting(tokenizer, f"Hm. {loose}<|endoftext|>", "<tool_call>{a<|endoftext|>", "3<|endoftext|>")
    (t,) = played(tokenizer, sampler, ToolBoxes([add]), row, max_turns=4, max_length=4096)
    assert t.turns == 3 and [m["content"][:5] for m in t.messages[1::2]] == ["3", "error"]
    written = 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|endoftext|>'
    assert written in sampler.read[1] and sampler.read[1].endswith("<|im_start|>assistant\n<think></think>")
    assert sampler.read[2].startswith(sampler.read[1] + "<tool_call>{a<|endoftext|>"), "no server has words for its answer"
    assert len(t.branches) == 1 and "error: " in sampler.read[2]


def test_pairs_of_episodes_are_compared_whole_each_turn_in_its_context(model):
    trajectories = score(None, played(model.tokenizer, EmbeddedSampler(model), Counting, count=6), {0: ROW})
    found = pick_pairs([trajectories])
    (pair,), t = found.pairs, trajectories[found.chosen[0]]
    texts = [(*pair.prompt, *text.ids) for text in pair.chosen.texts]
    assert sorted(texts) == sorted((*c.prompt_ids, *c.ids) for c in t.contexts)
    own = itertools.chain(*(itertools.compress(text.ids, text.mask) for text in pair.chosen.texts))
    assert sorted(own) == sorted(t.policy_ids)


def test_content_in_parts_behind_a_rewritten_past_is_in_the_text():
    class Parts(Countdown):
        def step(self, completion):
            text, *rest = super().step(completion)
            return ([{"role": "user", "content": [{"type": "text", "text": text}]}], *rest)

    told = "(message['content'] if message['content'] is string else message['content'][0]['text'])"
    tokenizer = tokenizer_of(FORGETS.replace("message['content']", told))
    sampler = Reciting(tokenizer, "a<|endoftext|>", "b<|endoftext|>", "c<|endoftext|>")
    (t,) = played(tokenizer, sampler, Parts)
    assert len(t.branches) == 2 and "turn 1" in sampler.read[1]
    lines = t.text.split("\n")
    assert lines[::2] == ["a", "b", "c"] and "turn 1" in lines[1] and "turn 2" in lines[3]
