"""What a request wants of the draws: penalties by hand, and forms that every draw keeps, whatever the policy would say."""

from __future__ import annotations

import json

import anthropic
import numpy as np
import openai
import pytest
import torch

from psigrad import seeds
from psigrad.language.episodes.tool_calls import FAMILIES, ToolCall, read_calls
from psigrad.language.episodes.tools import CallForm
from psigrad.language.rollout.types import DrawnToken
from psigrad_serve.api_errors import ApiError
from psigrad_serve.steering import Forms, Wish, call_grammar, chosen_tool
from psigrad_serve.writer import Offered

llguidance = pytest.importorskip("llguidance")
HI = [{"role": "user", "content": "Hi there"}]
DAYS = {"type": "integer", "maximum": 9, "minimum": 1}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": DAYS},
        "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
IDS = {"return_token_ids": True}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": CITY, "strict": True}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


def is_trip(text: str) -> bool:
    trip = json.loads(text)
    return set(trip) == {"city", "days"} and trip["city"] in ("Rome", "Oslo") and 1 <= trip["days"] <= 9


def test_penalties_and_biases_are_the_formulas():
    drawn = [DrawnToken(i, 0.0, 0.0) for i in (2, 0, 2)]
    wish, logits = Wish(0.5, 0.25, {3: -7.0}), torch.tensor([1.0, 2.0, 3.0, 4.0])
    steer = wish.steer(None)
    for n in range(len(drawn) + 1):
        found = steer(logits.clone(), drawn[:n])
    # c = [1, 0, 2, 0]: 1 - 0.5 - 0.25, 2, 3 - 2 · 0.5 - 0.25, 4 - 7
    assert found.tolist() == [0.25, 2.0, 1.75, -3.0]


def test_a_biased_draw_is_the_samplers_from_the_biased_logits_and_its_log_prob_the_policys(client, served):
    ask = {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "seed": 3,
        "max_tokens": 1,
        "logprobs": 0,
        "extra_body": {"return_token_ids": True},
    }
    plain = client.completions.create(**ask).choices[0]
    (usual,) = plain.token_ids
    other = client.completions.create(**ask, logit_bias={str(usual): -100}).choices[0]
    with torch.no_grad():
        logits = served.model.network(torch.tensor([[5, 6, 7]])).logits[0, -1]
    weights = logits.double().clone()
    weights[usual] -= 100
    u = float(seeds.uniform(np.array([3], dtype=np.uint64), np.array([0]))[0])
    want = int(torch.searchsorted(weights.softmax(-1).cumsum(-1), u, right=True))
    assert other.token_ids == [want] != [usual]
    assert other.logprobs.token_logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[want]), abs=1e-5)


def test_a_penalty_ends_repetition(client, served):
    forbidden = {str(end): -100 for end in served.model.eos_token_ids}
    ask = {"model": "tiny", "messages": HI, "max_tokens": 40, "temperature": 0, "logit_bias": forbidden, "extra_body": IDS}

    def drawn(**more):
        return client.chat.completions.create(**ask, **more).choices[0].token_ids

    plain, fresh = drawn(), drawn(presence_penalty=2, frequency_penalty=2)
    assert drawn(presence_penalty=0) == plain and len(plain) == len(fresh) == 40
    assert max(map(plain.count, plain)) > max(map(fresh.count, fresh))


def test_every_answer_keeps_its_schema_and_without_it_none_does(client):
    ask = {"model": "tiny", "messages": HI, "max_tokens": 60, "n": 5}
    forced = client.chat.completions.create(**ask, seed=1, response_format=SCHEMA)
    assert all(is_trip(choice.message.content) and choice.finish_reason == "stop" for choice in forced.choices)
    assert len({choice.message.content for choice in forced.choices}) > 2
    for choice in client.chat.completions.create(**ask, seed=1).choices:
        with pytest.raises(ValueError, match="char"):
            json.loads(choice.message.content)
    texts = ["".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(
        **{**ask, "n": 1}, seed=1, response_format=SCHEMA, stream=True))]  # fmt: skip
    assert texts == [forced.choices[0].message.content]
    flat = {"format": {"type": "json_schema", "name": "trip", "schema": CITY}}
    assert is_trip(client.responses.create(model="tiny", input="Hi", max_output_tokens=60, text=flat).output_text)


def test_a_form_shares_the_batch_and_changes_nobody_else(client, served):
    ask = {"model": "tiny", "messages": HI, "max_tokens": 30, "seed": 5, "extra_body": {"return_token_ids": True}}
    alone = client.chat.completions.create(**ask).choices[0].token_ids
    stream = client.chat.completions.create(**{**ask, "n": 4}, response_format=SCHEMA, stream=True)
    next(iter(stream))
    beside = client.chat.completions.create(**ask).choices[0].token_ids
    assert beside == alone
    stream.close()


def test_json_object_is_an_object_as_far_as_it_goes(client):
    found = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=30, seed=2, response_format={"type": "json_object"}
    )
    text, end = found.choices[0].message.content, found.choices[0].finish_reason
    assert text.startswith("{") and (end == "length" or isinstance(json.loads(text), dict))


