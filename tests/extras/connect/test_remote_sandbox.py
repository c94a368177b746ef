"""A service over HTTP runs programs: what it is sent, what it answers, and what is no answer."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from psigrad.language.rewards.code import Code
from psigrad.processes.sandbox import Limits, Program, SandboxError
from psigrad_extras.connect.remote_sandbox import RemoteExecutor


class Service(BaseHTTPRequestHandler):
    """A sandbox service that knows one program: it doubles what it reads."""

    asked: ClassVar[list[dict]] = []
    tokens: ClassVar[list[str | None]] = []
    answer: bytes | None = None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.tokens.append(self.headers["Authorization"])
        outcomes = []
        for program in body["programs"]:
            answers = [{"value": {"int": hex(2 * int(e[2:-1]))}} for e in program["expressions"]]
            outcomes.append({"status": "exited", "stdout": program["stdin"] * 2, "answers": answers})
        reply = self.answer if self.answer is not None else json.dumps({"outcomes": outcomes}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *given):
        pass


@pytest.fixture
def service():
    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    Service.asked, Service.tokens, Service.answer = [], [], None
    yield f"http://127.0.0.1:{server.server_port}/run"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_service_over_http_judges_and_never_sees_what_is_expected(service):
    rows = [["assert f(3) == 6", "assert f(4) == 8"], ["assert f(3) == 7777"]]
    right, wrong = Code(service=service)(["def f(x): ..."] * 2, tests=rows)
    assert right == 1.0 and wrong == 0.0
    assert [p["expressions"] for p in Service.asked[0]["programs"]] == [["f(3)", "f(4)"], ["f(3)"]]
    assert "7777" not in json.dumps(Service.asked)


def test_the_first_test_that_fails_ends_a_program(service):
    """The service prints its stdin twice."""
    tests = [{"input": "a", "output": "aa"}, {"input": "b", "output": "b"}, {"input": "c", "output": "cc"}]
    (wrong,) = Code(service=service)(["..."], tests=[tests])
    assert wrong == 0.0 and wrong.reason == "test 2 of 3: the output differs from the expected one"
    assert [program["stdin"] for asked in Service.asked for program in asked["programs"]] == ["a", "b"]
    Service.asked.clear()
    assert Code(service=service, partial=True)(["..."], tests=[tests]) == [2 / 3]
    assert [program["stdin"] for asked in Service.asked for program in asked["programs"]] == ["a", "b", "c"]


def test_the_token_is_sent_and_limits_too(service):
    (outcome,) = RemoteExecutor(service, "secret").run([Program("x", "ab")], Limits(seconds=3.0))
    assert outcome.stdout == "abab" and Service.tokens == ["Bearer secret"] and Service.asked[0]["limits"]["seconds"] == 3.0


@pytest.mark.parametrize(
    "answer", [b"", b"no JSON", b"{}", b'{"outcomes": []}', b'{"outcomes": [{"status": "fine"}]}', b'{"outcomes": [7]}']
)
def test_an_answer_that_is_none_is_the_services_fault(service, answer):
    Service.answer = answer
    with pytest.raises(SandboxError, match="no usable answer"):
        RemoteExecutor(service).run([Program("x")], Limits())


def test_a_service_that_is_not_there_or_no_url_is_named():
    with pytest.raises(SandboxError, match="no usable answer"):
        RemoteExecutor("http://127.0.0.1:9").run([Program("x")], Limits())
    with pytest.raises(SandboxError, match="is not a URL"):
        RemoteExecutor("sandbox.example")


def test_what_is_no_http_is_no_answer():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            come, _ = listening.accept()
            with come:
                come.recv(1 << 16)
                come.sendall(b"HTTP/1.1 fine\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(SandboxError, match="no usable answer \\(the request failed: BadStatusLine"):
            RemoteExecutor(f"http://127.0.0.1:{listening.getsockname()[1]}").run([Program("x")], Limits())
        thread.join(10)
