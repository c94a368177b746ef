"""A stand-in for an OpenAI-compatible server. It has no model: a function says what is answered, in the API's own forms."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def chat(text: str, logprobs: list[float] | None = None, tokens: int = 3, finish_reason: str = "stop") -> dict[str, Any]:
    """A chat completion as OpenAI's API gives it."""
    listed = None if logprobs is None else {"content": [{"token": "x", "logprob": value} for value in logprobs]}
    choice = {"message": {"role": "assistant", "content": text}, "logprobs": listed, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": {"completion_tokens": tokens}}


def plain(text: str, logprobs: list[float] | None = None, tokens: int = 3, finish_reason: str = "stop") -> dict[str, Any]:
    """A completion of a text."""
    listed = None if logprobs is None else {"token_logprobs": logprobs}
    return {
        "choices": [{"text": text, "logprobs": listed, "finish_reason": finish_reason}],
        "usage": {"completion_tokens": tokens},
    }


@contextlib.contextmanager
def standing_in(
    answer: Callable[[int, dict[str, Any]], Any], models: tuple[str, ...] = ("small",)
) -> Iterator[tuple[str, list[Any]]]:
    """(address, requests seen). The n-th request, from 1 on, gets `answer(n, body)`: an object, or (status, text, headers)."""
    seen: list[Any] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, json.dumps({"data": [{"id": name} for name in models]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
                number = len(seen)
            said = answer(number, body)
            self.reply(*said) if isinstance(said, tuple) else self.reply(200, json.dumps(said))

        def reply(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
