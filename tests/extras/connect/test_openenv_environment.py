"""Environments behind OpenEnv servers as psigrad's: against a server in this process, by a stand-in for the package's client.

The client has what version 0.3's `GenericEnvClient` has: `reset(**arguments)`, `step(dict)` and `close()`, which are coroutines.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace

import pytest
from timing import until

from psigrad.errors import UserError
from psigrad_extras.connect import openenv_environment
from psigrad_extras.connect.openenv_environment import adapt, adapt_named

NUMBER = {"properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["number"]}
TEXT = {"properties": {"said": {"type": "string"}}, "required": ["said"]}
TWO = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}, "required": ["row"]}
FIELDS = "a JSON object with the fields row, column"


class Successor:
    """The game of examples/environments: say the number after the one that you hear; of the seed 5 these are 5, 6 and 7."""

    def __init__(self):
        self.action, self.most, self.opened, self.open, self.loops, self.says = NUMBER, 100, 0, 0, set(), "text"

    def observed(self, text, **more):
        return SimpleNamespace(observation={self.says: text, "done": False, "metadata": {"a": 1}, "reward": None}, **more)

    def client(self, base_url):
        assert base_url == self.url
        return Client(self)


class Client:
    """See `GenericEnvClient`: a session of the server."""

    def __init__(self, server):
        self.server, self.numbers, self.acted, self.counted = server, [], [], False

    async def reset(self, **arguments):
        if self.server.open >= self.server.most:
            raise RuntimeError("Server error: at capacity (code: CAPACITY_REACHED)")
        self.server.open += 1
        self.server.opened += 1
        self.server.loops.add(threading.current_thread().name)
        self.counted, self.arguments = True, arguments
        first = arguments.get("seed", 0) + arguments.get("more", 0)
        self.numbers = [first, first + 1, first + 2]
        return self.server.observed(str(first), reward=None, done=False)

    async def step(self, action):
        assert type(action) is dict
        self.acted.append(action)
        right = action.get("number") == self.numbers.pop(0) + 1
        done = not self.numbers
        return self.server.observed("" if done else str(self.numbers[0]), reward=right / 4 if right else None, done=done)

    async def close(self):
        self.server.open -= self.counted
        self.counted = False


@pytest.fixture
def server(monkeypatch):
    """A server whose schema is asked for over HTTP, and the package with its client."""
    game = Successor()

    class Schema(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"action": game.action}).encode()
            self.send_response(200 if self.path == "/schema" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    package = {name: ModuleType(name) for name in ("openenv", "openenv.core", "openenv.core.generic_client")}
    package["openenv.core.generic_client"].GenericEnvClient = game.client
    for name, module in package.items():
        monkeypatch.setitem(sys.modules, name, module)
    openenv_environment._schema.cache_clear()
    with HTTPServer(("127.0.0.1", 0), Schema) as listening:
        game.url = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield game
        listening.shutdown()
        thread.join(10)


def test_an_episode_by_hand(server):
    """Two of three turns are right, worth a fourth each; one that is no number costs no turn of the server's."""
    episode = adapt_named(f"{server.url}/")()
    assert episode.reset({"seed": 5, "reset": {"more": 10}}) == [{"role": "user", "content": "15"}]
    client = episode._client
    assert client.arguments == {"seed": 5, "more": 10}
    assert episode.step("16") == ("16", 0.25, False)
    assert episode.step("seventeen") == ("error: expected a value of type integer", 0.0, False)
    assert episode.step("0") == ("17", 0.0, False) and server.open == 1
    assert episode.step("18") == ("", 0.25, True)
    assert client.acted == [{"number": 16}, {"number": 0}, {"number": 18}] and server.open == 0
    assert server.loops == {"openenv"}  # one loop has all connections


def test_an_episode_that_is_left_gives_its_session_back(server):
    episodes = [adapt(server.url)() for _ in range(3)]
    for episode in episodes:
        episode.reset({})
    assert server.open == 3
    del episode, episodes
    gc.collect()
    until(lambda: server.open == 0, 5)


def test_rows_open_as_the_server_does_and_a_group_begins_alike(server):
    environment = adapt(server.url)
    rows = environment.rows(3, 7)
    assert len({row["seed"] for row in rows}) == 3 and rows == environment.rows(3, 7) != environment.rows(3, 8)
    assert all(row["prompt"][0]["content"] == row["opening"] == str(row["seed"]) for row in rows) and server.open == 0
    assert environment().reset(rows[0]) is None
    with pytest.raises(ValueError, match="whose first observation depends only on the seed"):
        environment().reset({**rows[0], "seed": rows[0]["seed"] + 1})
    server.observed = lambda text, **more: SimpleNamespace(observation={"done": False}, **more)
    with pytest.raises(UserError, match="starts its episodes without a prompt; give a dataset with prompts"):
        environment.rows(1, 0)


@pytest.mark.parametrize(
    ("action", "turn", "acted"),
    [(NUMBER, "-3", {"number": -3}), (NUMBER, "3.5 apples", "a value of type integer"), (TEXT, "3", {"said": "3"}),
     (TWO, '{"row": 1, "column": 2}', {"row": 1, "column": 2}), (TWO, '{"row": 1}', {"row": 1}),
     (TWO, '{"column": 1}', FIELDS), (TWO, '{"row": 1, "x": 1}', FIELDS), (TWO, "[1]", FIELDS), (TWO, "1, 2", FIELDS)],
)  # fmt: skip
def test_turns_as_actions_of_the_servers_schema(server, action, turn, acted):
    server.action = action
    episode = adapt(server.url)()
    episode.reset({})
    said, reward, done = episode.step(turn)
    found = episode._client.acted[0] if episode._client.acted else said.removeprefix("error: expected ")
    assert (found, reward, done) == (acted, 0.0, False)


def test_actions_and_observations_of_ones_own_and_those_of_several_fields(server):
    own = adapt(server.url, lambda turn: {"number": len(turn)}, lambda seen: f"<{seen['text']}>")()
    assert own.reset({"seed": 2}) == [{"role": "user", "content": "<2>"}] and own.step("...") == ("<3>", 0.25, False)
    server.observed = lambda text, **more: SimpleNamespace(observation={"text": text, "left": 2, "none": None}, **more)
    assert adapt(server.url)().reset({"seed": 2}) == [{"role": "user", "content": '{"text": "2", "left": 2}'}]


def test_what_is_missing_or_full_is_said(server, monkeypatch):
    server.most = 0
    with pytest.raises(UserError, match=r"does not start an episode.*raise max_concurrent_envs"):
        adapt(server.url)().reset({})
    with pytest.raises(UserError, match=r"There is no OpenEnv server at http://127\.0\.0\.1:9 "):
        adapt("http://127.0.0.1:9")().reset({})
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", None)
    with pytest.raises(UserError, match="pip install 'openenv-core>="):
        adapt(server.url)().reset({})


def test_negative_control_a_policy_that_hears_earns_more_than_one_that_does_not(server):
    """Three fourths against none: rewards are the server's, turn by turn."""

    def earned(says):
        episode, total, done = adapt(server.url)(), 0.0, False
        heard = episode.reset({"seed": 4})[0]["content"]
        while not done:
            heard, reward, done = episode.step(says(heard))
            total += reward
        return total

    assert earned(lambda heard: str(int(heard) + 1)) == 0.75 and earned(lambda heard: heard) == 0.0
