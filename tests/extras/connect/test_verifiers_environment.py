"""Environments of verifiers as psigrad's, against a stand-in that asks its model as version 0.4 does: over HTTP.

tests/extras/verifiers has the package itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import urllib.error
import urllib.request
from types import ModuleType, SimpleNamespace

import pytest

from psigrad.errors import UserError
from psigrad.language.episodes.environments import Fault, InProcess, Step
from psigrad_extras.connect.verifiers_environment import TASK, adapt

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = 'I add <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Guess:
    """Three guesses; verifiers' Env has a taskset, `serving` and `run_episode`, and its traces have the rewards."""

    def __init__(self, *, tools=(), stream=False, rewrites=False, fails="", tasks=4):
        self.tools, self.stream, self.rewrites, self.fails, self.served, self.answers = tools, stream, rewrites, fails, 0, []
        parts = {"role": "user", "content": [{"type": "text", "text": "guess"}]}
        prompts = [f"guess {n}" if n % 2 else [SimpleNamespace(model_dump=lambda: parts)] for n in range(tasks)]
        about = {"system_prompt": "a number"}
        data = [SimpleNamespace(idx=n, prompt=prompt, answer=str(n), **about) for n, prompt in enumerate(prompts)]
        self.taskset = [SimpleNamespace(data=one) for one in data]

    @contextlib.asynccontextmanager
    async def serving(self):
        self.served += 1
        yield

    async def run_episode(self, task, context):
        if self.fails == "at once":
            raise RuntimeError("no such world")
        if self.fails == "cancelled":
            raise asyncio.CancelledError
        said, turns = self.first(task.data), 0
        while turns < 3:
            answer = await asyncio.to_thread(self.ask, context, said)
            self.answers.append(answer)
            turns += 1
            if answer["content"] == task.data.answer:
                break
            shown = "higher" if answer["content"] < task.data.answer else "lower"
            said = [{"role": "user", "content": "summary"}] if self.rewrites else [*said, answer]
            calls = answer.get("tool_calls") or []
            said += [{"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in calls] or [
                {"role": "user", "content": shown}
            ]
        reward = float(answer["content"] == task.data.answer) - 0.1 * (turns - 1)
        error = SimpleNamespace(type="TaskError", message="the judge is out")
        trace = SimpleNamespace(reward=reward, agent=SimpleNamespace(trainable=True), errors=[error] if self.fails else [])
        other = SimpleNamespace(reward=100.0, agent=SimpleNamespace(trainable=False), errors=[])
        return SimpleNamespace(ok=not self.fails, traces=[trace, other], errors=[])

    def first(self, data):
        user = data.prompt if isinstance(data.prompt, str) else "guess"
        return [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": user}]

    def ask(self, context, messages):
        body = {
            "model": context.model,
            "messages": messages,
            "stream": self.stream,
            **({"tools": self.tools} if self.tools else {}),
        }
        url = f"{context.client.base_url}/chat/completions"
        sent = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sent, timeout=30) as given:
            text = given.read().decode()
        if not self.stream:
            return json.loads(text)["choices"][0]["message"]
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines[-1] == "[DONE]" and json.loads(lines[1])["choices"][0]["finish_reason"]
        return json.loads(lines[0])["choices"][0]["delta"]


@pytest.fixture(autouse=True)
def verifiers(monkeypatch):
    class Harness:
        def __class_getitem__(cls, kind):
            return cls

    own = ModuleType("verifiers.v1")
    own.Harness, own.HarnessConfig = Harness, object
    own.EvalClientConfig = own.ModelContext = SimpleNamespace
    loaders = ModuleType("verifiers.v1.utils.loaders")
    loaders.load_environment = lambda config: config.made
    loaders.resolve_env_config = lambda config: SimpleNamespace(**config)
    package = ModuleType("verifiers")
    package.v1 = own
    for module in (package, own, loaders, ModuleType("verifiers.v1.utils")):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_an_episode_that_is_cancelled_ends():
    with pytest.raises(UserError, match="never called the policy"):
        adapt(lambda: Guess(fails="cancelled")).rows(1, 0)


def begun(kind, number=0):
    episode = kind()
    rows = kind.rows(4, 0)
    return episode, episode.reset(rows[number])


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_harness_asks_is_read_and_what_the_policy_says_is_its_answer(stream):
    episode, opening = begun(adapt(lambda: Guess(stream=stream)), 2)
    assert opening is None
    assert episode.step("1") == ([{"role": "user", "content": "higher"}], 0.0, False)
    assert episode.step("3") == ([{"role": "user", "content": "lower"}], 0.0, False)
    assert episode.step("2") == ("", pytest.approx(1 - 0.2), True), "of the policy's trace alone"


def test_rows_are_the_tasksets_with_what_the_harness_adds():
    kind = adapt({"made": Guess(tools=TOOLS)})
    rows = kind.rows(9, 0)
    assert [row[TASK] for row in rows] == [0, 1, 2, 3], "it has no more"
    assert rows[1]["prompt"] == [{"role": "system", "content": "a number"}, {"role": "user", "content": "guess 1"}]
    assert rows[0]["prompt"][1] == {"role": "user", "content": "guess"} and rows[0]["tools"] == TOOLS
    assert "tools" not in adapt(Guess).rows(1, 0)[0]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_read_from_the_text_and_their_answers_have_its_name(stream):
    made = Guess(tools=TOOLS, stream=stream)
    episode, _ = begun(adapt(lambda: made))
    assert episode.step(CALL) == ([{"role": "tool", "content": "3", "name": "add"}], 0.0, False)
    (call,) = made.answers[-1]["tool_calls"]
    assert made.answers[-1]["content"] == CALL and json.loads(call["function"]["arguments"]) == {"a": 1}
    assert episode.step("0") == ("", pytest.approx(1 - 0.1), True)


def test_a_call_that_cannot_be_read_is_answered_without_the_harness():
    made = Guess(tools=TOOLS)
    episode, _ = begun(adapt(lambda: made, call_family="Hermes"))
    said, reward, done = episode.step('<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>')
    assert (said[0]["role"], reward, done) == ("tool", 0.0, False) and "not JSON" in said[0]["content"], said
    assert not made.answers
    with pytest.raises(UserError, match="did you mean 'Hermes'"):
        adapt(Guess, call_family="hermes")
    assert episode.step("0") == ("", 1.0, True)


def test_without_tools_a_text_is_no_call():
    made = Guess()
    episode, _ = begun(adapt(lambda: made))
    episode.step(CALL)
    assert "tool_calls" not in made.answers[-1]


def test_one_environment_serves_all_episodes_of_a_process_and_they_do_not_mix():
    made = []
    kind = adapt(lambda: made.append(Guess()) or made[-1])
    rows = kind.rows(4, 0)
    playing = InProcess(kind)
    assert playing.begin(rows) == [None] * 4
    assert [playing.step({n: str(n)})[n] for n in (2, 0, 3)] == [Step("", 1.0, True)] * 3
    assert playing.step({1: "3"})[1] == Step([{"role": "user", "content": "lower"}], 0.0, False)
    assert len(made) == made[0].served == 1


def test_an_episode_that_is_let_go_ends_and_leaves_no_thread(monkeypatch):
    ended = []

    class Watched(Guess):
        def ask(self, context, messages):
            try:
                return super().ask(context, messages)
            except urllib.error.HTTPError as error:
                ended.append(error.code)
                raise

    kind = adapt(Watched)
    rows = kind.rows(1, 0)
    episode = kind()
    episode.reset(rows[0])
    del episode
    for _ in range(200):
        if len(ended) == 2:  # the one that was asked for its rows, and this one
            break
        asyncio.run(asyncio.sleep(0.01))
    assert ended == [503, 503]


def test_a_harness_that_rewrites_what_was_said_is_a_fault():
    playing = InProcess(adapt(lambda: Guess(rewrites=True)))
    rows = adapt(Guess).rows(2, 0)
    playing.begin(rows)
    found = playing.step({0: "9"})[0]
    assert isinstance(found, Fault) and "rewrote its conversation" in found.reason


def test_faults_of_the_environment_say_why_and_give_no_reward():
    with pytest.raises(UserError, match=r"never called the policy \(no such world\)"):
        adapt(lambda: Guess(fails="at once")).rows(1, 0)
    kind = adapt(lambda: Guess(fails="at the end"))
    playing = InProcess(kind)
    playing.begin(kind.rows(1, 0))
    found = playing.step({0: "0"})[0]
    assert isinstance(found, Fault) and "TaskError: the judge is out" in found.reason


def test_rows_of_others_and_prompts_of_others_are_named():
    playing = InProcess(adapt(Guess))
    (found,) = playing.begin([{"prompt": [{"role": "user", "content": "hi"}]}])
    assert isinstance(found, Fault) and "the row has no task_idx" in found.reason
    (found,) = playing.begin([{"prompt": [{"role": "user", "content": "hi"}], TASK: 0}])
    assert isinstance(found, Fault) and "system prompt or tools differ from the first" in found.reason


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UserError, match=r"pip install 'verifiers>="):
        adapt(Guess).rows(1, 0)
