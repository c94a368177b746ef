"""One thread for every test and for the processes that it starts: the fork of a process whose torch has threads running would
hang, and two processes of two threads each on two cores spend their time waiting for each other. And no example of hypothesis
is too slow: how long one takes depends on what else the machine does.

And the one door by which tests are left out: `pytest.mark.needs`, whose programs are those of `support/machine.py`, and the
packages that are listed there. The last lines of the output say how many were, and why; a test skipped otherwise fails.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, and for `psigrad` in a test's own process or in one of its own
os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is loaded: numpy computes its kernels, but in `make test-gpu`

import machine
import pytest
import torch
from hypothesis import HealthCheck, settings
from workers import pytest_addoption, pytest_runtestloop  # noqa: F401 (pytest finds them here)

torch.set_num_threads(1)
# Processes are killed here and no machine is: what was written is there in either case, and a run waits for the disk fifty times.
os.fsync = os.fstat
settings.register_profile("psigrad", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("psigrad")


@pytest.fixture(scope="session")
def job(tmp_path_factory) -> Path:
    """base/ (a 30k-parameter model), train.jsonl and held_out.jsonl: repeat the letter you see."""
    from tiny_jobs import make_job

    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def rewards_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward functions of runs are called in this process. That it comes to the same is in language/rewards/test_contract.py."""
    from inline_scorer import PoolHere

    monkeypatch.setattr("psigrad.language.recipes.scorers.RewardPool", PoolHere)


LONGEST = (
    *("models/test_tiers.py", "training/test_learning.py", "runs/test_resume.py", "rewards/test_pool.py", "models/test_probe.py"),
    *("vllm/test_vllm_broadcast.py", "control/test_saving.py", "recipes/test_pictured_turns.py", "recipes/test_pictures.py"),
    *("extras/test_model_types.py", "connect/test_entrances.py", "parallel/test_rank_runs.py", "sandbox/test_hostile.py"),
    *(
        "models/test_gpu_parts.py",
        "models/test_inductor.py",
        "course/test_course.py",
        "surface/test_layers.py",
        "parallel/test_rank_gradients.py",
    ),
)
"""The files that take longest."""
NEEDED = "needs"
"""The property of a report that names what its test was left out for, and why."""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is made while tests are collected stays to the end, and is not looked through for garbage again and again."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def _needs(item: pytest.Item) -> list[str]:
    named = [name for mark in item.iter_markers("needs") for name in mark.args]
    return named + [need for fixture, need in machine.FIXTURES.items() if fixture in getattr(item, "fixturenames", ())]


class LeftOut(pytest.Item):
    """Stands for the tests of a file that imports a missing package of `machine.PACKAGES`."""

    why = ""

    def setup(self):
        self.user_properties.append((NEEDED, self.why))
        pytest.skip(self.why)

    def runtest(self):
        raise NotImplementedError


class TestFile(pytest.Module):
    """A file of tests."""

    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            if not (why := machine.missing_package(str(error))):
                raise
            item = LeftOut.from_parent(self, name="its_tests")
            item.why = why
            return [item]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Also with several workers, which tell of items alone and not of files."""
    return TestFile.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What drives a browser is slow, but for those marked `quick`; before pytest chooses by marks. And files of few long tests
    begin first, that no worker is left alone with one at the end.
    """
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
    for item in items:
        if "chromium" in _needs(item) and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture is made."""
    for name in _needs(item):
        if found := machine.lack(name):
            item.user_properties.append((NEEDED, f"{name}: {found.sentence}"))
            if machine.fails(name):
                pytest.fail(found.sentence, pytrace=False)
            pytest.skip(found.sentence)


def _missing_package(error: BaseException) -> str:
    """`machine.missing_package` of an error. Several errors at once (`cases.repeat_for`) leave a test out only if each does."""
    if not isinstance(error, BaseExceptionGroup):
        return machine.missing_package(str(error))
    found = [_missing_package(each) for each in error.exceptions]
    return found[0] if all(found) else ""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """A missing package of `machine.PACKAGES` leaves a test out. A skip by any other door is a failure."""
    report = yield
    if report.failed and call.excinfo is not None and (why := _missing_package(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (item.nodeid, 0, why)
        report.user_properties = item.user_properties = [*item.user_properties, (NEEDED, why)]
    if report.skipped and not any(key == NEEDED for key, _ in item.user_properties):
        report.outcome, why = "failed", report.longrepr[2] if isinstance(report.longrepr, tuple) else "xfail"
        vars(report).pop("wasxfail", None)
        report.longrepr = f"A test is left out by pytest.mark.needs alone ({why})."
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """The last of all: what was left out on this machine."""
    result = yield
    reports = [report for kind in ("skipped", "failed", "error") for report in terminalreporter.stats.get(kind, ())]
    found = Counter(value for report in reports for key, value in getattr(report, "user_properties", ()) if key == NEEDED)
    if found:
        terminalreporter.section("missing on this machine")
    for (name, _, why), count in ((value.partition(": "), count) for value, count in found.items()):
        terminalreporter.write_line(machine.left_out(name, count, why))
    return result
