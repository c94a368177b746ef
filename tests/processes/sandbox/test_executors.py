"""Which executor a run gets: this machine's sandbox, a service over HTTP, none where it is allowed, and else a refusal."""

from __future__ import annotations

import json
import time

import pytest

from psigrad.config import OnlineConfig, Run
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.processes.sandbox import Limits, Program, SandboxError, Tier, choice, executor_for
from psigrad.processes.sandbox.bubblewrap import Bubblewrap
from psigrad.processes.sandbox.choice import Unsafe
from psigrad.processes.sandbox.executor import MissingValue, decode_value
from psigrad.records.run_folder import RunFolder
from psigrad.runs.journal import Journal

PRIME = (1 << 61) - 1  # Python's hash of a number is its rest by this one


@pytest.mark.parametrize(
    "value",
    [
        {"set": [{"int": hex(PRIME * i)} for i in range(1, 20_000)]},
        {"dict": [[{"int": hex(PRIME * i)}, None] for i in range(1, 20_000)]},
        {"list": [{"tuple": [{"int": hex(PRIME * i)}]} for i in range(1, 20_000)]},
        {"int": "0x1" + "0" * 300_000},
    ],
    ids=["set", "dict", "list of tuples", "a number"],
)
def test_values_that_would_take_for_ever_to_judge_are_none(value):
    """A set of n numbers with one hash takes n² steps; so does the division of long numbers."""
    began = time.process_time()
    assert isinstance(decode_value(json.dumps({"value": value}).encode()), MissingValue)
    assert time.process_time() - began < 3.0  # 20,000² steps take half a minute


def test_values_that_are_only_many_or_large_are_read():
    for value in (
        [-1, -2] * 5000,
        [0] * 5000,
        list(range(5000)),
        [[1], [2]] * 2000,
        1 << 500_000,
        {str(i): i for i in range(5000)},
    ):
        assert decode_value(json.dumps({"value": tagged(value)}).encode()) == value
    assert decode_value(json.dumps({"value": {"set": [tagged(i) for i in range(5000)]}}).encode()) == set(range(5000))


def tagged(value):
    """As the driver writes it."""
    if isinstance(value, list):
        return {"list": [tagged(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[k, tagged(v)] for k, v in value.items()]}
    return {"int": hex(value)}


NONE = Tier("none", why_not="bwrap not found; install bubblewrap.")


@pytest.fixture
def no_sandbox(monkeypatch):
    monkeypatch.setattr(choice, "tier_of_this_machine", lambda: NONE)


@pytest.mark.needs("bubblewrap")
def test_this_machines_sandbox_comes_first_even_where_unsafe_code_is_allowed():
    assert isinstance(executor_for(), Bubblewrap) and isinstance(executor_for(allow_unsafe_code=True), Bubblewrap)


def test_without_a_sandbox_code_is_refused_with_what_to_install(no_sandbox):
    with pytest.raises(SandboxError, match=r"install bubblewrap.*allow_unsafe_code"):
        executor_for()


def test_without_a_sandbox_programs_run_only_where_that_is_allowed_in_so_many_words(no_sandbox):
    executor = executor_for(allow_unsafe_code=True)
    assert isinstance(executor, Unsafe)
    printed, valued = executor.run(
        [Program("print(int(input()) + 1)", "3"), Program("def f(x): return x * 2", expressions=("f(21)", "f(None)"))],
        Limits(seconds=60.0),
    )
    (endless,) = executor.run([Program("while True: pass")], Limits(seconds=1.0))
    assert printed.stdout == "4\n" and printed.status == "exited"
    assert valued.values[0] == 42 and "TypeError" in valued.values[1].reason
    assert endless.status == "timeout"


@pytest.mark.needs("bubblewrap")
def test_a_run_that_allows_unsafe_code_says_so_and_records_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("psigrad.language.recipes.scorers.tier_of_this_machine", lambda: Tier("none", why_not="not here."))
    settings = OnlineConfig(reward=({"reward": "code", "allow_unsafe_code": True},), run=Run(output_dir=str(tmp_path / "run")))
    with RunFolder.open(tmp_path / "run", {}) as folder, RewardSetup.of(settings).scorer(None, Journal(folder)):
        pass
    assert "without a sandbox, with your rights" in capsys.readouterr().err
    assert '"unsafe_code"' in (tmp_path / "run" / "events.jsonl").read_text()
    safe = OnlineConfig(reward=("code",), run=Run(output_dir=str(tmp_path / "safe")))
    with RunFolder.open(tmp_path / "safe", {}) as folder, RewardSetup.of(safe).scorer(None, Journal(folder)):
        pass
    assert capsys.readouterr().err == ""
