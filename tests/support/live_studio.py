"""A studio on a real port in a thread, and ways to ask it: politely, and byte by byte."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from scratch import MEMORY
from timing import PATIENCE

from psigrad_studio import json_api
from psigrad_studio.app import create_app
from psigrad_studio.serve import listen
from psigrad_studio.sessions import Sessions
from psigrad_studio.studio_settings import StudioSettings
from psigrad_studio.web_server import server

# Where a limit is not what a test is about, nothing that stands still for a while runs into it.
UNHURRIED = {"work_seconds": PATIENCE, "header_seconds": PATIENCE, "body_seconds": PATIENCE}
json_api.WAIT_SECONDS = PATIENCE


@dataclass
class Reply:
    """A response, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]


@dataclass
class LiveStudio:
    """A running studio and a session in it."""

    settings: StudioSettings
    sessions: Sessions
    app: Any
    cookie: str = ""
    csrf: str = ""
    paths: list[tuple[str, frozenset[str]]] = field(default_factory=list)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.settings.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What a page of the studio sends with a POST."""
        return {
            "Host": self.host,
            "Origin": self.base,
            "Cookie": self.cookie,
            "X-Psigrad-CSRF": self.csrf,
            "Content-Type": "application/json",
        }

    def enter(self) -> None:
        """Open a session as a browser does."""
        reply = self.ask("GET", f"/enter?key={self.settings.key}", headers={"Host": self.host})
        assert reply.status == 200, reply
        self.cookie = reply.headers["set-cookie"].partition(";")[0]
        self.csrf = re.search(r'name="csrf" content="([^"]+)"', reply.body.decode()).group(1)

    def ask(self, method: str, path: str, content: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """One request on a connection of its own. `content` is sent as JSON, bytes as they are."""
        body = None if content is None else content if isinstance(content, bytes) else json.dumps(content).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.settings.port, timeout=PATIENCE)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in (self.headers if headers is None else headers).items():
                if body is not None or name != "Content-Type":
                    connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, content: Any) -> Reply:
        """A POST of a page of ours."""
        return self.ask("POST", path, content)

    def raw(self, data: bytes, seconds: float = PATIENCE) -> bytes:
        """Bytes onto a socket; what came back before the other side closed or the time was over."""
        with socket.create_connection(("127.0.0.1", self.settings.port), timeout=seconds) as connection:
            connection.sendall(data)
            answer = b""
            try:
                while part := connection.recv(65536):
                    answer += part
                    if b"\r\n\r\n" in answer and _complete(answer):
                        connection.settimeout(0.3)  # unless another response follows
            except (TimeoutError, ConnectionError):
                pass
            return answer


def _complete(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return length is not None and len(body) >= int(length.group(1))


@contextmanager
def live_studio(**limits: Any) -> Iterator[LiveStudio]:
    """A studio with a session, on a port of its own. Its labels are gone afterwards unless `database` names a place for them."""
    listening, folder = listen(), tempfile.mkdtemp(prefix="psigrad-studio-", dir=MEMORY)
    settings = StudioSettings(port=listening.getsockname()[1], database=f"{folder}/labels.db")
    settings = replace(settings, **(UNHURRIED | limits))
    sessions = Sessions(settings.key, settings.session_seconds)
    app = create_app(settings, sessions)
    ready = threading.Event()
    serving = server(app, settings, ready.set)
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    studio = LiveStudio(settings, sessions, app)
    studio.enter()
    try:
        yield studio
    finally:
        serving.should_exit = True
        thread.join(PATIENCE)
        listening.close()
        shutil.rmtree(folder, ignore_errors=True)
