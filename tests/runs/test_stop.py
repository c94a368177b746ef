"""Being asked to stop: politely once, at once the second time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
from lone_runs import OneOf
from tiny_jobs import forked

from psigrad.records.run_folder import RunFolder
from psigrad.runs.journal import Journal
from psigrad.runs.survival import Interrupted, StopSignal

SIGNALS = [signal.SIGTERM, signal.SIGINT]


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_first_signal_only_asks_and_the_second_interrupts(first, second):
    before = handlers()
    with StopSignal() as stop:
        assert not stop.requested and stop.number == 0
        os.kill(os.getpid(), first)
        assert stop.requested and stop.number == first
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
        assert stop.number == first, "the exit status is that of the first"
    assert handlers() == before


def test_handlers_come_back_after_an_error_and_in_nested_blocks():
    before = handlers()
    with pytest.raises(ZeroDivisionError), StopSignal() as outer:
        with StopSignal() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert inner.requested and not outer.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.requested
        raise ZeroDivisionError
    assert handlers() == before


def test_after_the_block_a_signal_is_deadly_again():
    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with StopSignal():
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    assert os.waitstatus_to_exitcode(forked(work)) == -signal.SIGTERM


def test_in_a_thread_it_does_nothing():
    before, seen = handlers(), []

    def work() -> None:
        with StopSignal() as stop:
            seen.append((handlers() == before, stop.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, False)] and handlers() == before


@pytest.mark.parametrize(("number", "rank", "said"), [(signal.SIGINT, "0", 1), (signal.SIGINT, "1", 0), (signal.SIGTERM, "0", 0)])
def test_who_pressed_ctrl_c_is_told_once_what_happens_now(number, rank, said, monkeypatch, capfd):
    monkeypatch.setenv("RANK", rank)
    with StopSignal():
        os.kill(os.getpid(), number)
        assert capfd.readouterr().err.count("Ctrl-C again stops at once") == said
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_interrupts_an_evaluation_of_one_process_and_removes_its_rows(processes, tmp_path):
    with RunFolder.open(tmp_path / "run", {"recipe": "x"}, "auto") as folder, StopSignal() as stop:
        journal = Journal(folder, signal=stop, world=OneOf(processes))
        folder.metrics({"step": 1, "loss": 2.0})
        before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
        passed = []
        with contextlib.suppress(Interrupted), journal.interruptible():
            folder.metrics({"step": 1, "eval/loss": 3.0})
            folder.rollouts([{"step": 1, "completion": "a"}])
            os.kill(os.getpid(), signal.SIGTERM)
            passed.append("the rest of the evaluation")
        with contextlib.suppress(Interrupted), journal.interruptible():
            passed.append("an evaluation that starts after the stop")
        whole = processes == 2
        assert passed == ["the rest of the evaluation", "an evaluation that starts after the stop"] * whole
        assert ((tmp_path / "run" / "metrics.jsonl").read_bytes() == before) is not whole
        assert folder.rows == ({"metrics": 2, "rollouts": 1} if whole else {"metrics": 1})
        assert ((tmp_path / "run" / "rollouts.jsonl").stat().st_size > 0) is whole
