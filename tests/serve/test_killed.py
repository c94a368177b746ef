"""What a server that is killed had acknowledged is with its clients; what it remembered is gone, and asking for it is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Served
from psigrad_serve.serving import running

ASK = {"model": "tiny", "input": "Hi there", "max_output_tokens": 6, "extra_body": {"seed": 6}}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="mine", max_retries=0, timeout=60)


def refuses(client: openai.OpenAI, name: str) -> None:
    """OpenAI's own error for a response that is not there; the conversation itself is answered."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, previous_response_id=name)
    assert refused.value.code == "previous_response_not_found" and refused.value.param == "previous_response_id"
    assert refused.value.type == "invalid_request_error" and name in refused.value.message


def test_a_server_that_was_started_again_says_that_it_remembers_no_response(small_model):
    engine, answers = SamplingEngine(small_model), []
    for _ in range(2):
        with running(Served(engine, ("tiny",)), "mine") as at, client_of(at.url) as client:
            if answers:
                refuses(client, answers[0].id)
            answers.append(client.responses.create(**ASK))
            client.responses.create(**ASK, previous_response_id=answers[-1].id)  # control: this one is remembered
    assert answers[0].output_text == answers[1].output_text and answers[0].id != answers[1].id
    engine.close()


@contextlib.contextmanager
def serving(folder) -> Iterator[tuple[subprocess.Popen, str]]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "psigrad", "serve", str(folder), "--name", "tiny", "--port", str(port), "--threads", "1"]
    variables = {**os.environ, "PSIGRAD_SERVE_TOKEN": "mine"}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "psigrad serve" in process.stdout.readline()
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.slow
def test_kill_9_of_psigrad_serve(small_model, tmp_path):
    small_model.save(tmp_path / "model")
    with serving(tmp_path / "model") as (process, url), client_of(url) as client:
        finished = client.responses.create(**ASK)
        under_way = client.responses.create(**{**ASK, "max_output_tokens": 1000}, temperature=2, stream=True)
        kinds = [next(iter(under_way)).type]
        process.kill()
        with pytest.raises(Exception, match=r"closed|incomplete|reset|Connection"):  # never as if it had ended
            kinds += [event.type for event in under_way]
        assert not {"response.completed", "response.incomplete"} & set(kinds)
    with serving(tmp_path / "model") as (_, url), client_of(url) as client:
        refuses(client, finished.id)
        assert client.responses.create(**ASK).output_text == finished.output_text
