"""The gateway of a training run, for its agents alone. A client's API key is the name of its session."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace

from psigrad.config.language import Played
from psigrad.importing import imported_callable
from psigrad.language.data.chat.messages import Message
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.rollout.types import Completion, FinishReason, Sampler
from psigrad.processes.sandbox import enclosure_of_workers
from psigrad_serve.agents.agent_rollouts import AgentPool, Agents
from psigrad_serve.agents.agent_session import Session, SessionOver
from psigrad_serve.agents.agent_worker import AgentCommand
from psigrad_serve.agents.token_tree import Asked
from psigrad_serve.agents.tunnel import opened
from psigrad_serve.api_errors import ApiError
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Call, Recorder, Served
from psigrad_serve.serving import running
from psigrad_serve.writer import Writer

Ids = tuple[int, ...]


class AgentGateway(Recorder):
    """The server that the agents of a run query. It passes each request to its session, and records the completions there.

    It starts when `serve` gives it a sampler. With `tunnel`, it also listens on a Unix socket, for agents without a network.
    """

    def __init__(self, tunnel: bool = False) -> None:
        self.sessions: dict[str, Session] = {}
        """The running sessions by name."""
        self.address = ""
        self._under_way: dict[tuple[str, int], tuple[Session, list[Asked], set[int], int]] = {}
        self._stack, self._whole = contextlib.ExitStack(), contextlib.ExitStack()
        self._sampler: Sampler | None = None
        self.tunnel = self._whole.enter_context(opened(self._reach)) if tunnel else ""
        """The path of the Unix socket; "" if there is none."""

    def serve(self, sampler: Sampler, model: LanguageModel) -> None:
        """Start the server, or restart it if it runs with another sampler than this one."""
        if self._sampler is sampler:
            return
        self._stack.close()
        self._sampler = sampler
        engine = SamplingEngine(model, sampler=sampler)
        self._stack.callback(engine.close)
        # The name of a session is its key.
        self.address = self._stack.enter_context(running(Served(engine, recorder=self), token="")).url

    def close(self) -> None:
        """Stop the server and remove the socket."""
        self._stack.close()
        self._whole.close()

    def _reach(self) -> socket.socket:
        host, _, port = self.address.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)))

    def prepare(self, session_id: str, call: Call) -> Call:
        """Return the call with its session's tokens and seeds, and with the run's sampling settings.

        The policy therefore reads the session's earlier tokens exactly, and the sampled distribution is the trained one.
        """
        session = self.sessions.get(session_id)
        if session is None:
            raise ApiError("This session does not exist, or its agent has ended.", status=403, code="session_over")
        row, ids = session.read(call.row, call.prompt_ids)
        try:
            asked = [session.ask(row, ids) for _ in range(call.n)]
        except SessionOver as error:
            raise ApiError(str(error), status=403, code="session_over") from None
        own = session.params
        if call.wish.grammar:
            why = (
                "The tokens of this session are trained on, so they must be sampled, not forced; remove response_format and "
                "tool_choice."
            )
            raise ApiError(why, code="unsupported_parameter")
        stops = tuple(dict.fromkeys((*own.stop_token_ids, *call.params.stop_token_ids)))
        params = replace(own, max_tokens=min(own.max_tokens, call.params.max_tokens), stop_token_ids=stops)
        self._under_way[session_id, asked[0].seed] = session, asked, set(range(call.n)), call.params.max_tokens
        return replace(call, row=row, prompt_ids=asked[0].prompt_ids, params=params, seed=asked[0].seed, wish=type(call.wish)())

    def on_completion(self, session_id: str, call: Call, completion: Completion, reason: str, choice: int) -> None:
        """Add the completion to its session's tree. A cancelled one counts too, since the client may have seen a part of it."""
        session, asked, left, wished = self._under_way[session_id, call.seed]
        left.discard(choice)
        if not left:
            del self._under_way[session_id, call.seed]
        # An answer with the length that the agent itself asked for is complete; one at the run's limit is cut.
        whole_length = wished < session.params.max_tokens and len(completion.ids) == wished
        finish: FinishReason = "length" if reason == "length" and not whole_length else "stop"
        made = replace(completion, finish_reason=finish, seed=asked[choice].seed)
        reply, whole = _reply(session, call, completion.ids)
        session.answer(asked[choice], call.row, made, reply, whole and reason != "cancelled")


def _reply(session: Session, call: Call, ids: Ids) -> tuple[Message, bool]:
    """Return (the answer as the message that its client gets, True if the message has all of the sampled text)."""
    writer = Writer(session.tokenizer, call.stop, call.offered)
    writer.take(ids)
    writer.flush()
    text = writer.news()
    rest, calls = writer.end()
    made: Message = {"role": "assistant", "content": text + rest}
    if calls:
        said = [{"type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in calls]
        made["tool_calls"] = said
    return made, not (writer.stopped or writer.short)


def open_agents(config: Played) -> Agents:
    """Return the `Agents` of a run: killable workers that run its agent, and their server. Each training process has its own."""
    agent = imported_callable(config.agent, "agent") if isinstance(config.agent, str) and config.agent else config.agent
    gateway = AgentGateway(tunnel=config.environment_sandbox)
    try:
        pool = AgentPool(
            agent or AgentCommand(config.agent_command),
            timeout=config.agent_timeout,
            workers=config.agent_workers,
            memory_gb=config.worker_memory_gb,
            variables=config.worker_env,
            enclosure=enclosure_of_workers((*config.environment_files, gateway.tunnel), sockets=True) if gateway.tunnel else None,
        )
    except BaseException:
        gateway.close()
        raise
    return Agents(pool, gateway, config.agent_calls)
