"""Which executor a run gets: this machine's sandbox, a service over HTTP, none where it is allowed, and else a refusal."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from psigrad.config import OnlineConfig, Run
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.language.rewards.code import Code
from psigrad.processes.sandbox import Limits, Program, SandboxError, Tier, choice, executor_for
from psigrad.processes.sandbox.bubblewrap import Bubblewrap
from psigrad.processes.sandbox.choice import Unsafe
from psigrad.records.run_folder import RunFolder
from psigrad.runs.journal import Journal
from psigrad_extras.connect.remote_sandbox import RemoteExecutor

NONE = Tier("none", why_not="bwrap not found; install bubblewrap.")


@pytest.fixture
def no_sandbox(monkeypatch):
    monkeypatch.setattr(choice, "tier_of_this_machine", lambda: NONE)


@pytest.mark.needs("bubblewrap")
def test_this_machines_sandbox_comes_first_even_where_unsafe_code_is_allowed():
    assert isinstance(executor_for(), Bubblewrap) and isinstance(executor_for(allow_unsafe_code=True), Bubblewrap)


def test_without_a_sandbox_code_is_refused_with_what_to_install(no_sandbox):
    with pytest.raises(SandboxError, match=r"install bubblewrap.*allow_unsafe_code"):
        executor_for()


def test_without_a_sandbox_programs_run_only_where_that_is_allowed_in_so_many_words(no_sandbox):
    executor = executor_for(allow_unsafe_code=True)
    assert isinstance(executor, Unsafe)
    printed, valued = executor.run(
        [Program("print(int(input()) + 1)", "3"), Program("def f(x): return x * 2", expressions=("f(21)", "f(None)"))],
        Limits(seconds=60.0),
    )
    (endless,) = executor.run([Program("while True: pass")], Limits(seconds=1.0))
    assert printed.stdout == "4\n" and printed.status == "exited"
    assert valued.values[0] == 42 and "TypeError" in valued.values[1].reason
    assert endless.status == "timeout"


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
    thread = threading.Thread(target=server.serve_forever, daemon=True)
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
    assert wrong == 0.0 and wrong.reason == "test 2 of 3: it printed something else"
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


@pytest.mark.needs("bubblewrap")
def test_a_run_that_allows_unsafe_code_says_so_and_records_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("psigrad.language.recipes.scorers.tier_of_this_machine", lambda: Tier("none", why_not="not here."))
    settings = OnlineConfig(reward=({"reward": "code", "allow_unsafe_code": True},), run=Run(output_dir=str(tmp_path / "run")))
    with RunFolder.open(tmp_path / "run", {}) as folder, RewardSetup.of(settings).scorer(None, Journal(folder)):
        pass
    assert "without a sandbox, with your rights" in capsys.readouterr().err
    assert '"unsafe_code"' in (tmp_path / "run" / "events.jsonl").read_text()
    safe = OnlineConfig(reward=("code",), run=Run(output_dir=str(tmp_path / "safe")))
    with RunFolder.open(tmp_path / "safe", {}) as folder, RewardSetup.of(safe).scorer(None, Journal(folder)):
        pass
    assert capsys.readouterr().err == ""
