"""A server, an engine and a tunnel end in bounded time whatever is under way, and nobody waits for one that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
from timing import until

from psigrad.language.rollout.types import SamplingParams
from psigrad_serve import serving, threads
from psigrad_serve.agents import tunnel
from psigrad_serve.engine.engine import SamplingEngine
from psigrad_serve.served import Recorder, Served
from psigrad_serve.serving import running

LONG = SamplingParams(max_tokens=900, temperature=5)
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 900},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 900},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900},
}


class Heard(Recorder):
    """Keeps why each completion ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_completion(self, *told) -> None:
        self.reasons.append(told[3])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Ends that are waited for take a tenth of a second, and what would hang fails."""
    monkeypatch.setattr(serving, "GRACE", 0.1)
    monkeypatch.setattr(threads, "PATIENCE", 10)


def sent(at, data: bytes) -> socket.socket:
    host, port = at.url.removeprefix("http://").split(":")
    line = socket.create_connection((host, int(port)), timeout=10)
    line.sendall(data)
    return line


def asking(path: str, body: dict, cut: int = 0) -> bytes:
    """A request as it goes over the line, without the last `cut` bytes."""
    text = json.dumps(body).encode()
    whole = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
    return whole[: len(whole) - cut]


def test_a_gateway_ends_whatever_its_clients_are_at(small_model):
    """Streams that nobody reads, several choices, whole answers, half a body, half a head, a silent line, one behind another."""
    engine, heard = SamplingEngine(small_model, max_batch=4), Heard()
    with contextlib.ExitStack() as lines:
        with running(Served(engine, recorder=heard), token="") as at:
            body = {"model": "m", "stream": True, "temperature": 5}
            for path, more in ASKED.items():
                line = lines.enter_context(sent(at, asking(path, {**more, **body})))
                assert b"200" in line.recv(64)  # this one has begun
            lines.enter_context(engine.held())  # and of those that follow none ends by itself
            before = engine.waiting
            for path, more in ASKED.items():
                several = {"n": 3} if path.endswith("completions") else {}
                whole = {**more, **several, "model": "m"}
                for data in (asking(path, {**whole, **body}), asking(path, whole) * 2, asking(path, whole, cut=4)):
                    lines.enter_context(sent(at, data))
            for data in (b"", b"POST /v1/mess"):
                lines.enter_context(sent(at, data))
            until(lambda: engine.waiting == before + 16)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        assert len(heard.reasons) == 20 and heard.reasons.count("cancelled") >= 16
    until(lambda: not engine.waiting and not engine.active)
    engine.close()


def test_a_request_that_goes_on_when_it_is_cancelled_is_left_and_told_of(small_model, monkeypatch):
    """One that ignores the first two is cancelled again; one that ignores all is named. The thread ends by either."""
    begun, ignored, told, most = [], [], [], 0

    class Stubborn(Heard):
        def prepare(self, session_id, call):
            begun.append(asyncio.ensure_future(goes_on()))
            return call

    async def goes_on():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ignored.append(1)
                if len(ignored) > most:
                    raise

    monkeypatch.setattr(threading, "excepthook", told.append)
    engine = SamplingEngine(small_model)
    for most, left in ((2, 0), (10**6, 1)):  # noqa: B007 (goes_on reads it)
        ignored.clear()
        monkeypatch.setattr(serving, "GRACE", 1.0 if not left else 0.1)
        asked = asking("/v1/completions", {"model": "m", "prompt": "Hi", "max_tokens": 1})
        with running(Served(engine, recorder=Stubborn()), token="") as at, sent(at, asked) as line:
            assert b"200" in line.recv(64)
        assert len(ignored) >= 1 + (not left) * 2 and len(told) == left
    assert "goes_on" in str(told[0].exc_value) and "could not cancel 1 requests" in str(told[0].exc_value)
    engine.close()


def test_a_thread_that_does_not_end_is_named_with_its_place(monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE", 0.05)
    over = threading.Event()
    thread = threading.Thread(target=over.wait, args=(10,), name="sleeper")
    thread.start()
    with pytest.raises(RuntimeError, match=r"'sleeper' did not end within 0.05 s.*\n(.*\n)*.*in wait"):
        threads.await_end(thread)
    over.set()
    thread.join(10)
    threads.await_end(thread)


def test_nobody_waits_for_an_engine_that_has_ended(small_model, monkeypatch):
    engine = SamplingEngine(small_model, max_batch=1)
    first, waits, gone = (engine.submit((5, 6), LONG, seed) for seed in range(3))
    until(lambda: first.tokens)

    async def read():
        stream = engine.submit((5,), LONG, 4)
        with engine.held():
            stream.cancel()  # by another than its reader
            closing = threading.Thread(target=engine.close)
            closing.start()
        with contextlib.suppress(RuntimeError):
            await asyncio.wait_for(stream.wait(), 5)
        closing.join(5)
        return stream.ended

    assert asyncio.run(read())
    for stream in (first, waits, gone):
        with pytest.raises(RuntimeError, match="engine was closed"):
            stream.result()
    held = threading.Thread(target=lambda: engine.held().__enter__(), daemon=True)
    held.start()
    held.join(5)
    assert not held.is_alive()

    # what ends a thread elsewhere ends what is under way here, and the next request is drawn
    engine = SamplingEngine(small_model)
    with monkeypatch.context() as patch:
        patch.setattr("psigrad_serve.engine.live_batch.LiveBatch.step", lambda self: (_ for _ in ()).throw(SystemExit(3)))
        stream = engine.submit((5, 6), LONG, 1)
        until(lambda: stream.ended)
        assert isinstance(stream.error, SystemExit)
    assert len(engine.submit((5, 6), SamplingParams(2), 1).result().ids) == 2
    engine.close()


def test_a_tunnel_has_a_place_where_the_folder_for_temporary_files_has_a_long_name(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    for folder, inside in ((long, False), (tempfile.mkdtemp(dir="/tmp"), True)):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with tunnel.opened(lambda: socket.create_connection(("127.0.0.1", 1))) as path:
            assert path.startswith(str(folder)) is inside and len(path) < 104
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(path)
    Path(folder).rmdir()


def test_a_tunnel_to_nobody_hangs_up_and_its_thread_ends():
    def nobody():
        raise ConnectionRefusedError

    before = set(threading.enumerate())
    with tunnel.opened(nobody) as path, socket.socket(socket.AF_UNIX) as line:
        line.settimeout(5)
        line.connect(path)
        assert line.recv(1) == b""
        (own,) = set(threading.enumerate()) - before
    own.join(5)
    assert not own.is_alive()
