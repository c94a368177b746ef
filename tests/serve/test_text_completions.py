"""/v1/completions: text or tokens, one prompt or several."""

from __future__ import annotations

import openai
import pytest


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.at.url}/v1", api_key=served.at.token, max_retries=0) as made:
        yield made


def test_several_prompts_of_text_or_tokens_give_their_choices_in_order(client, served):
    ids = [served.model.tokenizer(text)["input_ids"] for text in ("the quick", "a lazy dog")]
    ask = {"model": "tiny", "max_tokens": 9, "n": 2, "seed": 4, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    by_text, by_ids = (client.completions.create(prompt=prompt, **ask) for prompt in (["the quick", "a lazy dog"], ids))
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices] and len({c.text for c in by_ids.choices}) == 4
    assert [c.index for c in by_ids.choices] == [0, 1, 2, 3]
    for place, prompt in ((0, ids[0]), (2, ids[1])):
        want, choice = served.sampled(prompt, 4, max_tokens=9), by_ids.choices[place]
        assert tuple(choice.token_ids) == want.ids and tuple(choice.logprobs.token_logprobs) == want.logprobs
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


@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [({"prompt": []}, "prompt", "at least 1 item"), ({"prompt": [999]}, "prompt", "has the token 999"),
     ({"prompt": ""}, "prompt", "no tokens"), ({"prompt": "x", "suffix": "y"}, "suffix", "can't do"),
     ({"prompt": "x", "logprobs": 99}, "logprobs", "less than or equal to 20")],
)  # fmt: skip
def test_bad_prompts_are_refused(client, bad, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "max_tokens": 2, **bad})
    assert words in caught.value.message and caught.value.param.startswith(param)
