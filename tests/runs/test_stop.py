"""Being asked to stop: politely once, at once the second time."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from tiny_jobs import forked

from psigrad.runs.survival import StopSignal

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
