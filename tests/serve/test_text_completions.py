"""/v1/completions: text or tokens, one prompt or several."""

from __future__ import annotations

import time
from types import SimpleNamespace

import openai
import pytest
import torch

from psigrad.kernels.kernels import kernels
from psigrad.language.rollout.types import DrawnToken
from psigrad_serve.text_completions import TextCompletions
from psigrad_serve.writer import token_bytes


def test_several_prompts_of_text_or_tokens_give_their_choices_in_order(client, served):
    ids = [served.model.tokenizer(text)["input_ids"] for text in ("the quick", "a lazy dog")]
    ask = {"model": "tiny", "max_tokens": 9, "n": 2, "seed": 4, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    by_text, by_ids = (client.completions.create(prompt=prompt, **ask) for prompt in (["the quick", "a lazy dog"], ids))
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices] and len({c.text for c in by_ids.choices}) == 4
    assert [c.index for c in by_ids.choices] == [0, 1, 2, 3]
    for place, prompt in ((0, ids[0]), (2, ids[1])):
        want, choice = served.sampled(prompt, 4, max_tokens=9), by_ids.choices[place]
        # without the kernels last bits depend on what is decoded beside it
        logprobs = pytest.approx(want.logprobs, abs=1e-5) if isinstance(kernels(), str) else want.logprobs
        assert tuple(choice.token_ids) == want.ids and tuple(choice.logprobs.token_logprobs) == logprobs
        assert choice.prompt_token_ids == prompt and len(choice.logprobs.top_logprobs[0]) == 2
    assert by_ids.usage.completion_tokens == sum(len(c.token_ids) for c in by_ids.choices)
    assert by_ids.usage.prompt_tokens == sum(map(len, ids))


def test_a_stream_echoes_and_says_the_same(client):
    ask = {"model": "tiny", "prompt": ["the quick", "brown"], "max_tokens": 12, "seed": 1, "echo": True}
    whole, texts = client.completions.create(**ask), ["", ""]
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and texts[1].startswith("brown")


def test_an_echo_with_log_probs_tells_those_of_the_prompt(client, served):
    """What a teacher is asked: every token of the prompt, and the most probable ones in its place."""
    ids = served.model.tokenizer("the quick brown")["input_ids"]
    ask = {"model": "tiny", "prompt": ids, "max_tokens": 1, "seed": 3, "echo": True, "logprobs": 4}
    named = client.completions.create(**ask, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
    assert [int(name.removeprefix("token_id:")) for name in named.tokens[: len(ids)]] == ids and len(named.tokens) == len(ids) + 1
    assert named.token_logprobs[0] is None and named.top_logprobs[0] is None  # nothing stands before it
    logits = served.model.network(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    for place in range(1, len(ids)):
        assert named.token_logprobs[place] == pytest.approx(float(logits[place - 1, ids[place]]), abs=1e-4)
        best = {int(name.removeprefix("token_id:")): value for name, value in named.top_logprobs[place].items()}
        expected = logits[place - 1].topk(4)
        assert best == pytest.approx(dict(zip(expected.indices.tolist(), expected.values.tolist(), strict=True)), abs=1e-4)
    plain = client.completions.create(**ask).choices[0].logprobs
    assert "".join(plain.tokens[: len(ids)]) == "the quick brown" and plain.text_offset[0] == 0
    scored = client.completions.create(**{**ask, "max_tokens": 0})
    assert (scored.choices[0].text, scored.choices[0].finish_reason) == ("the quick brown", "length")
    assert scored.choices[0].logprobs.token_logprobs == plain.token_logprobs[: len(ids)] and scored.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [({"prompt": []}, "prompt", "at least 1 item"), ({"prompt": [999]}, "prompt", "has the token id 999"),
     ({"prompt": "the", "max_tokens": 0}, "max_tokens", "no text without echo"),
     ({"prompt": ""}, "prompt", "no tokens"), ({"prompt": "x", "suffix": "y"}, "suffix", "does not support"),
     ({"prompt": "x", "logprobs": 99}, "logprobs", "less than or equal to 20")],
)  # fmt: skip
def test_bad_prompts_are_refused(client, bad, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "max_tokens": 2, **bad})
    assert words in caught.value.message and caught.value.param.startswith(param)


def test_a_token_stands_where_its_character_does_and_bytes_join(client, served):
    text = "a 😀 b 日本 c d"
    ids = served.model.tokenizer(text)["input_ids"]
    ask = {"model": "tiny", "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 0}
    told = client.completions.create(**ask).choices[0].logprobs
    for token, place in zip(told.tokens[: len(ids)], told.text_offset, strict=False):
        assert text[place:].startswith(token) or ("\ufffd" in token and text[place] in "😀日本"), (token, place)
    assert told.text_offset[told.tokens.index("d")] == 11
    held = [token_bytes(served.model.tokenizer, token) for token in ids]
    assert bytes(b for own in held for b in own).decode() == text and sum(len(own) == 1 for own in held) > 6


def test_places_of_many_tokens_are_counted_once(served):
    """By processor time: 30,000 tokens take half a second where each is decoded in a window, and half a minute otherwise."""
    asked = TextCompletions.__new__(TextCompletions)
    asked.form = SimpleNamespace(return_token_ids=False, logprobs=0, return_tokens_as_token_ids=False)
    asked.served = SimpleNamespace(text_of=lambda token: "", tokenizer=served.model.tokenizer)
    ids = served.model.tokenizer(" quick fox")["input_ids"]
    tokens = [DrawnToken(token, -1.0, -1.0) for token in ids * (30_000 // len(ids))]
    begun = time.process_time()
    found = asked._choice(0, "", tokens, 7, asked._writer())["logprobs"]["text_offset"]
    assert time.process_time() - begun < 8.0
    assert found[:: len(ids)] == [7 + 10 * i for i in range(30_000 // len(ids))]
    assert asked._choice(0, "", [], 7, asked._writer())["logprobs"]["text_offset"] == []
