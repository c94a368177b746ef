"""What a server that is killed had acknowledged is with its clients; what it remembered is in --state, or is refused by name."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

from psigrad.errors import UserError
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.remembered import Remembered
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


@pytest.mark.parametrize("state", ["", "kept"])
def test_a_server_that_was_started_again_remembers_with_a_state_and_says_so_without(small_model, state, tmp_path):
    engine, answers, folder = SamplingEngine(small_model), [], state and str(tmp_path / state)
    for _ in range(2):
        with running(Served(engine, ("tiny",), state=folder), "mine") as at, client_of(at.url) as client:
            if answers and not state:
                refuses(client, answers[0].id)
            answers.append(client.responses.create(**ASK))
            told = [client.responses.create(**ASK, previous_response_id=one.id) for one in (answers if state else answers[-1:])]
            assert len({one.output_text for one in told}) == 1 and told[0].usage.input_tokens > answers[0].usage.input_tokens
    assert answers[0].output_text == answers[1].output_text and answers[0].id != answers[1].id
    engine.close()


def test_the_oldest_are_forgotten_and_a_file_that_is_none_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("psigrad_serve.remembered.MOST", 3)
    kept = Remembered(str(tmp_path / "new"))
    for n in range(5):
        kept.add(f"resp_{n}", [{"role": "user", "content": f"{n} \ud800 é"}])
    again = Remembered(str(tmp_path / "new"))
    assert [again.find(f"resp_{n}") is not None for n in range(5)] == [False, False, True, True, True]
    assert again.find("resp_4") == [{"role": "user", "content": "4 \ud800 é"}]
    del kept, again
    for file in (tmp_path / "new").glob("responses.db*"):
        file.write_text("no database at all")
    theirs = tmp_path / "new" / "responses.db"
    for folder, why in (
        ("new", "Responses cannot be stored in "),
        ("", "holds files that this com"),
        (theirs, "is a file"),
    ):
        with pytest.raises(UserError, match=rf"{why}.* as --state"):
            Remembered(str(tmp_path / folder))


@contextlib.contextmanager
def serving(folder) -> Iterator[tuple[subprocess.Popen, str]]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "psigrad", "serve", str(folder), "--name", "tiny", "--port", str(port), "--threads", "1",
               "--state", str(folder.parent / "kept")]  # fmt: skip
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
        assert client.responses.create(**ASK, previous_response_id=finished.id).status in ("completed", "incomplete")
        assert client.responses.create(**ASK).output_text == finished.output_text
