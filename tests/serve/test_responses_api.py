"""/v1/responses as the openai package reads it."""

from __future__ import annotations

import openai
import pytest

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def test_the_tokens_are_the_samplers_and_a_stream_says_the_same(client, served):
    served.heard.completions.clear()
    ask = {"model": "tiny", "input": "Hi there", "instructions": "Be brief.", "max_output_tokens": 15, "extra_body": {"seed": 6}}
    answer = client.responses.create(**ask, include=["message.output_text.logprobs"])
    _, call, made, reason, _ = served.heard.completions[0]
    prompt, ids, logprobs = call.prompt_ids, made.ids, made.logprobs
    want = served.sampled(prompt, 6, max_tokens=15)
    assert (ids, logprobs) == (want.ids, want.logprobs)
    assert [one.logprob for one in answer.output[0].content[0].logprobs] == list(logprobs)
    assert answer.status == {"length": "incomplete", "stop": "completed"}[reason]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), len(ids))
    seen = []
    with client.responses.stream(**ask) as stream:
        for event in stream:
            seen.append(event)
    assert seen[-1].response.output_text == answer.output_text and seen[-1].type == f"response.{answer.status}"
    assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == answer.output_text
    assert [e.sequence_number for e in seen if hasattr(e, "sequence_number")] == sorted({e.sequence_number for e in seen})


def test_a_call_its_output_and_the_response_before_are_one_conversation(acting, actor):
    actor.says('So.\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>')
    ask = {"model": "tiny", "tools": [ADD], "input": [{"role": "user", "content": [{"type": "input_text", "text": "Add it"}]}]}
    answer = acting.responses.create(**ask)
    said, call = answer.output
    assert said.content[0].text == "So." and (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 3}')
    with acting.responses.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output[1].arguments == '{"a": 3}' and "response.function_call_arguments.done" in kinds
    actor.says("Three.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "The sum is 3"}
    by_name = acting.responses.create(model="tiny", tools=[ADD], previous_response_id=answer.id, input=[output])
    named = actor.heard.completions[-1].call.prompt_ids
    by_hand = acting.responses.create(
        model="tiny", tools=[ADD], input=[*ask["input"], *(item.model_dump() for item in answer.output), output]
    )
    assert by_name.output_text == by_hand.output_text == "Three."
    assert actor.heard.completions[-1].call.prompt_ids == named, "the same tokens"
    text = actor.scripted.tokenizer.decode(named)
    assert text.index("Add it") < text.index("So.") < text.index('"a": 3') < text.index("The sum is 3")


def test_two_answers_to_one_question_by_one_seed_are_two_conversations(acting, actor):
    answers = []
    for word in ("One.", "Two."):
        actor.says(word)
        answers.append(acting.responses.create(model="tiny", input="Go on", extra_body={"seed": 1}))
    assert answers[0].id != answers[1].id
    for answer, word in zip(answers, ("One.", "Two."), strict=True):
        acting.responses.create(model="tiny", input="And?", previous_response_id=answer.id)
        asked = actor.scripted.tokenizer.decode(actor.heard.completions[-1].call.prompt_ids)
        assert [one for one in ("One.", "Two.") if one in asked] == [word]


@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [({"previous_response_id": "resp_9"}, "previous_response_id", "not stored"),
     ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
     ({"input": [{"type": "computer_call"}]}, "input[0].type", "computer_call"), ({"input": []}, "input", "at least 1"),
     ({"input": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'wizard'"),
     ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
     ({"text": {"format": {"type": "yaml"}}}, "text.format", "text, json_object or json_schema"),
     ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "reads only text")],
)  # fmt: skip
def test_a_bad_request_gets_the_apis_own_error(client, bad, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "x", **bad})
    assert caught.value.param.startswith(param) and words in caught.value.message
