"""When a process is lost, those that are left say which one it was."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from psigrad.processes.parallel import launch, world


def test_who_does_not_say_that_it_waits_is_missing(tmp_path):
    found = {}

    def ask(rank):  # each with a handle of its own on the store, as processes have
        found[rank] = world.silent_ranks(FileStore(str(tmp_path / "store"), 4), rank, 4, seconds=1.0)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == {0: [2], 1: [2], 3: [2]}


def test_a_store_that_is_gone_names_nobody():
    assert world.silent_ranks(None, 0, 2, seconds=0.1) == []


def test_the_message_names_it(monkeypatch):
    monkeypatch.setattr(world, "_store", HashStore)
    monkeypatch.setattr(world, "ROLL_CALL", 0.1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with (
        pytest.raises(world.RankLost, match=r"^Process 1, 2 of 0 to 2 of this run has ended or does not answer"),
        world.name_losses(),
    ):
        raise RuntimeError("[gloo/transport] Connection closed by peer")


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
        assert f"process {told} of 0 to 1 {how}" in said and "last words" in said


def rank_of(number: int, code: int):
    rank = launch._Rank.__new__(launch._Rank)
    rank.rank, rank.words = number, b"last words"
    rank.process = SimpleNamespace(returncode=code, poll=lambda: code)
    return rank
