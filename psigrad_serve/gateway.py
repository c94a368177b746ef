"""The web application of the gateway: routes, authentication, and complete or streamed answers.

A client names its session by the path `/s/SESSION/v1/…` or by the key `TOKEN.SESSION`. The recorder receives this name.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from psigrad.errors import UserError
from psigrad_serve.anthropic_messages import AnthropicMessages, count_tokens
from psigrad_serve.api_base import Api
from psigrad_serve.api_errors import ApiError, as_json
from psigrad_serve.chat_completions import ChatCompletions
from psigrad_serve.forms import read_json
from psigrad_serve.responses_api import Responses
from psigrad_serve.served import Served, ServedAnswer, ServedPiece, gathered, merged
from psigrad_serve.text_completions import TextCompletions

T = TypeVar("T")
LARGEST = 32 << 20
"""The maximal bytes of a request's body."""
GONE = "The client has gone."


APIS: dict[str, Callable[[Served, dict[str, Any]], Api[Any]]] = {
    "/v1/chat/completions": ChatCompletions,
    "/v1/completions": TextCompletions,
    "/v1/responses": Responses,
    "/v1/messages": AnthropicMessages,
}


def gateway(served: Served, token: str = "") -> FastAPI:
    """Return the web application. Clients must send `token`, if it is not "", as OpenAI's or Anthropic's API key."""
    routes = _routes(served)
    app = guarded(token)
    app.include_router(routes)
    app.include_router(routes, prefix="/s/{session}")
    return app


def guarded(token: str = "") -> FastAPI:
    """Return a web application that has authentication and error responses, but no routes."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for kind in (ApiError, HTTPException, UserError, Exception):
        app.add_exception_handler(kind, _refused)
    app.add_middleware(KeyGuard, token=token)
    return app


def _routes(served: Served) -> APIRouter:
    routes = APIRouter()
    began = int(time.time())

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": began,
            "owned_by": "psigrad",
            "max_model_len": served.engine.model.max_length,
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in served.names or ("policy",)]}

    @routes.get("/v1/models/{name:path}")
    async def one(name: str) -> dict[str, Any]:
        served.check_model(name)
        return model(name)

    @routes.post("/v1/messages/count_tokens")
    async def count(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(count_tokens, served, read_json(await _body(request)))

    for path, api in APIS.items():
        routes.add_api_route(path, _asked(served, api), methods=["POST"])
    return routes


def _asked(served: Served, api: Callable[[Served, dict[str, Any]], Api[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def asked(request: Request) -> Response:
        body = await _body(request)
        # Other requests are answered while a long prompt is rendered and encoded.
        made = await unless_gone(request, asyncio.to_thread(lambda: api(served, read_json(body))))
        session = request.state.session
        made.calls = [served.settled(session, call) for call in made.calls]  # all of them before sampling starts
        answers = [ServedAnswer(served, session, call) for call in made.calls]
        if not made.form.stream:
            choices = await unless_gone(request, gathered(answers))
            return as_json(await asyncio.to_thread(made.whole, choices))  # many tokens may take long to format
        pieces = merged(answers)
        first = await unless_gone(request, anext(pieces))
        return StreamingResponse(_events(made, first, pieces), media_type="text/event-stream")

    return asked


async def _events(
    api: Api[Any], first: tuple[int, ServedPiece], pieces: AsyncGenerator[tuple[int, ServedPiece]]
) -> AsyncIterator[str]:
    """Yield the server-sent events of a streamed answer, as text. All events of a piece are sent together."""
    async with contextlib.aclosing(pieces):
        yield "".join([*api.begin(), *api.piece(*first)])
        async for place, piece in pieces:
            if text := "".join(api.piece(place, piece)):
                yield text
        if text := "".join(api.end()):
            yield text


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > LARGEST:
                raise ApiError(f"The body has more than {LARGEST >> 20} MiB; shorten it.", status=413)
    except ClientDisconnect:
        raise ApiError(GONE, status=499) from None
    return bytes(body)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel it and raise `ApiError`."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(GONE, status=499)
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(request: Request, error: Exception) -> Response:
    """Return the response to an error. uvicorn prints the traceback of an unexpected one."""
    path = request.url.path
    if isinstance(error, HTTPException):
        absent = error.status_code in (404, 405)
        text = f"This server has no {request.method} {path}." if absent else str(error.detail)
        error = ApiError(text, status=error.status_code)
    elif isinstance(error, UserError):
        error = ApiError(str(error))
    elif not isinstance(error, ApiError):
        error = ApiError("The server failed to answer this request; its terminal shows the error.", status=500)
    return error.response(path, request.state.id)


class KeyGuard:
    """A middleware that rejects requests without the token before any route, reads the session's name, and adds a request id."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request by the ASGI protocol."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        key, rest = given[: len(self.token)], given[len(self.token) :]
        request_id = f"req_{secrets.token_hex(12)}"
        state = scope.setdefault("state", {})
        named = scope["path"].split("/")
        state["id"], state["session"] = request_id, rest.removeprefix(b".").decode("latin-1")
        if len(named) > 3 and named[1] == "s":
            state["session"] = named[2]

        async def with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                name = request_id.encode()
                message["headers"] = [*message["headers"], (b"x-request-id", name), (b"request-id", name)]
            await send(message)

        if self.token and not (hmac.compare_digest(key, self.token) and rest[:1] in (b"", b".")):
            why = "Incorrect API key provided" if given else "You didn't provide an API key"
            refused = ApiError(f"{why}; give the token that the server printed.", status=401, code="invalid_api_key")
            return await refused.response(scope["path"], request_id)(scope, receive, with_id)
        await self.app(scope, receive, with_id)
