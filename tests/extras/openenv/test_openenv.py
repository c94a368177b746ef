"""OpenEnv's own package: its client against a server of its own, that of examples/environments, and what learning there gives."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environment_example import check_that_it_improves

from psigrad.errors import UserError
from psigrad.language.episodes.environment_pool import EnvironmentPool
from psigrad.language.episodes.environments import resolve
from psigrad_extras.connect.openenv_environment import adapt

pytestmark = [pytest.mark.openenv, pytest.mark.timeout(1800)]
EXAMPLES = Path(__file__).parents[3] / "examples" / "environments"


@pytest.fixture(scope="module")
def server():
    """Its address."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with subprocess.Popen([sys.executable, EXAMPLES / "openenv_server.py", str(port)]) as process:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        process.kill()


def test_episodes_side_by_side_in_processes_that_can_be_killed(server):
    """Of the three numbers of a seed each answer that is one more has a third."""
    with EnvironmentPool(resolve(f"openenv:{server}"), workers=2, timeout=60.0) as pool:
        rows = pool.rows(4, 0)
        assert rows == pool.rows(4, 0) != pool.rows(4, 1) and len({row["seed"] for row in rows}) == 4
        drawn = [random.Random(row["seed"]).choices(range(1, 6), k=3) for row in rows]
        assert [row["opening"] for row in rows] == [str(numbers[0]) for numbers in drawn]
        assert pool.begin(rows) == [None] * 4
        earned = [0.0] * 4
        for turn in range(3):
            right = {n: str(numbers[turn] + (n != 3)) for n, numbers in enumerate(drawn)}
            for n, answer in pool.step(right).items():
                earned[n] += answer.reward
                assert answer.done == (turn == 2) and (answer.done or answer.observation == str(drawn[n][turn + 1]))
    assert earned == pytest.approx([1.0, 1.0, 1.0, 0.0])


def test_a_turn_that_is_no_number_is_told_so_and_costs_none(server):
    episode = adapt(server)()
    episode.reset({"seed": 3})
    assert episode.step("three") == ("error: expected a value of type integer", 0.0, False)
    assert episode.step("1")[2] is False


def test_a_server_that_is_not_there(server):
    with pytest.raises(UserError, match=r"There is no OpenEnv server at http://127\.0\.0\.1:9 "):
        adapt("http://127.0.0.1:9")().reset({})


def test_the_example_improves(tmp_path):
    check_that_it_improves("openenv", tmp_path)
