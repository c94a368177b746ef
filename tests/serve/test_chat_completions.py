"""/v1/chat/completions as the openai package reads it: the tokens are the sampler's, and refusals are the API's."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import get_type_hints

import httpx2
import openai
import pytest
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from psigrad.language.data.templates import prompt_ids
from psigrad.language.episodes.tools import CallForm
from psigrad_serve import forms
from psigrad_serve.anthropic_messages import MessagesForm
from psigrad_serve.chat_completions import ChatForm
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.responses_api import ResponsesForm
from psigrad_serve.served import Served
from psigrad_serve.text_completions import TextForm

HI = [{"role": "user", "content": "Hi there"}]
CALLS = [{"id": id, "type": "function", "function": {"name": "add", "arguments": "{}"}} for id in "ab"]


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
    (_, call, made, reason, _), again = served.heard.completions
    prompt, ids, logprobs = call.prompt_ids, made.ids, made.logprobs
    full = served.sampled(prompt, 5, max_tokens=60)
    assert (
        ids == full.ids[: len(ids)] and logprobs == full.logprobs[: len(ids)] and reason == "stop" and again.completion.ids == ids
    )
    text = served.model.tokenizer.decode(ids)
    assert stop in text and stop not in served.model.tokenizer.decode(ids[:-1]) and call.stop == ("never", stop)


@pytest.mark.parametrize(
    ("bad", "kind", "param", "words"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model", "'gpt-9' does not exist; this server has tiny, small"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, "messages[0].role", "one of system, dev"),
        ({"messages": []}, openai.BadRequestError, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": "x " * 1800}]}, openai.BadRequestError, "messages", "1024 tokens, but"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages[0].content", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "messages[0].content[0]",
         "image"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens", "greater than or equal to 1"),
        ({"temperature": -0.5}, openai.BadRequestError, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, openai.BadRequestError, "top_p", "greater than 0"),
        ({"n": 0}, openai.BadRequestError, "n", "greater than or equal to 1"),
        ({"stop": [""]}, openai.BadRequestError, "stop", "non-empty strings"),
        ({"modalities": ["audio"]}, openai.BadRequestError, "modalities", "does not support"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": CALLS}, {"role": "tool", "tool_call_id": "c", "content": "1"}]},
         openai.BadRequestError, "messages[2].tool_call_id", "is 'c', and the calls before it are 'a', 'b'"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature", "did you mean 'temperature'"),
        ({"extra_body": {"seed": "x"}}, openai.BadRequestError, "seed", "valid integer"),
    ],
)  # fmt: skip
def test_a_bad_request_gets_the_apis_own_error(client, bad, kind, param, words):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 2, **bad})
    assert caught.value.param == param and words in caught.value.message
    assert caught.value.type == "invalid_request_error"


NEUTRAL = {
    "frequency_penalty": 0,
    "response_format": {"type": "text"},
    "user": "me",
    "parallel_tool_calls": True,
    "store": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "extra_body": {},
    "max_tokens": 3.0,
    "top_k": -1.0,
    "functions": [],
    "function_call": "auto",
    "thinking": {"type": "enabled"},
    "n": 1.0,
}


def test_what_asks_for_nothing_is_taken(client):
    taken = client.chat.completions.create(model="tiny", messages=HI, seed=1, extra_body=NEUTRAL).choices[0]
    assert (
        taken.message.content
        == client.chat.completions.create(model="tiny", messages=HI, seed=1, max_tokens=3).choices[0].message.content
    )
    with pytest.raises(openai.BadRequestError, match="ignore_eos is true, which this server does not support"):
        client.chat.completions.create(model="tiny", messages=HI, extra_body={"ignore_eos": True})


ASK_FOR_MORE = {"audio", "web_search_options", "conversation", "prompt", "image", "container"}
"""What only another service can give."""


@pytest.mark.parametrize(
    ("form", "types"),
    [(ChatForm, [chat_params.CompletionCreateParamsBase]), (TextForm, [text_params.CompletionCreateParamsBase]),
     (ResponsesForm, [response_params.ResponseCreateParamsBase]),
     (MessagesForm, [message_params.MessageCreateParamsBase, beta_params.MessageCreateParamsBase])],
)  # fmt: skip
def test_every_field_of_the_installed_clients_types_is_known(form, types):
    fields = {name for one in types for name in get_type_hints(one)}
    known = {*form.model_fields, *forms.IDLE, *forms.NEUTRAL, *ASK_FOR_MORE}
    assert fields <= known, "read it, or say in forms.py which of its values ask for nothing"
    assert {"model", "metadata"} & fields, "negative control: the types have fields"


def test_a_name_and_marks_that_the_template_has_no_place_for_are_taken(acting, actor):
    actor.says("yes")
    ask = {"model": "tiny", "max_tokens": 200}
    marked = [
        {**HI[0], "name": "alice", "id": "m1", "metadata": {"a": 1}},
        {"role": "assistant", "content": "so", "name": "bot"},
        *HI,
    ]
    plain = [*HI, {"role": "assistant", "content": "so"}, *HI]
    for messages in (marked, plain):
        acting.chat.completions.create(**ask, messages=messages)
    assert actor.heard.completions[-1].call.prompt_ids == actor.heard.completions[-2].call.prompt_ids


def answers(path, order):
    """A conversation of two calls whose results come in this order, in one of the APIs."""
    results = {id: f"result {id}" for id in order}
    if path == "chat":
        return [*HI, {"role": "assistant", "content": None, "tool_calls": CALLS},
                *({"role": "tool", "tool_call_id": id, "content": text} for id, text in results.items())]  # fmt: skip
    if path == "responses":
        calls = [{"type": "function_call", "call_id": id, "name": "add", "arguments": "{}"} for id in "ab"]
        outputs = [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results.items()]
        return [*HI, *calls, *outputs]
    uses = [{"type": "tool_use", "id": id, "name": "add", "input": {}} for id in "ab"]
    blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results.items()]
    return [*HI, {"role": "assistant", "content": uses}, {"role": "user", "content": blocks}]


def asked(actor, path, messages, **more):
    """Post a request to one of the APIs, and return the answer's body."""
    routes = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
    name = {"responses": "input"}.get(path, "messages")
    body = {"model": "tiny", name: messages, **({"max_tokens": 200} if path == "messages" else {}), **more}
    headers = {"x-api-key": actor.at.token}
    return httpx2.post(f"{actor.at.url}/v1/{routes[path]}", json=body, headers=headers).json()


