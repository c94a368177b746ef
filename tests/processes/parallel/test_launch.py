"""The launcher of one machine's processes: who it says has ended the others."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from psigrad.processes.parallel import launch


@pytest.mark.parametrize(("codes", "told"), [([-9, 75], 0), ([75, -11], 1), ([0, 3], 1), ([2, 75], None), ([0, 0], None)])
def test_the_launcher_says_what_ended_a_process_and_rank_0_too(capsys, codes, told):
    """Rank 0 speaks for itself, but not where a signal ended it (D10)."""
    ranks = [rank_of(n, code) for n, code in enumerate(codes)]
    status = launch._watch(ranks)
    said = capsys.readouterr().err
    assert status == (0 if codes == [0, 0] else {0: 137, 1: 139 if codes[1] == -11 else 3, None: 2}[told])
    assert ("psigrad: process" in said) == (told is not None)
    if told is not None:
        how = f"was ended by {signal.Signals(-codes[told]).name}" if codes[told] < 0 else "ended with status 3"
        assert f"process {told} (of 0 to 1) {how}" in said and "last words" in said


def test_where_those_that_wait_are_ended_by_a_signal_who_is_still_at_work_is_named(capsys, monkeypatch):
    """As NCCL's own time-out does: process 1 stands still, and the others are aborted."""
    monkeypatch.setattr(launch, "GRACE", 0.1)
    status = launch._watch([rank_of(0, -6), rank_of(1, None), rank_of(2, -6)])
    said = capsys.readouterr().err
    assert status == 134 and "process 0 (of 0 to 2) was ended by SIGABRT" in said and "process 1 was still running" in said


def rank_of(number: int, code: int | None):
    rank = launch._Rank.__new__(launch._Rank)
    rank.rank, rank.words = number, b"last words"
    rank.process = SimpleNamespace(returncode=code, poll=lambda: code)
    return rank
