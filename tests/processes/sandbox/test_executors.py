"""Which executor a run gets: this machine's sandbox, a service over HTTP, none where it is allowed, and else a refusal."""

from __future__ import annotations

import pytest

from psigrad.config import OnlineConfig, Run
from psigrad.language.recipes.scorers import RewardSetup
from psigrad.processes.sandbox import Limits, Program, SandboxError, Tier, choice, executor_for
from psigrad.processes.sandbox.bubblewrap import Bubblewrap
from psigrad.processes.sandbox.choice import Unsafe
from psigrad.records.run_folder import RunFolder
from psigrad.runs.journal import Journal

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


def test_a_machine_without_bubblewrap_refuses_code_and_environments_and_says_what_to_install(monkeypatch, tmp_path):
    """A PATH without it, not a stand-in for the answer: asked as the machine is asked."""
    monkeypatch.setenv("PATH", str(tmp_path))
    choice.tier_of_this_machine.cache_clear()
    try:
        with pytest.raises(SandboxError, match=r"bwrap, .*not found; install bubblewrap .*allow_unsafe_code"):
            executor_for()
        with pytest.raises(SandboxError, match="environment_sandbox is set and this machine has no sandbox: bwrap"):
            choice.enclosure_of_workers()
        assert isinstance(executor_for(allow_unsafe_code=True), Unsafe)
        setup = RewardSetup.of(OnlineConfig(reward=("code",)))
        with pytest.raises(SandboxError, match="There is no sandbox for code on this machine"), setup.scorer(None):
            pytest.fail("a run would sample a step before it is told")
    finally:
        choice.tier_of_this_machine.cache_clear()


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
    monkeypatch.setattr("psigrad.language.rewards.code.tier_of_this_machine", lambda: Tier("none", why_not="not here."))
    settings = OnlineConfig(reward=({"reward": "code", "allow_unsafe_code": True},), run=Run(output_dir=str(tmp_path / "run")))
    with RunFolder.open(tmp_path / "run", {}) as folder, RewardSetup.of(settings).scorer(None, Journal(folder)):
        pass
    assert "without a sandbox, with your rights" in capsys.readouterr().err
    assert '"unsafe_code"' in (tmp_path / "run" / "events.jsonl").read_text()
    safe = OnlineConfig(reward=("code",), run=Run(output_dir=str(tmp_path / "safe")))
    with RunFolder.open(tmp_path / "safe", {}) as folder, RewardSetup.of(safe).scorer(None, Journal(folder)):
        pass
    assert capsys.readouterr().err == ""
