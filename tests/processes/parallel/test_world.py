"""When a process is lost, those that are left say which one it was."""

from __future__ import annotations

import json
import tempfile
import threading
import time

import pytest
import ranks
import torch.distributed as dist
from rank_gradients import make_models
from torch._C._distributed_c10d import FileStore, HashStore

from psigrad.errors import UserError
from psigrad.processes.parallel import world


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


@pytest.mark.parametrize(("rank", "missing"), [(0, []), (2, [0])])
def test_a_store_that_is_gone_names_the_rank_whose_machine_has_it(rank, missing):
    assert world.silent_ranks(None, rank, 4, seconds=0.1) == [], "no group, no store"

    class Gone:
        def set_timeout(self, seconds):
            raise dist.DistNetworkError("failed to recv, got 0 bytes")

    assert world.silent_ranks(Gone(), rank, 4, seconds=0.1) == missing


def test_the_message_names_it(monkeypatch, request):
    monkeypatch.setattr(world, "ROLL_CALL", 0.1)
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=3)  # whose other two never come
    request.addfinalizer(dist.destroy_process_group)
    with (
        pytest.raises(world.RankLost, match=r"^Process 1, 2 of 0 to 2 of this run has ended or does not answer"),
        world.convert_errors(),
    ):
        raise RuntimeError("[gloo/transport] Connection closed by peer")


@pytest.mark.slow
@pytest.mark.parametrize("hung", [0, 1])
def test_of_real_processes_the_one_that_stands_still_is_named_soon_after_the_bound(monkeypatch, hung):
    monkeypatch.setattr(ranks, "MINUTES", 0.25)
    with tempfile.TemporaryDirectory() as folder:
        group = ranks.start(3, "rank_hangs", "main", hung, folder=folder)
        try:
            began = time.monotonic()
            said = {rank: group[rank].communicate(timeout=60 * ranks.MINUTES + 60)[1] for rank in range(3) if rank != hung}
            assert time.monotonic() - began > 10, "it was waited for"
        finally:
            for rank in group:
                rank.end()
    for rank, words in said.items():
        assert f"Process {hung} of 0 to 2 of this run has ended or does not answer" in words, (rank, words[-2000:])


def test_a_group_that_carries_nothing_between_cpus_is_refused_with_the_one_to_make(monkeypatch):
    """As Ray Train makes it for workers with GPUs, unless it is told otherwise."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r'TorchConfig\(backend="cpu:gloo,cuda:nccl"\)'), world.join_world():
        pass


def test_one_gpu_for_all_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(UserError, match="each of the 2 processes needs its own GPU; give device=cuda"),
        world.join_world(device="cuda:1"),
    ):
        pass


def test_more_processes_than_gpus_is_a_sentence(monkeypatch):
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with (
        pytest.raises(UserError, match="This machine has 2 GPUs, but at least 3 processes, which need one each; start fewer"),
        world.join_world(device="cuda"),
    ):
        pass


def sent(folder, budgets: str, sharded: bool, once: str = "") -> list[dict]:
    """Of rank 0 of two, for each budget."""
    out = folder / f"{sharded}{once}.json"
    ranks.run(2, "rank_collectives", "main", folder, out, budgets, "24", once, lockstep=sharded)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def test_whole_models_send_their_gradient_once_for_a_step(models):
    steps = sent(models, "1000,100", False)
    print(steps)
    few, many = steps
    assert many["micro"] >= 4 * few["micro"]
    assert few["calls"] == many["calls"] and few["bytes"] == many["bytes"]
    assert list(few["bytes"]) == ["all_reduce"] and few["bytes"]["all_reduce"] == pytest.approx(few["weights"], rel=0.01)


def test_shards_are_gathered_twice_for_each_micro_batch_and_reduced_in_each_or_once(models):
    """Their norm is one message. A gradient that is reduced once is the same."""
    each, once = sent(models, "1000,100", True), sent(models, "1000,100", True, "once")
    for step, other in zip(each, once, strict=True):
        print(step, other)
        for one, times in ((step, step["micro"]), (other, 1)):
            gathered, reduced = one["bytes"]["all_gather_single"], one["bytes"]["reduce_scatter_single"]
            assert reduced == pytest.approx(times * one["weights"], rel=0.02)
            assert gathered <= 2.02 * one["micro"] * one["weights"] and one["norm calls"] == {"all_reduce": 1}
            assert one["norm reads"] == 2, "all squares at once, and their sum over the processes"
        assert other["norm"] == pytest.approx(step["norm"], rel=1e-5)
