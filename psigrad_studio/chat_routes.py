"""The routes of the chat page: the list of models, streamed answers, and the choice between two answers."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import Field

from psigrad.errors import UserError
from psigrad_studio.chat_answers import ChatAnswer, Say, converse
from psigrad_studio.chat_question import ChatQuestion, abilities
from psigrad_studio.checkpoint_list import Checkpoint, find
from psigrad_studio.comparisons import ChatComparisons
from psigrad_studio.json_api import RequestForm
from psigrad_studio.label_api.store import LabelStore
from psigrad_studio.model_cache import ModelCache
from psigrad_studio.studio_settings import StudioSettings

LONGEST_MESSAGE = 20_000
LONGEST_TALK = 100_000
MOST_MESSAGES = 200
MOST_TOKENS = 4096
QUIET_SECONDS = 10.0
Id = Annotated[str, Field(min_length=1, max_length=64)]


class MessageForm(RequestForm):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[str, Field(max_length=LONGEST_MESSAGE)]


class AboutForm(RequestForm):
    """The body of a request about a model, by its id."""

    model: Id


class AnswerForm(RequestForm):
    """A question to one model, or to two that are compared."""

    models: Annotated[list[Id], Field(min_length=1, max_length=2)]
    messages: Annotated[list[MessageForm], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Annotated[str, Field(max_length=LONGEST_MESSAGE)] = ""
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 256
    temperature: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class StopForm(RequestForm):
    """The body of a request to stop an answer."""

    writing: Id


class ChoiceForm(RequestForm):
    """The body of a choice between two answers."""

    duel: Id
    choice: Literal["left", "right", "tie", "both_bad"]


class TakeBackForm(RequestForm):
    """The body of a request to take back the choice in a comparison."""

    duel: Id


def router(settings: StudioSettings, labels: LabelStore) -> APIRouter:
    """Return the routes of the chat page."""
    routes = APIRouter(prefix="/api/chat")
    models = ModelCache(settings.model_bytes)
    comparisons, stops = ChatComparisons(labels), dict[str, threading.Event]()

    @routes.get("/models")
    def listed() -> dict[str, Any]:
        found = find(settings.runs, settings.checkpoints).values()
        told = ("id", "name", "run", "step")
        return {"models": [{n: getattr(c, n) for n in told} | {"written": c.stamp // 10**6} for c in found]}

    @routes.post("/about")
    def about(form: AboutForm) -> dict[str, Any]:
        talks, follows = _abilities_of(_known(settings, [form.model])[0])
        return {"template": talks, "system": follows}

    @routes.post("/answer")
    async def answer(form: AnswerForm) -> StreamingResponse:
        question, wanted = _question(form), await asyncio.to_thread(_known, settings, form.models)
        turn, writing, stop = models.join(wanted), secrets.token_urlsafe(18), threading.Event()
        answers = [ChatAnswer(checkpoint) for checkpoint in wanted]
        comparison = comparisons.begin(*answers) if len(answers) == 2 else None
        sides = comparison.sides if comparison else (0,)
        first = {"event": "begun", "writing": writing, "duel": comparison.id if comparison else None}
        stops[writing] = stop

        def work(say: Say) -> None:
            try:
                converse(models, turn, question, answers, sides, stop, say)
            finally:
                stops.pop(writing, None)

        return StreamingResponse(_Events(first, work, stop).lines(), media_type="text/event-stream")

    @routes.post("/stop")
    async def halt(form: StopForm) -> dict[str, Any]:
        found = stops.get(form.writing)
        if found is not None:
            found.set()
        return {"stopped": found is not None}

    @routes.post("/choose")
    def choose(form: ChoiceForm) -> dict[str, Any]:
        return comparisons.choose(form.duel, form.choice)

    @routes.post("/undo")
    def undo(form: TakeBackForm) -> dict[str, Any]:
        return comparisons.undo(form.duel)

    return routes


@lru_cache(maxsize=256)
def _abilities_of(checkpoint: Checkpoint) -> tuple[bool, bool]:
    return abilities(checkpoint.tokenizer())


class _Events:
    """A stream of server-sent events from a thread to a client. When the client disconnects, the thread is signalled to stop."""

    def __init__(self, first: Mapping[str, Any], work: Any, stop: threading.Event) -> None:
        self._stop, self._queue = stop, asyncio.Queue[Mapping[str, Any] | None]()
        self._queue.put_nowait(first)
        loop = asyncio.get_running_loop()

        def tell(event: Mapping[str, Any] | None) -> None:
            try:
                loop.call_soon_threadsafe(self._queue.put_nowait, event)
            except RuntimeError:  # the server has stopped
                stop.set()

        def run() -> None:
            try:
                work(tell)
            except BaseException:
                tell({"event": "failed", "message": "The studio failed to answer; its terminal shows the error."})
                raise
            finally:
                tell(None)

        threading.Thread(target=run, name="chat", daemon=True).start()

    async def lines(self) -> AsyncIterator[str]:
        """Yield the events, and a comment during pauses, so that the connection stays open."""
        try:
            while True:
                try:
                    event = await asyncio.wait_for(self._queue.get(), QUIET_SECONDS)
                except TimeoutError:
                    yield ":\n\n"
                    continue
                if event is None:
                    return
                yield f"data: {json.dumps(event)}\n\n"
        finally:
            self._stop.set()


def _question(form: AnswerForm) -> ChatQuestion:
    roles = [said.role for said in form.messages]
    if any(role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)) or len(roles) % 2 == 0:
        raise UserError("The turns of a conversation must alternate and end with the user's; start a new conversation.")
    if not form.messages[-1].content:
        raise UserError("The message is empty; write something.")
    if sum(len(said.content) for said in form.messages) + len(form.system) > LONGEST_TALK:
        raise UserError(f"The conversation has more than {LONGEST_TALK} characters; start a new conversation.")
    messages = tuple(said.model_dump() for said in form.messages)
    seed = secrets.randbelow(2**31) if form.seed is None else form.seed
    return ChatQuestion(messages, seed=seed, **form.model_dump(exclude={"models", "messages", "seed"}))


def _known(settings: StudioSettings, ids: Sequence[str]) -> list[Checkpoint]:
    """Return the models with these ids, after listing the folders again. Raises an error for an unknown id."""
    found = find(settings.runs, settings.checkpoints)
    if any(name not in found for name in ids):
        raise UserError("This model is no longer in the runs folder; choose another.")
    return [found[name] for name in ids]
