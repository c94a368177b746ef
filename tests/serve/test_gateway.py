"""The server under load and under clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace

import openai
import pytest
from timing import until

from psigrad_serve.api_errors import ApiError
from psigrad_serve.served import Served
from psigrad_serve.serving import running

HI = [{"role": "user", "content": "Hi there"}]
ASK = {"model": "tiny", "messages": HI}


def posted(served, body: bytes, path: str = "/v1/chat/completions", key: str = ""):
    """(status, what is answered) to a body as it is."""
    headers = {"Authorization": f"Bearer {key or served.at.token}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(served.at.url + path, body, headers), timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_64_streams_at_once_say_what_each_says_alone(served):
    async def said(client, seed):
        text = ""
        async for chunk in await client.chat.completions.create(**ASK, seed=seed, max_tokens=24, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{served.at.url}/v1", api_key=served.at.token, max_retries=0) as client:
            together = await asyncio.gather(*(said(client, seed) for seed in range(64)))
            return together, [await said(client, seed) for seed in (0, 31, 63)]

    together, alone = asyncio.run(all_of_them())
    assert [together[seed] for seed in (0, 31, 63)] == alone and len(set(together)) > 60
    assert not served.engine.active and not served.engine.waiting


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_its_place_and_is_recorded_as_gone(served, stream, monkeypatch):
    calls = []
    monkeypatch.setattr(served.heard, "prepared", lambda session, call: calls.append(call) or call)
    served.heard.completions.clear()
    body = json.dumps({**ASK, "max_tokens": 900, "temperature": 5, "seed": 3, "stream": stream}).encode()
    host, port = served.at.url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.at.token}\r\n"
    for begun in range(12):  # more than there are places
        with socket.create_connection((host, int(port))) as line:
            line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if stream:
                assert b"200" in line.recv(64)
            else:
                until(lambda: len(calls) > begun)  # noqa: B023
    until(lambda: not served.engine.active and not served.engine.waiting)
    until(lambda: len(served.heard.completions) == 12)
    _, _, made, reason, _ = served.heard.completions[0]
    assert reason == "cancelled" and len(made.ids) < 900
    assert posted(served, json.dumps({**ASK, "max_tokens": 2}).encode())[0] == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"{", "not valid JSON"), (b"[]", "expected a JSON object"), (b"", "not valid JSON"), (b"\xff\xfe", "not valid JSON"),
     (b'{"model": "tiny", "temperature": NaN}', "NaN is no number"), (b"[" * 100_000, "not valid JSON"),
     (b'{"model": "tiny"}', "Missing required parameter: 'messages'"), (b'{"messages": [{"role": "user"}]}', "'model'")],
    ids=range(8),
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused_in_both_apis_words(served, body, words):
    status, answer = posted(served, body)
    assert status == 400 and words in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
    status, answer = posted(served, body, "/v1/messages")
    assert status == 400 and answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"


def test_a_token_of_ones_own_may_have_a_point(served):
    """What stands behind the whole of it and another point is a session."""
    body, keys = json.dumps({**ASK, "max_tokens": 1}).encode(), ("my.own", "my.own.two", "my", "my.", "my.ownx", ".own")
    served.heard.completions.clear()
    with running(Served(served.engine, ("tiny",), served.heard), "my.own") as at:
        assert [posted(replace(served, at=at), body, key=key)[0] for key in keys] == [200, 200, 401, 401, 401, 401]
    assert [told.session for told in served.heard.completions] == ["", "two"]


def test_what_is_not_there_is_said_in_json(served):
    status, answer = posted(served, b"{}", "/v1/embeddings")
    assert (status, answer["error"]["message"]) == (404, "This server has no POST /v1/embeddings.")
    status, answer = posted(served, b"{}", "/v1/models")
    assert status == 405 and answer["error"]["param"] is None


def test_a_body_that_is_too_large_is_refused(served, monkeypatch):
    monkeypatch.setattr("psigrad_serve.gateway.LARGEST", 1000)
    assert posted(served, b" " * 2000)[0] == 413


def test_a_server_that_is_full_says_so(served, monkeypatch):
    monkeypatch.setattr("psigrad_serve.served.MOST_WAITING", -1)
    status, answer = posted(served, json.dumps(ASK).encode())
    assert status == 429 and answer["error"]["code"] == "rate_limit_exceeded"


def test_a_failure_of_the_engine_is_the_servers_fault_and_passes(served, monkeypatch, caplog):
    def broken(self):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("psigrad_serve.engine.live_batch.LiveBatch.step", broken)
        status, answer = posted(served, json.dumps({**ASK, "max_tokens": 5}).encode())
    assert status == 500 and answer["error"]["type"] == "server_error" and "memory" not in answer["error"]["message"]
    assert posted(served, json.dumps({**ASK, "max_tokens": 5}).encode())[0] == 200


def test_other_threads_of_the_process_may_ask_the_engine_meanwhile(served):
    from psigrad.language.rollout.types import SamplingParams

    found = []
    asking = threading.Thread(target=lambda: found.append(served.engine.submit((5, 6), SamplingParams(9), 1).result()))
    asking.start()
    assert posted(served, json.dumps({**ASK, "max_tokens": 9}).encode())[0] == 200
    asking.join(60)
    assert found[0].ids == served.sampled((5, 6), 1, max_tokens=9).ids


ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS = {
    "/v1/chat/completions": {**ASK, "tools": [{"type": "function", "function": ADD}]},
    "/v1/responses": {"model": "tiny", "input": "Hi", "tools": [{"type": "function", **ADD}]},
    "/v1/messages": {**ASK, "max_tokens": 200, "tools": [{"name": "add", "input_schema": ADD["parameters"]}]},
}


def called(path: str, answer) -> tuple[list, str]:
    """(the arguments of the calls, the text) of an answer."""
    if path == "/v1/messages":
        said = answer["content"]
        return [b["input"] for b in said if b["type"] == "tool_use"], "".join(b["text"] for b in said if b["type"] == "text")
    if path == "/v1/responses":
        said = answer["output"]
        texts = [part["text"] for item in said if item["type"] == "message" for part in item["content"]]
        return [json.loads(item["arguments"]) for item in said if item["type"] == "function_call"], "".join(texts)
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    return [json.loads(call["function"]["arguments"]) for call in calls], message["content"] or ""


@pytest.mark.parametrize("path", TOOLS)
def test_what_the_model_wrote_is_answered_whatever_it_is(actor, path):
    """Half of a surrogate pair, which UTF-8 does not have, and numbers that JSON does not have: the latter are no call."""
    for written, calls in (
        ('"\\ud83d"', [{"a": "\ud83d"}]),
        ("1.5", [{"a": 1.5}]),
        ("NaN", []),
        ("-Infinity", []),
        ("1e999", []),
    ):
        text = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {written}}}}}\n</tool_call>'
        actor.says(text)
        status, answer = posted(actor, json.dumps(TOOLS[path]).encode(), path)
        assert status == 200 and called(path, answer) == (calls, "" if calls else text), written


def test_half_of_a_surrogate_pair_in_a_request_is_told_back(served):
    ask = {"model": "tiny", "prompt": "the \ud83d", "echo": True, "max_tokens": 1}
    status, answer = posted(served, json.dumps(ask).encode(), "/v1/completions")
    assert status == 200 and answer["choices"][0]["text"].startswith("the \ud83d")
    refused = ApiError("There is no \ud83d.").response("/v1/completions", "")
    assert json.loads(refused.body)["error"]["message"] == "There is no \ud83d." and refused.media_type == "application/json"


def test_a_client_that_leaves_within_its_body_is_no_error_of_the_server(served, caplog):
    host, port = served.at.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.at.token}\r\nContent-Length: 999\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as line:
        line.sendall(head.encode() + b"{")
        time.sleep(0.2)
    time.sleep(0.3)
    assert posted(served, json.dumps({**ASK, "max_tokens": 2}).encode())[0] == 200
    assert not [record for record in caplog.records if record.name == "uvicorn.error"]
