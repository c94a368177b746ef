"""/v1/messages as the anthropic package reads it."""

from __future__ import annotations

import json

import anthropic
import pytest

HI = [{"role": "user", "content": "Hi there"}]
ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def client(served):
    with anthropic.Anthropic(base_url=served.at.url, api_key=served.at.token, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def acting(actor):
    with anthropic.Anthropic(base_url=actor.at.url, api_key=actor.at.token, max_retries=0) as made:
        yield made


def test_the_tokens_are_the_samplers_and_a_stream_says_the_same(client, served):
    served.heard.completions.clear()
    ask = {"model": "tiny", "messages": HI, "max_tokens": 20, "system": "Be brief."}
    more = {"extra_body": {"seed": 9, "temperature": 0.5}}
    answer = client.messages.create(**ask, **more)
    _, call, made, reason, _ = served.heard.completions[0]
    prompt, ids, logprobs = call.prompt_ids, made.ids, made.logprobs
    want = served.sampled(prompt, 9, max_tokens=20, temperature=0.5)
    assert (ids, logprobs) == (want.ids, want.logprobs)
    assert answer.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[reason]
    assert answer.usage.input_tokens == len(prompt) and answer.usage.output_tokens == len(ids)
    assert "Be brief." in served.model.tokenizer.decode(prompt)
    with client.messages.stream(**ask, **more) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == answer.content[0].text == final.content[0].text and final.usage.output_tokens == len(ids)
    assert client.messages.count_tokens(model="tiny", messages=HI, system="Be brief.").input_tokens == len(prompt)


def test_a_call_is_a_block_and_its_result_comes_back(acting, actor):
    actor.says('Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>')
    ask = {"model": "tiny", "messages": HI, "max_tokens": 200, "tools": [ADD]}
    answer = acting.messages.create(**ask)
    text, use = answer.content
    assert (text.text, use.name, use.input, answer.stop_reason) == ("Let me see.", "add", {"a": 3}, "tool_use")
    with acting.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"] and final.content[1].input == {"a": 3}
    assert final.content[0].text == "Let me see." and final.stop_reason == "tool_use"
    actor.says("Three.")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "The sum is 3"}]}
    talk = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    again = acting.messages.create(**{**ask, "messages": talk})
    assert again.content[0].text == "Three." and again.stop_reason == "end_turn"
    prompt = actor.scripted.tokenizer.decode(actor.heard.completions[-1].call.prompt_ids)
    assert "The sum is 3" in prompt and '"a": 3' in prompt and prompt.index('"a": 3') < prompt.index("The sum is 3")


def test_a_stop_sequence_is_named(acting, actor):
    actor.says("One. Two. Three.")
    answer = acting.messages.create(model="tiny", messages=HI, max_tokens=99, stop_sequences=["Thr", "Two"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("One. ", "stop_sequence", "Two")


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [({"model": "gpt"}, "not_found_error", "'gpt' does not exist"), ({"max_tokens": -3}, "invalid_request_error", "max_tokens"),
     ({"messages": []}, "invalid_request_error", "at least 1"),
     ({"extra_body": {"temperature": -1}}, "invalid_request_error", "temperature"),
     ({"messages": [{"role": "sage", "content": "x"}]}, "invalid_request_error", "messages[0].role"),
     ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]}, "invalid_request_error",
          "reads only text"),
     ({"messages": [{"role": "user", "content": "x " * 1800}]}, "invalid_request_error", "1024 tokens, but the prompt has"),
     ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sum"}}, "invalid_request_error", "offers add"),
     ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "invalid_request_error", "mcp_servers is")],
)  # fmt: skip
def test_a_bad_request_gets_the_apis_own_error(client, bad, kind, words):
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**{"model": "tiny", "messages": HI, "max_tokens": 5, **bad})
    body = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", kind) and words in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id


def test_a_wrong_key_is_told_so(served):
    stranger = anthropic.Anthropic(base_url=served.at.url, api_key="no", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        stranger.messages.create(model="tiny", messages=HI, max_tokens=2)


def test_what_claude_code_sends_by_itself_is_taken(client, served):
    sent = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "mcp_servers": [],
        "output_config": {"effort": "high"},
        "seed": 5,
    }
    talk = [*HI, {"role": "system", "content": "Be brief."}, *HI]
    ask = {"model": "tiny", "messages": talk, "max_tokens": 5}
    one, other = (client.messages.create(**ask, extra_body=body) for body in (sent, {"seed": 5}))
    assert one.content[0].text == other.content[0].text and one.id != other.id
    assert "Be brief." in served.model.tokenizer.decode(served.heard.completions[-1].call.prompt_ids)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    assert type(json.loads(client.messages.create(**{**ask, "max_tokens": 60}, extra_body=form).content[0].text)["a"]) is bool


def test_the_tool_runner_goes_on_without_the_thread_that_it_asks_for_first(acting, actor):
    @anthropic.beta_tool
    def add(a: int) -> str:
        """Add."""
        actor.says("Three.")
        return f"The sum is {a}"

    actor.says('<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>')
    runner = acting.beta.messages.tool_runner(model="tiny", max_tokens=200, messages=HI, tools=[add])
    assert [message.content[-1].type for message in runner] == ["tool_use", "text"]
    assert "The sum is 3" in actor.scripted.tokenizer.decode(actor.heard.completions[-1].call.prompt_ids)
