"""MCP servers as environments: the server of examples/environments, its tools called in this process and behind its real pipe."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
from environment_example import check_that_it_improves

from psigrad.errors import UserError
from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import Fault, Step, resolve, step
from psigrad.language.episodes.tools import CallForm, schemas
from psigrad_extras.connect import mcp_environment
from psigrad_extras.connect.mcp_tools import MCPTool, ServerLost

SERVER = Path(__file__).parents[3] / "examples" / "environments" / "mcp_server.py"
INT, TEXT = {"type": "integer"}, {"type": "string"}


def tool(name, **parameters) -> MCPTool:
    shown = {"name": name, "description": name, "parameters": {"properties": parameters, "required": list(parameters)}}
    return MCPTool("a server", name, {"type": "function", "function": shown})


@pytest.fixture
def asked(monkeypatch):
    """A server whose answers a function gives, by the name and arguments of a call; what it was asked."""
    seen, answers = [], {"reset": ("4", {"episode": "e7"}), "say": ("2", {"reward": 0.25}), "look": ("a wall", {})}

    def ask(self, arguments):
        seen.append((self.name, dict(arguments)))
        found = answers[self.name]
        if isinstance(found, Exception):
            raise found
        return found

    own = [tool("reset", seed=INT), tool("say", number=INT, episode=TEXT), tool("look", where=TEXT)]
    monkeypatch.setattr(MCPTool, "ask", ask)
    monkeypatch.setattr(mcp_environment, "resolve", lambda specs, variables=(): own)
    seen.append(answers)
    return seen


def call(name: str, /, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_episode_by_hand(asked):
    answers = asked.pop(0)
    made = resolve("mcp:python game.py")
    assert [s["function"]["name"] for s in schemas(made.tools)] == ["say", "look"], "reset is psigrad's to call"
    assert schemas(made.tools)[0]["function"]["parameters"] == {"properties": {"number": INT}, "required": ["number"]}
    episode = made()
    assert episode.reset({"seed": 5}) == [{"role": "user", "content": "4"}]
    said = episode.step(call("say", number=5, episode="of another") + call("look", where="up") + call("say", number=1))
    assert [m["content"] for m in said.observation] == ["2", "a wall", "2"] and (said.reward, said.done) == (0.5, False)
    assert asked == [("reset", {"seed": 5}), ("say", {"number": 5, "episode": "e7"}), ("look", {"where": "up"}),
                     ("say", {"number": 1, "episode": "e7"})]  # fmt: skip
    answers["say"] = ("", {"reward": 1, "done": True})
    last = episode.step(call("say", number=3) + call("look", where="up"))
    assert (last.reward, last.done) == (1.0, True)
    assert [m["content"] for m in last.observation] == ["", "error: the episode is over"] and asked[-1][0] == "say"
    assert made().step("I say nothing.") == Step("", 0.0, True), "a turn without a call ends an episode, as under tools"


def test_rows_open_as_the_server_does_and_a_group_begins_alike(asked):
    answers = asked.pop(0)
    made = resolve("mcp:python game.py")
    rows = made.rows(3, 7)
    assert len({row["seed"] for row in rows}) == 3 and rows == made.rows(3, 7) != made.rows(3, 8)
    assert all(row["prompt"] == [{"role": "user", "content": "4"}] for row in rows) and made().reset(rows[0]) is None
    with pytest.raises(ValueError, match="the row gives the server's tool `reset` the arguments level; expected only seed"):
        made().reset({**rows[0], "reset": {"level": 2}})
    answers["reset"] = ("9", {})
    with pytest.raises(ValueError, match="the server's first observation was '4' and is now '9'"):
        made().reset(rows[0])
    answers["reset"] = ("", {})
    with pytest.raises(UserError, match="starts its episodes without a prompt; give a dataset"):
        made.rows(1, 0)


def test_what_the_server_does_wrong_is_not_the_policys_fault(asked):
    answers = asked.pop(0)
    episode = resolve("mcp:python game.py")()
    answers["say"] = ("", {"reward": "much"})
    assert isinstance(fault := step(episode, call("say", number=1)), Fault) and "much" in fault.reason
    answers["say"] = ServerLost("gone")
    assert isinstance(step(episode, call("say", number=1)), Fault)
    answers["reset"] = ("error: no such level", {})
    with pytest.raises(ValueError, match="the server's tool `reset` failed: no such level"):
        episode.reset({})


def test_a_server_without_reset_is_its_tools_on_rows_of_yours(asked, monkeypatch):
    asked.pop(0)
    monkeypatch.setattr(mcp_environment, "resolve", lambda specs, variables=(): [tool("look", where=TEXT)])
    made = resolve("mcp:python game.py")
    assert made().reset({"prompt": "look"}) is None and made().step(call("look", where="up")).done is False
    with pytest.raises(UserError, match=r"'a server' starts its episodes without a prompt; give a dataset"):
        made.rows(1, 0)


@pytest.mark.slow
@pytest.mark.needs("mcp")
def test_the_example_behind_its_pipe_plays_episodes_side_by_side():
    """Who says the next number has three thirds, in every episode; who says another has none."""
    made = mcp_environment.episodes_of(f"mcp:{sys.executable} {SERVER}", form=CallForm("Hermes"))
    numbers = {seed: random.Random(seed).choices(range(1, 6), k=3) for seed in (1, 2, 3)}
    with EnvironmentPool(made, timeout=60.0) as pool:
        opened = pool.begin([{"seed": seed} for seed in numbers])
        assert [said[0]["content"] for said in opened] == [str(drawn[0]) for drawn in numbers.values()]
        earned = [0.0, 0.0, 0.0]
        for turn in range(3):
            right = {n: call("say", number=drawn[turn] + (n != 2)) for n, drawn in enumerate(numbers.values())}
            for n, answer in pool.step(right).items():
                earned[n] += answer.reward
                assert answer.done == (turn == 2)
    assert earned == pytest.approx([1.0, 1.0, 0.0])


@pytest.mark.slow
@pytest.mark.needs("mcp")
def test_the_example_improves(tmp_path):
    check_that_it_improves("mcp", tmp_path)


@pytest.mark.needs("mcp")
def test_the_server_of_the_page_plays(monkeypatch):
    """Two episodes of one seed, turn by turn: they count down for themselves."""
    page = (SERVER.parents[2] / "docs" / "multi_turn.md").read_text()
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "MCPServer" in block]
    names: dict = {"__name__": "a page"}
    exec(compile(block, "the page", "exec", dont_inherit=True), names)

    def ask(self, arguments):
        found = names[self.name](**arguments)
        return found.content[0].text, found.meta

    monkeypatch.setattr(MCPTool, "ask", ask)
    own = [tool("reset", seed=INT), tool("say", number=INT, episode=TEXT)]
    monkeypatch.setattr(mcp_environment, "resolve", lambda specs, variables=(): own)
    first, second = (resolve("mcp:python game.py")() for _ in range(2))
    assert first.reset({"seed": 7}) == second.reset({"seed": 7}) == [{"role": "user", "content": "4"}]
    assert [first.step(call("say", number=n))[1:3] for n in (3, 2, 9, 0)] == [
        (1.0, False),
        (1.0, False),
        (0.0, False),
        (1.0, True),
    ]
    assert second.step(call("say", number=3))[0][0]["content"] == "3"
    assert f"mcp:python examples/environments/{SERVER.name}" in page
