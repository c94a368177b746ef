"""`psigrad studio` as a command: where it listens, what it prints, how it ends, and its mistakes in sentences."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing

import pytest

from psigrad import cli
from psigrad.errors import UserError
from psigrad_studio import serve, web_server
from psigrad_studio.studio_settings import StudioSettings


def test_it_prints_an_address_that_opens_and_stops_on_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "psigrad", "studio", str(tmp_path), "--no-open"]
    # as from a terminal: a shell starts what it puts in the background with SIGINT ignored, and these tests may be that
    terminal = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=terminal) as process:
        address = re.search(r"http://127\.0\.0\.1:\d+/enter\?key=\S+", process.stdout.readline()).group()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        entered = opener.open(address).read()
        assert b"The studio opens" in entered and b"/runs" in entered and b"/grid" not in entered, "where it was asked to"
        assert b"Grid world" in opener.open(address.partition("/enter")[0] + "/grid").read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()


def test_it_listens_on_this_machine_only():
    with closing(serve.listen()) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_the_first_free_port_is_taken_and_a_port_in_use_is_said_so(capsys):
    with closing(serve.listen()) as first, closing(serve.listen()) as second:
        port = first.getsockname()[1]
        assert second.getsockname()[1] != port
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            serve.listen(port)
        assert cli.main(["studio", "--port", str(port)]) == 2
        assert "give another --port" in capsys.readouterr().err


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "fastapi" else found(name, *a))
    assert cli.main(["studio"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("psigrad: The studio needs fastapi, which is not installed. Run `pip install 'fastapi>=")
    assert " 'sqlalchemy>=" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere/at/all"], "does not exist"),
        (["a", "b"], "studio got a b; the usage is psigrad studio [RUNS_FOLDER]"),
        (["--port", "99999"], "expected 1 to 65535"),
        (["--port", "x"], "expected a whole number"),
        (["--opne"], "no flag --opne"),
        (["--allow-host", "http://labels.example.org"], "without http://"),
        (["--allow-host", "a b"], "is not a host name"),
        (["--database", "mysql://x"], "postgresql://"),
    ],
)
def test_mistakes_are_sentences(arguments, said, capsys):
    assert cli.main(["studio", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


def test_help_names_what_there_is(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["studio", "--help"])
    assert "--no-open" in capsys.readouterr().out


def test_names_under_which_it_answers():
    assert StudioSettings(port=8420).hosts == {"127.0.0.1:8420", "localhost:8420"}
    assert "127.0.0.1" in StudioSettings(port=80).hosts
    assert StudioSettings().key != StudioSettings().key and len(StudioSettings().key) >= 40
    team = StudioSettings(port=8420, allowed_hosts=("labels.example.org",))
    assert team.hosts == {"127.0.0.1:8420", "localhost:8420", "labels.example.org"} and team.hosts - team.own_hosts == {
        "labels.example.org"
    }
    assert "https://labels.example.org" in team.origins and "https://127.0.0.1:8420" not in team.origins


def test_a_browser_is_opened_only_where_there_is_a_screen():
    assert serve._has_screen("darwin", {}) and serve._has_screen("linux", {"DISPLAY": ":0"})
    assert not serve._has_screen("linux", {}) and serve._has_screen("win32", {})


def test_a_socket_that_was_just_closed_can_be_used_again():
    with closing(serve.listen()) as listening:
        port = listening.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listening.accept()
        accepted.close()
        client.close()
    with closing(serve.listen(port)) as again:
        assert again.getsockname()[1] == port


def test_a_request_that_is_cut_off_at_the_end_shows_no_traceback(capsys):
    begun = threading.Event()

    async def slow(scope, receive, send):
        begun.set()
        await asyncio.sleep(60)

    with closing(serve.listen()) as listening:
        serving = web_server.server(slow, StudioSettings(port=listening.getsockname()[1]))
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
        thread.start()
        with socket.create_connection(listening.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert begun.wait(60)
            serving.should_exit = True
            thread.join(60)
    assert not thread.is_alive()
    assert capsys.readouterr().err == ""