@pytest.mark.parametrize("path", ["chat", "responses", "messages"])
def test_answers_to_calls_may_come_in_any_order(path, actor):
    actor.says("done")
    prompts = []
    for order in ("ab", "ba"):
        asked(actor, path, answers(path, order))
        prompts.append(actor.heard.completions[-1].call.prompt_ids)
    text = actor.scripted.tokenizer.decode(prompts[0])
    assert prompts[0] == prompts[1] and text.index("result a") < text.index("result b")


@pytest.mark.parametrize("path", ["chat", "responses", "messages"])
def test_one_call_at_most_where_the_client_takes_no_more(path, actor):
    actor.says("".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {i}}}}}\n</tool_call>\n' for i in (1, 2)))
    tool = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    given = {
        "chat": ({"tools": [{"type": "function", "function": tool}]}, {"parallel_tool_calls": False}),
        "responses": ({"tools": [{"type": "function", **tool}]}, {"parallel_tool_calls": False}),
        "messages": ({"tools": [{"name": "add", "input_schema": tool["parameters"]}]},
                     {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    }[path]  # fmt: skip

    def calls(made):
        said = made.get("content") or made.get("output") or made["choices"][0]["message"]["tool_calls"]
        return [one for one in said if one.get("type") in ("tool_use", "function_call", "function")]

    assert len(calls(asked(actor, path, HI, **given[0]))) == 2
    (one,) = calls(asked(actor, path, HI, **given[0], **given[1]))
    assert '"a": 1' in json.dumps(one).replace("\\", "")


def test_no_two_answers_have_one_name_and_a_calls_id_says_what_it_calls(acting, actor):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    made = []
    for number in (1, 1, 2):
        actor.says(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>')
        made.append(acting.chat.completions.create(model="tiny", messages=HI, seed=7, tools=[tool], max_tokens=200))
    assert len({one.id for one in made}) == 3
    ids = [one.choices[0].message.tool_calls[0].id for one in made]
    assert ids[0] == ids[1] != ids[2] and all(len(id) == 9 and id.isalnum() for id in ids), "a template may show them"


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(client, served, monkeypatch):
    def encoded(*given, **how):
        raise AssertionError("it was encoded")

    monkeypatch.setattr("psigrad_serve.served.prompt_ids", encoded)
    longest = max(map(len, served.model.tokenizer.get_vocab()))
    for words in ("x" * (1024 * longest + 1), [{"type": "text", "text": "x" * (1024 * longest)}, {"type": "text", "text": "y"}]):
        with pytest.raises(openai.BadRequestError, match="this model's context of 1024 tokens holds at most") as caught:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": words}])
        assert caught.value.code == "context_length_exceeded"


def test_others_are_answered_while_a_prompt_is_encoded(client, monkeypatch):
    free, own = threading.Event(), prompt_ids

    def slow(tokenizer, row, **how):
        assert free.wait(60)
        return own(tokenizer, row, **how)

    monkeypatch.setattr("psigrad_serve.served.prompt_ids", slow)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.chat.completions.create, model="tiny", messages=HI, max_tokens=2)
        assert client.models.list().data and not waits.done()
        free.set()
        assert waits.result().choices


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
    with openai.OpenAI(base_url=f"{served.at.url}/s/one/v1", api_key=served.at.token, max_retries=0) as by_address:
        by_address.chat.completions.create(**asked)
        assert len(served.heard.completions) == 1
    with openai.OpenAI(base_url=f"{served.at.url}/v1", api_key=f"{served.at.token}.two", max_retries=0) as by_key:
        by_key.chat.completions.create(**asked)
        by_key.chat.completions.create(**{**asked, "n": 2})
    sessions = [told.session for told in served.heard.completions]
    assert sessions == ["one", "two", "two", "two"]
    told = served.heard.completions[0]
    assert told.completion.ids == served.sampled(told.call.prompt_ids, 11, max_tokens=5).ids and told.reason in ("stop", "length")


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