def test_a_call_is_forced_in_each_api(client, served):
    for choice, names in (
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ):
        ask = {"model": "tiny", "messages": HI, "tools": [WEATHER, CLOCK], "tool_choice": choice, "max_tokens": 120}
        found = client.chat.completions.create(**ask, n=5, seed=4)
        calls = [one.message.tool_calls for one in found.choices]
        assert all(len(made) == 1 for made in calls) and {made[0].function.name for made in calls} == names
        assert all(is_trip(made[0].function.arguments) for made in calls if made[0].function.name == "weather")
        assert {one.finish_reason for one in found.choices} == {"tool_calls"}
    flat = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
    forced = {"type": "function", "name": "clock"}
    (call,) = client.responses.create(model="tiny", input="Hi", tools=flat, tool_choice=forced, max_output_tokens=120).output
    assert (call.type, call.name, call.arguments) == ("function_call", "clock", "{}")
    with anthropic.Anthropic(base_url=served.at.url, api_key=served.at.token, max_retries=0) as other:
        tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in (WEATHER, CLOCK)]
        for asked in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            answer = other.messages.create(model="tiny", messages=HI, max_tokens=120, tools=tools, tool_choice=asked)
            assert [block.type for block in answer.content] == ["tool_use"] and answer.stop_reason == "tool_use"


SHOWN = [family for family in FAMILIES if '{"a": 1}' in family.shown]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_forced_call_is_read_back_in_the_form_of_each_family(family, small_model):
    offered = Offered(CallForm(family.name), {"weather": CITY["properties"]}, {"weather": CITY})
    if family not in SHOWN:
        with pytest.raises(ApiError, match=f"in this model's format \\({family.name}\\)"):
            call_grammar(offered, "weather", {})
        return
    matcher = Forms(small_model).matcher(call_grammar(offered, "weather", {}))
    ids, rng = [], np.random.default_rng(0)
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits)))
        matcher.consume_token(token)
        ids += [] if token in small_model.eos_token_ids else [token]
    (call,) = read_calls(small_model.tokenizer.decode(ids), offered.parameters, [family])
    assert isinstance(call, ToolCall) and call.name == "weather" and is_trip(json.dumps(call.arguments))
    assert len(SHOWN) == 9


def test_words_that_are_one_token_are_written_by_it():
    offered = Offered(CallForm("Hermes"), {}, {"clock": {"type": "object"}})
    grammar = call_grammar(offered, "", {"<tool_call>": 7, "</tool_call>": 8})
    assert grammar.startswith('%llguidance {}\nstart: <[7]> "{\\"name\\": \\"clock\\", \\"arguments\\": " %json ')
    assert grammar.endswith('"}" <[8]>\n')


def test_what_no_api_calls_a_choice_is_refused():
    assert [chosen_tool(choice) for choice in (None, "auto", "required", {"type": "any"})] == [None, None, "", ""]
    several = ({"type": kind, "disable_parallel_tool_use": False} for kind in ("auto", "any", "none"))
    assert [chosen_tool(choice) for choice in several] == [None, "", None], "Anthropic's default, written out"
    kinds = ({"type": "any"}, {"type": "tool", "name": "clock"}, {"type": "auto"})
    assert [chosen_tool({**kind, "disable_parallel_tool_use": True}) for kind in kinds] == ["", "clock", None]
    for wrong in ("always", {"type": "function"}, 3, {"type": "tool", "name": 4}):
        with pytest.raises(ApiError, match="tool_choice is"):
            chosen_tool(wrong)


@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "sage"}}}}, "response_format", "sage"),
        ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format", "no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": "trip"}}, "response_format", "no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "response_format",
         "no answer can have this format"),
        ({"temperature": 1e-45}, "temperature", "expected 0 or at least 1e-38"),
        ({"tool_choice": "required"}, "tool_choice", "the request offers no tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "sun"}}}, "tool_choice", "offers clock"),
        ({"frequency_penalty": 3}, "frequency_penalty", "less than or equal to 2"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "does not have"),
        ({"logit_bias": {"the": 1}}, "logit_bias.the", "pattern"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "pattern"),
    ],
)  # fmt: skip
def test_a_wish_that_can_not_be_had_is_refused(client, bad, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 2, **bad})
    assert caught.value.param.split(".")[0] == param.split(".")[0] and words in caught.value.message


def test_another_sampler_refuses_by_name(actor):
    with openai.OpenAI(base_url=f"{actor.at.url}/v1", api_key=actor.at.token, max_retries=0) as made:
        for name, value in (("response_format", SCHEMA), ("presence_penalty", 1), ("logit_bias", {"3": 5})):
            with pytest.raises(openai.BadRequestError, match=f"{name} needs the embedded sampler"):
                made.chat.completions.create(model="tiny", messages=HI, max_tokens=5, **{name: value})
        with pytest.raises(openai.BadRequestError, match="top_logprobs needs the embedded sampler"):
            made.chat.completions.create(model="tiny", messages=HI, max_tokens=5, logprobs=True, top_logprobs=2)
        with pytest.raises(openai.BadRequestError, match="top_logprobs needs the embedded sampler"):
            made.responses.create(model="tiny", input="Hi", top_logprobs=2)
        with pytest.raises(openai.BadRequestError, match="logprobs needs the embedded sampler"):
            made.completions.create(model="tiny", prompt="the", max_tokens=5, logprobs=2)
        actor.says("fox")
        assert made.completions.create(model="tiny", prompt="the", max_tokens=5, logprobs=0).choices[0].logprobs.token_logprobs
        told = made.completions.create(model="tiny", prompt="the fox", max_tokens=1, logprobs=2, echo=True).choices[0].logprobs
        assert len(told.top_logprobs[1]) == 2, "of a prompt the model tells them"
