"""Environments of verifiers itself: its tasksets, harnesses and traces."""

from __future__ import annotations

import pytest
from environment_example import check_that_it_improves

from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import InProcess, Step
from psigrad_extras.connect.verifiers_environment import adapt

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(1800)]
LOCAL = {"type": "subprocess"}


def guess(harness: str) -> type:
    return adapt({"taskset": {"id": "guess_number"}, "player": {"harness": {"id": harness}, "runtime": LOCAL}})


@pytest.mark.parametrize("harness", ["psigrad-chat", "null"])
def test_an_environment_of_several_turns(harness):
    kind = guess(harness)
    rows = kind.rows(5, 0)
    assert rows[4]["prompt"] == [{"role": "system", "content": "a number"}, {"role": "user", "content": "guess 1"}]
    playing = InProcess(kind)
    assert playing.begin(rows[3:]) == [None, None]
    assert playing.step({0: "1", 1: "4"}) == {
        0: Step([{"role": "user", "content": "higher"}], 0.0, False),
        1: Step("", 1.0, True),
    }
    assert playing.step({0: "5"})[0] == Step([{"role": "user", "content": "lower"}], 0.0, False)
    assert playing.step({0: "3"})[0] == Step("", pytest.approx(0.8), True)


def test_tools_of_a_taskset():
    kind = adapt({"taskset": {"id": "adder"}, "agent": {"harness": {"id": "null"}, "runtime": LOCAL}})
    rows = kind.rows(4, 0)
    assert [tool["function"]["name"] for tool in rows[0]["tools"]] == ["adder_add"]
    playing = InProcess(kind)
    playing.begin(rows[3:])
    call = '<tool_call>{"name": "adder_add", "arguments": {"a": 3, "b": 1}}</tool_call>'
    assert playing.step({0: call})[0] == Step([{"role": "tool", "content": "4", "name": "adder_add"}], 0.0, False)
    assert playing.step({0: "4"})[0] == Step("", 1.0, True)


def test_in_processes_that_can_be_killed():
    kind = guess("psigrad-chat")
    with EnvironmentPool(kind, workers=2, timeout=300.0) as pool:
        rows = pool.rows(4, 0)
        assert pool.begin(rows) == [None] * 4
        found = pool.step({0: "0", 1: "9", 2: "2", 3: "3"})
    assert [found[n].reward for n in range(4)] == [1.0, 0.0, 1.0, 1.0]


def test_the_example_improves(tmp_path):
    check_that_it_improves("verifiers", tmp_path)
