"""Environments of the library verifiers, with the interface of its version 0.4: tasksets, harnesses, traces.

In verifiers, a harness (an agent's program) requests each turn from a model on a server. Here this module is that server, with
the policy behind it: a request of the harness is an observation, and the policy's completion is the server's answer.

Source: https://github.com/PrimeIntellect-ai/verifiers.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

from psigrad import extras
from psigrad.errors import UserError, nearest, reason_of
from psigrad.language.episodes.environments import Message, Observation
from psigrad.language.episodes.tool_calls import FAMILIES, BrokenCall, ToolCall
from psigrad.language.episodes.tools import CallForm

# The column of a row with the index of its task in the taskset.
TASK = "task_idx"


def adapt(environment: Mapping[str, Any] | Callable[[], Any], call_family: str = "") -> type:
    """Return an environment of verifiers as a class for `--environment`. `environment` is its settings, or makes it.

    ```python
    from psigrad_extras.connect.verifiers_environment import adapt

    agent = {"harness": {"id": "psigrad-chat"}, "runtime": {"type": "subprocess"}}
    Wordle = adapt({"taskset": {"id": "textarena", "game": "Wordle-v0"}, "player": agent})
    ```

    The harness psigrad-chat is a chat without tools in the environment's worker. Any other harness works if it only
    appends to its conversation and never rewrites it. The taskset supplies the rows. The last turn gets the trace's reward.
    `max_turns` must not be below the environment's own limit. `call_family` names the syntax of tool calls, such as Hermes.
    Without it, all known syntaxes are tried.
    """
    known = [family.name for family in FAMILIES]
    if call_family and call_family not in known:
        raise UserError(f"There is no call_family {call_family!r}; expected {', '.join(known)}{nearest(call_family, known)}")
    given = staticmethod(environment) if callable(environment) else environment
    return type("VerifiersEpisode", (VerifiersEpisode,), {"environment": given, "form": CallForm(call_family)})


def adapt_named(taskset: str) -> type:
    """Return the environment of `verifiers:TASKSET`: that taskset with the harness psigrad-chat.

    The harness takes the place of the agent named `agent`, or SEAT for `verifiers:TASKSET:SEAT`.
    """
    name, _, seat = taskset.partition(":")
    if not name:
        raise UserError("The environment 'verifiers:' names no taskset; give one after the colon, such as verifiers:gsm8k.")
    return adapt(
        {"taskset": {"id": name}, seat or "agent": {"harness": {"id": "psigrad-chat"}, "runtime": {"type": "subprocess"}}}
    )


class VerifiersEpisode:
    """One episode. `adapt` returns a subclass with an environment of verifiers, which runs all episodes of a process."""

    environment: Any = None
    form = CallForm()
    _house: _House | None = None

    @classmethod
    def house(cls) -> _House:
        """Return the running environment that all episodes of this class share. It is started on first use."""
        if cls._house is None:
            cls._house = _House(cls.environment)
        return cls._house

    def reset(self, row: Mapping[str, Any]) -> Observation | None:
        """Start the row's task. Return the messages after the row's prompt in the harness's first request, or None."""
        if not isinstance(row.get(TASK), int):
            raise ValueError(f"the row has no {TASK}; remove the dataset, since verifiers makes its own rows")
        self._talk = _Talk(self.house(), row[TASK])
        prompt = [_plain(message) for message in row["prompt"]]
        self._said, tools = self._talk.asked()
        offered = [tool["function"] for tool in tools]
        self._parameters = {tool["name"]: (tool.get("parameters") or {}).get("properties") or {} for tool in offered}
        if self._said[: len(prompt)] != prompt or tools != (row.get("tools") or []):
            raise ValueError("this task's system prompt or tools differ from the first task's; use another harness")
        return self._said[len(prompt) :] or None

    def step(self, completion: str) -> tuple[Observation, float, bool]:
        """Send the completion to the harness. Return the new messages of its next request, or at the end the reward.

        If a tool call is malformed, return an error as observation instead, without the harness.
        """
        found = self.form.read(completion, self._parameters) if self._parameters else []
        if broken := [call for call in found if isinstance(call, BrokenCall)]:
            return [{"role": "tool", "name": "error", "content": f"error: {call.reason}"} for call in broken], 0.0, False
        self._talk.answer(completion, [call for call in found if isinstance(call, ToolCall)])
        before = [*self._said, {"role": "assistant", "content": completion}]
        try:
            self._said, _ = self._talk.asked()
        except _EndedError as end:
            return "", end.reward(), True
        # The harness may return the policy's own turns in another format, so they are not compared.
        for said, now in itertools.zip_longest(before, self._said[: len(before)]):
            if now is None or said["role"] != now["role"] or (said != now and said["role"] != "assistant"):
                raise ValueError("the harness rewrote its conversation; use one that only adds to it, such as psigrad-chat")
        return self._said[len(before) :], 0.0, False

    def __del__(self) -> None:
        if hasattr(self, "_talk"):
            self._talk.close()

    @classmethod
    def rows(cls, count: int, seed: int) -> list[Mapping[str, Any]]:
        """Return the first tasks of the taskset as rows, with the system prompt and tools that the harness adds to the first."""
        own = cls.house()
        tasks = [own.task(number) for number in range(count) if own.task(number) is not None]
        talk = _Talk(own, 0)
        try:
            asked, tools = talk.asked()
        except _EndedError as end:
            raise UserError(f"The environment never called the policy ({end.why()}); check its taskset and harness.") from end
        finally:
            talk.close()
        head = asked[: max(0, len(asked) - len(_prompt(tasks[0])))]
        if not asked or asked != [*head, *_prompt(tasks[0])]:
            raise UserError("The harness does not send its task's prompt; use another harness, such as psigrad-chat.")
        more = {"tools": tools} if tools else {}
        return [{"prompt": [*head, *_prompt(task)], TASK: number, **more} for number, task in enumerate(tasks)]


