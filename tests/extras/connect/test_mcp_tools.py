"""Tools of MCP servers, beside Python functions: listed, called, their mistakes told apart from ours, and gone with the run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_rewards import add

from psigrad.errors import UserError
from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import Fault
from psigrad.language.episodes.tools import ToolBox, ToolBoxes, resolve, schemas
from psigrad_extras.connect import mcp_tools

SERVER = Path(__file__).parents[2] / "support" / "shop_server.py"
STDIO = f"mcp:{sys.executable} {SERVER}"


def call(name: str, /, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said(step) -> list[str]:
    return [answer["content"] for answer in step.observation]


def runs(pid: int) -> bool:
    """Whether a process is there and not a corpse."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pid: int) -> bool:
    until = time.monotonic() + 30
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not runs(pid)


@pytest.fixture(scope="module")
def tools():
    return resolve([add, STDIO])


@pytest.fixture(scope="module")
def pool(tools):
    with EnvironmentPool(ToolBoxes(tools), timeout=60.0) as made:
        yield made


@pytest.mark.needs("mcp")
def test_a_servers_tools_are_offered_beside_functions(tools):
    shown = {schema["function"]["name"]: schema["function"] for schema in schemas(tools)}
    assert list(shown) == ["add", "price", "process", "variable", "die"]
    assert shown["price"]["description"].startswith("What some of an item cost.")
    properties = shown["price"]["parameters"]["properties"]
    assert properties["item"]["type"] == "string" and properties["count"]["type"] == "integer"
    assert shown["price"]["parameters"]["required"] == ["item"]


@pytest.mark.needs("mcp")
def test_calls_are_answered_by_the_server_and_by_functions_in_one_turn(pool):
    pool.begin([{}, {}])
    turns = call("price", item="pen", count=3) + call("add", a=2, b=3) + call("process")
    steps = pool.step({0: turns, 1: call("process")})
    answers = said(steps[0])
    assert answers[:2] == ["6 euros for pen", "5"]
    assert runs(int(answers[2])) and said(steps[1]) == answers[2:], "episodes of a worker share its server"


@pytest.mark.needs("mcp")
def test_what_the_policy_gets_wrong_is_an_answer(pool):
    pool.begin([{}])
    turns = call("price", count="many") + call("price", item="air") + call("nothing") + call("price", item="ink", count=1)
    wrong, refused, unknown, right = said(pool.step({0: turns})[0])
    assert wrong.startswith("error: ") and "item" in wrong and "Field required" in wrong
    assert refused.startswith("error: ") and "price" in refused
    assert unknown == "error: there is no tool 'nothing'; expected add, price, process, variable, die"
    assert right == "2 euros for ink"


@pytest.mark.needs("mcp")
def test_a_server_that_dies_leaves_its_episode_unscored_and_the_next_has_a_new_one(pool):
    pool.begin([{}, {}])
    before = said(pool.step({0: call("process")})[0])
    fault = pool.step({0: call("die")})[0]
    assert isinstance(fault, Fault) and "gave no answer" in fault.reason and "shop_server.py" in fault.reason
    assert gone(int(before[0]))
    after = said(pool.step({1: call("process")})[1])
    assert after != before and runs(int(after[0]))


@pytest.mark.slow
@pytest.mark.needs("mcp")
def test_the_server_ends_with_the_pool_even_one_that_does_not_want_to(tools):
    with EnvironmentPool(ToolBoxes([replace(tools[2], server=f"{tools[2].server} stubborn")]), timeout=60.0) as made:
        made.begin([{}])
        pid = int(said(made.step({0: call("process")})[0])[0])
        assert runs(pid)
    assert gone(pid)


@pytest.mark.slow
@pytest.mark.needs("mcp")
def test_a_server_gets_the_variables_that_workers_get_and_no_others(tools, monkeypatch):
    monkeypatch.setenv("SHOP_KEY", "1234")
    monkeypatch.setenv("OTHER_KEY", "5678")
    with EnvironmentPool(ToolBoxes(tools), timeout=60.0, variables=["SHOP_KEY"]) as made:
        made.begin([{}])
        turn = call("variable", name="SHOP_KEY") + call("variable", name="OTHER_KEY")
        assert said(made.step({0: turn})[0]) == ["1234", "unset"]


@pytest.mark.slow
@pytest.mark.needs("mcp")
def test_a_server_that_does_not_start_in_a_worker_stops_the_run_by_name(tools):
    lost = [replace(tools[1], server="no-such-program")]
    with (
        EnvironmentPool(ToolBoxes(lost), timeout=60.0) as made,
        pytest.raises(UserError, match="'no-such-program' did not start"),
    ):
        made.begin([{}])


@pytest.mark.slow
@pytest.mark.needs("mcp")
def test_a_server_by_http():
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError), contextlib.closing(socket.create_connection(("127.0.0.1", port), 1)):
                break
            time.sleep(0.05)
        tools = resolve([f"mcp:http://127.0.0.1:{port}/mcp"])
        box = ToolBox(tools)
        assert said(box.step(call("price", item="pen") + call("process"))) == ["2 euros for pen", str(process.pid)]
    finally:
        process.kill()
        process.wait()
    with pytest.raises(mcp_tools.ServerLost):
        box.step(call("price", item="pen"))


@pytest.mark.needs("mcp")
def test_what_is_no_server_is_refused_in_one_sentence():
    for spec, why in (
        ("mcp:no-such-program", "No such file"),
        (f"mcp:{sys.executable} -c 'raise SystemExit(\"no key for the shop\")'", "no key for the shop"),
        ("mcp:http://127.0.0.1:9/mcp", "did not start"),
        ("mcp:'unclosed", "No closing quotation"),
    ):
        with pytest.raises(UserError, match="expected mcp:COMMAND") as refused:
            resolve([spec])
        assert why in str(refused.value) and "\n" not in str(refused.value)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(UserError, match="Two tools are named 'add'"):
        resolve([add, add])


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"pip install 'mcp>=2'"):
        resolve([f"mcp:{os.devnull} missing"])


@pytest.mark.slow
@pytest.mark.needs("mcp")
def test_a_program_that_says_nothing_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr("psigrad_extras.connect.mcp_tools.START_LIMIT", 0.3)
    with pytest.raises(UserError, match="did not start"):
        resolve(["mcp:sleep 600"])
