"""/v1/chat/completions as the openai package reads it: the tokens are the sampler's, and refusals are the API's."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest

from psigrad.language.episodes.tools import CallForm
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Served

HI = [{"role": "user", "content": "Hi there"}]


def test_a_seed_gives_the_samplers_tokens_and_log_probs_bit_for_bit(client, served):
    ask = {"model": "tiny", "messages": HI, "seed": 7, "max_tokens": 20, "temperature": 0.8, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    want = served.sampled(answer.prompt_token_ids, 7, max_tokens=20, temperature=0.8)
    assert tuple(choice.token_ids) == want.ids
    assert tuple(one.logprob for one in choice.logprobs.content) == want.logprobs
    assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    text = served.model.tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert tuple(answer.prompt_token_ids) == tuple(served.model.tokenizer(text)["input_ids"])
    assert (choice.message.role, choice.finish_reason) == ("assistant", want.finish_reason)
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids) and answer.usage.completion_tokens == len(want.ids)
    assert answer._request_id.startswith("req_")


def test_a_stream_is_the_same_text_piece_by_piece(client):
    ask = {"model": "small", "messages": HI, "seed": 3, "max_tokens": 30, "n": 3}
    whole = client.chat.completions.create(**ask)
    texts, ends, usage = {}, {}, None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
        usage = chunk.usage or usage
    assert [texts[i] for i in range(3)] == [choice.message.content for choice in whole.choices]
    assert [ends[i] for i in range(3)] == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage and len(set(texts.values())) == 3


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(client, served):
    whole = client.chat.completions.create(model="tiny", messages=HI, seed=5, max_tokens=60).choices[0].message.content
    stop = whole[8:10]
    served.heard.completions.clear()
    ask = {"model": "tiny", "messages": HI, "seed": 5, "max_tokens": 60, "stop": ["never", stop]}
    answer = client.chat.completions.create(**ask).choices[0]
    assert answer.message.content == whole[: whole.index(stop)] and answer.finish_reason == "stop"
    streamed = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**ask, stream=True)]
    assert "".join(streamed) == answer.message.content
    (_, call, prompt, ids, logprobs, reason, *_), again = served.heard.completions
    full = served.sampled(prompt, 5, max_tokens=60)
    assert ids == full.ids[: len(ids)] and logprobs == full.logprobs[: len(ids)] and reason == "stop" and again[3] == ids
    text = served.model.tokenizer.decode(ids)
    assert stop in text and stop not in served.model.tokenizer.decode(ids[:-1]) and call.stop == ("never", stop)


@pytest.mark.parametrize(
    ("bad", "kind", "param", "words"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model", "'gpt-9' does not exist; this server has tiny, small"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, "messages[0].role", "one of system, dev"),
        ({"messages": []}, openai.BadRequestError, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": "x " * 1800}]}, openai.BadRequestError, "messages", "1024 tokens and"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages[0].content", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "messages[0].content[0]",
         "image"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens", "greater than or equal to 1"),
        ({"temperature": -0.5}, openai.BadRequestError, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, openai.BadRequestError, "top_p", "greater than 0"),
        ({"n": 0}, openai.BadRequestError, "n", "greater than or equal to 1"),
        ({"stop": [""]}, openai.BadRequestError, "stop", "none of them empty"),
        ({"modalities": ["audio"]}, openai.BadRequestError, "modalities", "can't do"),
        ({"parallel_tool_calls": False}, openai.BadRequestError, "parallel_tool_calls", "can't do"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature", "did you mean 'temperature'"),
        ({"extra_body": {"seed": "x"}}, openai.BadRequestError, "seed", "valid integer"),
    ],
)  # fmt: skip
def test_a_bad_request_gets_the_apis_own_error(client, bad, kind, param, words):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 2, **bad})
    assert caught.value.param == param and words in caught.value.message
    assert caught.value.type == "invalid_request_error"


def test_what_asks_for_nothing_is_taken(client):
    ask = {"frequency_penalty": 0, "response_format": {"type": "text"}, "user": "me", "parallel_tool_calls": True, "store": False}
    assert client.chat.completions.create(model="tiny", messages=HI, max_tokens=2, **ask).choices


def test_without_the_token_nobody_is_answered(served):
    for key in ("wrong", f"{served.at.token}x", f"x.{served.at.token}"):
        stranger = openai.OpenAI(base_url=f"{served.at.url}/v1", api_key=key, max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError, match="the token that the server printed"):
            stranger.models.list()


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny", "small"]
    assert client.models.retrieve("small").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def test_the_recorder_hears_before_the_client_whose_session_it_was_and_may_settle_how_it_is_sampled(served, monkeypatch):
    monkeypatch.setattr(served.heard, "prepared", lambda session, call: replace(call, seed=11) if session else call)
    served.heard.completions.clear()
    asked = {"model": "tiny", "messages": HI, "seed": 2, "max_tokens": 5}
    with openai.OpenAI(base_url=f"{served.at.session_url('one')}/v1", api_key=served.at.token, max_retries=0) as by_address:
        by_address.chat.completions.create(**asked)
        assert len(served.heard.completions) == 1
    with openai.OpenAI(base_url=f"{served.at.url}/v1", api_key=f"{served.at.token}.two", max_retries=0) as by_key:
        by_key.chat.completions.create(**asked)
        by_key.chat.completions.create(**{**asked, "n": 2})
    sessions = [told[0] for told in served.heard.completions]
    assert sessions == ["one", "two", "two", "two"]
    told = served.heard.completions[0]
    assert told[3] == served.sampled(told[2], 11, max_tokens=5).ids and told[5] in ("stop", "length")


def test_forms_of_calls_are_known_for_the_last_arguments_alone(small_model, monkeypatch):
    asked = []
    monkeypatch.setattr("psigrad_serve.served.call_form_of", lambda tokenizer, **given: asked.append(given["n"]) or CallForm())
    monkeypatch.setattr("psigrad_serve.served.MOST_FORMS", 3)
    engine = SamplingEngine(small_model)
    served, tools = Served(engine), [{"type": "function", "function": {"name": "add"}}]
    for n in (0, 1, 2, 2, 0, 3, 0, 3):
        served.conversation(HI, tools, {"n": n})
    assert asked == [0, 1, 2, 3, 0], "3 takes the place of 0, which came first"
    assert len(served._forms) == 3
    for held in (["a"], "a", None):
        odd = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": held}}}]
        assert served.conversation(HI, odd, {"n": 0})[1].parameters == {"add": {}}
    engine.close()