class _House:
    """A running environment of verifiers, in its own thread, and the server through which its harness queries the policy."""

    def __init__(self, environment: Mapping[str, Any] | Callable[[], Any]) -> None:
        with extras.needing("An environment of verifiers", "verifiers"):
            import verifiers.v1 as verifiers
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        _offer_chat(verifiers)
        given = environment() if callable(environment) else load_environment(resolve_env_config(dict(environment)))
        self.verifiers, self.environment, self._unread, self._tasks = verifiers, given, iter(given.taskset), list[Any]()
        self.talks: dict[str, _Talk] = {}
        self.loop = asyncio.new_event_loop()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Policy, self.talks))
        for work in (self.loop.run_forever, self.server.serve_forever):
            threading.Thread(target=work, name="an environment of verifiers", daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        for name in ("no_proxy", "NO_PROXY"):  # a proxy cannot reach this machine's loopback address
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
        serving = self.environment.serving()
        self.run(serving.__aenter__()).result()
        # It serves as long as this process lives. If the process is killed, everything that it started ends with it.
        atexit.register(lambda: self.run(serving.__aexit__(None, None, None)).result(30.0))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Start this coroutine in the environment's thread, and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def task(self, number: int) -> Any:
        """Return the task of that number, or None if the taskset has fewer."""
        self._tasks += itertools.islice(self._unread, max(0, number + 1 - len(self._tasks)))
        return self._tasks[number] if number < len(self._tasks) else None


class _Policy(BaseHTTPRequestHandler):
    """The server's request handler: /EPISODE/v1/chat/completions waits for the policy's next turn in that episode."""

    def __init__(self, talks: Mapping[str, _Talk], *connection: Any) -> None:
        self.talks = talks
        super().__init__(*connection)

    def do_POST(self) -> None:
        """Answer a request of the harness."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        talk = self.talks.get(self.path.split("/")[1])
        said = None if talk is None else talk.ask(body)
        if said is None:
            self.send_error(503, "the episode is over")
            return
        streams = bool(body.get("stream"))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if streams else "application/json")
        self.end_headers()
        self.wfile.write(_reply(*said, str(body.get("model", "policy")), streams).encode())

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


class _EndedError(Exception):
    """The end of an episode, with the result of verifiers or an exception."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def reward(self) -> float:
        """Return the reward of the policy's trace. Raises `RuntimeError` if there is none."""
        if isinstance(self.made, BaseException) or not self.made.ok:
            raise RuntimeError(self.why()) from self
        return float(sum(trace.reward for trace in self.made.traces if trace.agent.trainable))

    def why(self) -> str:
        """Return the reason why the episode failed."""
        if isinstance(self.made, BaseException):
            return reason_of(self.made)
        errors = [*self.made.errors, *(error for trace in self.made.traces for error in trace.errors)]
        return "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode ended at once"


class _Talk:
    """The conversation of an episode: the requests of the harness, and the answers of the policy."""

    def __init__(self, house: _House, number: int) -> None:
        self._house, self._name = house, str(next(_NUMBERS))
        self._asked, self._answers = queue.SimpleQueue[Any](), queue.SimpleQueue[tuple[str, Sequence[ToolCall]] | None]()
        house.talks[self._name] = self
        own = house.verifiers
        client = own.EvalClientConfig(base_url=f"{house.address}/{self._name}/v1", api_key_var="PSIGRAD_CALLS_NOBODY")
        self._run = house.run(self._play(house.task(number), own.ModelContext(model="policy", client=client)))

    def close(self) -> None:
        """End the episode now. Later requests of its harness get no answer."""
        self._run.cancel()
        self._house.talks.pop(self._name, None)
        self._answers.put(None)

    def asked(self) -> tuple[list[Message], list[Any]]:
        """Wait for the harness's next request. Return (its conversation, its tools). Raises `_EndedError` at the end."""
        found = self._asked.get()
        if not isinstance(found, dict):
            raise _EndedError(found)
        named = {call["id"]: call["function"]["name"] for m in found["messages"] for call in m.get("tool_calls") or ()}
        said = [
            {**_plain(m), **({"name": named.get(m["tool_call_id"], "")} if m["role"] == "tool" else {})}
            for m in found["messages"]
        ]
        return said, found.get("tools") or []

    def answer(self, text: str, called: Sequence[ToolCall]) -> None:
        """Answer the harness's request with the policy's turn and its tool calls."""
        self._answers.put((text, called))

    def ask(self, body: dict[str, Any]) -> tuple[str, Sequence[ToolCall]] | None:
        """Pass a request of the harness on. Return (the policy's turn, its tool calls), or None if the episode is over."""
        self._asked.put(body)
        return self._answers.get()

    async def _play(self, task: Any, context: Any) -> None:
        try:
            self._asked.put(await self._house.environment.run_episode(task, context))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # without an end the policy would wait for ever
            self._asked.put(error)


_NUMBERS = itertools.count()


def _plain(message: Any) -> Message:
    """Return a message of verifiers as a mapping with role and text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    return {"role": message["role"], "content": content}


def _prompt(task: Any) -> list[Message]:
    """Return the messages of a task: its system prompt and its prompt."""
    system, prompt = task.data.system_prompt, task.data.prompt
    said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [m.model_dump() for m in prompt or ()]
    return [*([{"role": "system", "content": system}] if system else []), *map(_plain, said)]


def _reply(text: str, called: Sequence[ToolCall], model: str, streams: bool) -> str:
    """Return the policy's turn as the body of an OpenAI-compatible server's answer: complete, or as the chunks of a stream."""
    asked = [
        {
            "index": n,
            "id": f"call-{next(_NUMBERS)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for n, call in enumerate(called)
    ]
    message = {"role": "assistant", "content": text, **({"tool_calls": asked} if asked else {})}
    why = "tool_calls" if asked else "stop"
    kind, said = ("chat.completion.chunk", "delta") if streams else ("chat.completion", "message")
    parts = [(message, None), ({}, why)] if streams else [(message, why)]
    choices = [{"index": 0, said: part, "finish_reason": end} for part, end in parts]
    bodies = [json.dumps({"id": "policy", "created": 0, "model": model, "object": kind, "choices": [one]}) for one in choices]
    return "".join(f"data: {part}\n\n" for part in (*bodies, "[DONE]")) if streams else bodies[0]


def _offer_chat(verifiers: Any) -> None:
    """Register the harness psigrad-chat as a module, since verifiers finds a harness by the name of a module."""

    class ChatHarness(verifiers.Harness[verifiers.HarnessConfig]):  # type: ignore[misc]
        """A chat without tools: a turn for each message, in this process. Other harnesses start a program for each episode."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any) -> Any:
            import httpx
            from verifiers.v1.dialects.chat import message_to_wire

            system, prompt = self.resolve_prompt(data)
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(m) for m in prompt]
            body = {"model": ctx.model, "messages": [*([{"role": "system", "content": system}] if system else []), *said]}
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                given = await client.post(
                    f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                )
            return verifiers.ProgramResult(int(given.is_error), "", given.text if given.is_error else "")

    module = ModuleType("psigrad_chat")
    module.__dict__.update(__all__=["ChatHarness"], ChatHarness=ChatHarness)
    sys.modules.setdefault(module.__name__, module)
