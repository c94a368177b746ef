"""Weights from a trainer to engines elsewhere by broadcasts. gloo stands in the place of NCCL, and a hash in the place of vLLM;
engines are processes, and so is each end of a group.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import ranks
import torch
from broadcast_ends import Ends
from cases import slow
from engine_samplers import PARAMS, REQUESTS, a_model, expected, ids, nudge
from tiny_jobs import forked
from warm import warm

from psigrad.config import OnlineConfig, Placement
from psigrad.config.sections import Sampling
from psigrad.errors import UserError
from psigrad.language.models.lora import Lora
from psigrad.language.rollout.types import SamplingParams
from psigrad.processes.parallel.world import Alone, RankLost
from psigrad_extras.cluster import ray_broadcast, ray_placement, ray_sampler
from psigrad_extras.cluster.ray_broadcast import Broadcasts
from psigrad_extras.cluster.ray_sampler import RaySampler, RolloutWorker
from psigrad_extras.vllm import broadcast, vllm_weights
from psigrad_extras.vllm.broadcast import BroadcastLostError, Meeting
from psigrad_extras.vllm.vllm_setup import EngineLostError

CPU = torch.device("cpu")


def some_weights() -> dict[str, torch.Tensor]:
    """Of several types and of sizes that no type is a multiple of."""
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(7, 3, generator=generator).bfloat16(),
        "b": torch.randn(5, generator=generator),
        "turned": torch.randn(4, 6, generator=generator).T,
        "one": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "codes": torch.arange(11, dtype=torch.uint8),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_a_bucket_is_packed_bit_for_bit_whatever_its_types():
    weights = some_weights()
    contents, buffer = broadcast.pack(weights, [0] * len(weights))
    found = broadcast.unpack(contents, buffer)
    assert list(found) == list(weights) and all(same(found[name], weights[name]) for name in weights)
    assert all(span.first % broadcast.STEP == 0 for span in contents.spans()) and buffer.numel() == contents.size
    buffer[1] ^= 1
    assert not same(broadcast.unpack(contents, buffer)["a"], weights["a"]), "negative control: one bit"


@pytest.fixture
def ends():
    """Processes that join a group as an engine's do, and write down what they get."""
    with warm(), Ends() as made:
        yield made


def test_all_processes_of_an_engine_get_the_buckets_in_order(ends, tmp_path):
    store = broadcast.listen()
    ends.start(Meeting("gloo", "127.0.0.1", store.port, 3), tmp_path)
    group = broadcast.gather_group(store, "gloo", 3, CPU, lambda: False)
    buffers = [torch.arange(size, dtype=torch.uint8) for size in (5, 1 << 20, 3)]
    ends.expect([buffer.numel() for buffer in buffers])
    for buffer in buffers:
        group.send(buffer)
    for rank in (1, 2):
        got = [torch.load(tmp_path / f"{rank}-{place}.pt") for place in range(3)] if ends.wait(rank) == 0 else []
        assert all(map(torch.equal, got, buffers)) and len(got) == 3


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_who_is_gone_or_late_holds_nobody_up_for_ever(ends, tmp_path, monkeypatch, fault):
    store = broadcast.listen()
    ends.start(Meeting("gloo", "127.0.0.1", store.port, 3), tmp_path, {2: fault})
    group = broadcast.gather_group(store, "gloo", 3, CPU, lambda: False)
    monkeypatch.setattr(broadcast, "LIMIT", 2.0)
    ends.expect([1 << 24] * 20)
    begun = time.monotonic()
    with pytest.raises(BroadcastLostError, match="The broadcast of weights failed"):
        for _ in range(20):
            group.send(torch.zeros(1 << 24, dtype=torch.uint8))
    assert time.monotonic() - begun < 30.0


def test_who_never_comes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(broadcast, "LIMIT", 1.0)
    store, looks = broadcast.listen(), iter([False, False, True])
    with pytest.raises(BroadcastLostError, match="nobody came"):
        broadcast.gather_group(store, "gloo", 2, CPU, lambda: next(looks))
    port = store.port
    del store
    with pytest.raises(BroadcastLostError, match=f"cannot be reached at 127.0.0.1:{port}"):
        broadcast.join(Meeting("gloo", "127.0.0.1", port, 2), 1, CPU)
    with pytest.raises(BroadcastLostError, match="the processes did not connect within 1 s"):
        broadcast._in_time(lambda: time.sleep(2))


class Communicator:
    """In the place of vLLM's own, as far as it is called."""

    disabled, finishes, log = False, True, list[str]()

    def __init__(self, group, device):
        assert (group.rank, group.world_size) == (1, 2)

    def broadcast(self, buffer, src, stream):
        assert src == 0 and stream is STREAM
        buffer.fill_(7)

    def destroy(self):
        self.log.append("destroyed")


STREAM = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: Communicator.finishes))


@pytest.fixture
def vllm(monkeypatch):
    """The parts of vLLM that a group of NCCL is made of, and a stream of a GPU."""
    parts = {
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": Communicator},
        "vllm.distributed.utils": {
            "StatelessProcessGroup": lambda rank, size, store: SimpleNamespace(rank=rank, world_size=size)
        },
        "vllm.utils.nccl": {"unpinned_nccl_env": contextlib.nullcontext},
    }
    for name in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(Communicator, "log", [])


def test_nccl_goes_by_vllms_communicator_and_is_ended_when_it_is_late(vllm, monkeypatch):
    monkeypatch.setattr(broadcast, "LIMIT", 0.1)
    group = broadcast.NCCLGroup(broadcast.listen(), 1, 2, CPU)
    assert group.receive(3).tolist() == [7, 7, 7] and Communicator.log == []
    monkeypatch.setattr(Communicator, "finishes", False)
    with pytest.raises(BroadcastLostError, match="did not end within"):
        group.receive(3)
    assert Communicator.log == ["destroyed"], "what waits on the GPU ends"


def test_a_communicator_that_would_say_nothing_is_refused(vllm, monkeypatch):
    """vLLM disables one without a library of NCCL, and its broadcast then returns at once."""
    monkeypatch.setattr(Communicator, "disabled", True)
    with pytest.raises(BroadcastLostError, match="vLLM did not find the library NCCL"):
        broadcast.NCCLGroup(broadcast.listen(), 1, 2, CPU)


class Remote:
    """A sampler as Ray's driver has it: what is asked of it is a reference to the answer."""

    def __init__(self, sampler):
        self.worker = RolloutWorker(lambda: (sampler.model, sampler), 1)
        self._threads = ThreadPoolExecutor(4)
        self.ready, self.sample = (SimpleNamespace(remote=self._later(name)) for name in ("ready", "sample"))

    def _later(self, name):
        return lambda *arguments: self._threads.submit(getattr(self.worker, name), *arguments)


class Gone(BaseException):
    """In the place of the end of a sampler's process."""


@pytest.fixture
def ray(monkeypatch):
    """What is called of Ray: objects go through the store as bytes."""
    killed = []
    found = SimpleNamespace(
        get=lambda ref: ref.result(30.0) if isinstance(ref, Future) else pickle.loads(ref),
        put=pickle.dumps,
        kill=killed.append,
        killed=killed,
    )
    monkeypatch.setitem(sys.modules, "ray", found)

    def end(lost):
        raise Gone(str(lost))

    monkeypatch.setattr(ray_sampler, "_end", end)
    monkeypatch.setattr(vllm_weights, "BUCKET", 1)
    return found


@pytest.fixture
def trainer(ray):
    """A `RaySampler` whose tasks go to the workers that are given, one after the other."""
    made = []

    def make(log=lambda *a, **k: None, passes=("choose", "load", "compare")):
        model = a_model()
        ends = Broadcasts("gloo", lambda: "127.0.0.1", 2, CPU, passes, [], log)
        made.append(ends)
        version = iter(range(99))
        weights = lambda: vllm_weights.outgoing(model)  # noqa: E731
        pool = SimpleNamespace(ray=ray)
        sampler = RaySampler(pool, weights, lambda: next(version), exact=False, prompts_per_task=2, broadcasts=ends)
        return SimpleNamespace(model=model, ends=ends, sampler=sampler)

    yield make
    for ends in made:
        ends.close()


def sampled(ray, trainer, version, worker):
    number, found = ray.get(trainer.sampler.ask(version, REQUESTS, PARAMS, worker))
    assert number == version.number
    return ids(found)


def publish(trainer):
    """(the version of now, what the stand-in samples with it)."""
    version = trainer.sampler.snapshot().version
    now = expected(trainer.model)
    nudge(trainer.model)
    return version, now


@pytest.mark.parametrize("passes", [("choose", "load", "compare"), *slow((("load", "compare"),), (("load",),))])
def test_samplers_sample_with_the_version_that_they_are_asked_for(engine, ray, trainer, passes, tmp_path):
    """Two samplers, of which one comes later, and tasks of an older version after one of a newer, as with a lag."""
    run = trainer(passes=passes)
    first, second = Remote(engine(readback=len(passes) > 1)), Remote(engine(readback=len(passes) > 1))
    untouched = expected(first.worker.model)
    assert ray.get(run.ends.meet(first)) == ""
    versions = [publish(run) for _ in range(3)]
    for number in (0, 1):
        version, now = versions[number]
        assert sampled(ray, run, version, first) == sampled(ray, run, version, first) == now
    assert ray.get(run.ends.meet(second)) == ""
    for worker, number in ((second, 2), (first, 2), (second, 1), (first, 0)):
        version, now = versions[number]
        assert sampled(ray, run, version, worker) == now, "bit for bit: it is a hash of them"
    assert len({str(now) for _, now in versions}) == 3, "negative control: other weights are seen"
    until(lambda: run.ends.sent == 6)
    assert all(not version.stored for version, _ in versions) and ray.killed == []
    assert expected(first.worker.model) == untouched, "no model in the sampler's process is written"
    told = run.ends.bring(ray, versions[2][0], second)
    assert told.buckets == () and len(pickle.dumps(told)) < 20_000, "weights are not in what the task says"


def until(done, seconds=20.0):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("fault", ["breaks", "late"])
def test_an_engine_lost_in_the_middle_costs_that_sampler_and_nobody_waits(engine, ray, trainer, monkeypatch, fault):
    told = []
    run = trainer(log=lambda kind, text, **fields: told.append((kind, text)))
    lost = Remote(engine(fault))
    assert ray.get(run.ends.meet(lost)) == ""
    monkeypatch.setattr(broadcast, "LIMIT", 1.5 if fault == "late" else 3.0)
    version, now = publish(run)
    answer = run.sampler.ask(version, REQUESTS, PARAMS, lost)
    until(lambda: ray.killed == [lost])
    assert [kind for kind, _ in told] == ["transfer_failed"] and "The sampler is restarted" in told[0][1]
    if fault == "breaks":
        with pytest.raises(Gone, match="its process ended"):
            answer.result(30.0)
    monkeypatch.setattr(broadcast, "LIMIT", 60.0)
    other = Remote(engine())
    assert ray.get(run.ends.meet(other)) == "" and sampled(ray, run, version, other) == now, "another takes its place"
    until(lambda: run.ends.sent == 1)
    assert run.ends._failures == 0 and not version.stored


def test_after_some_failures_in_a_row_all_weights_go_through_the_store(engine, ray, trainer, monkeypatch):
    told = []
    run = trainer(log=lambda kind, text, **fields: told.append(text))
    monkeypatch.setattr(ray_broadcast, "FAILURES", 2)
    apart, there = [Remote(engine("apart")) for _ in range(2)], Remote(engine())
    for worker in (*apart, there):
        ray.get(run.ends.meet(worker))
    version, now = publish(run)
    for worker in (*apart, there):
        assert sampled(ray, run, version, worker) == now
    assert run.ends.sent == 0 and len(version.stored) == 1 and ray.killed == []
    assert len(told) == 2 and "no way to the trainer" in told[0] and "From now on all weights are sent" in told[1]
    new = Remote(engine())
    run.ends.meet(new)
    version, now = publish(run)
    assert sampled(ray, run, version, new) == sampled(ray, run, version, apart[0]) == now and len(told) == 2


@pytest.mark.parametrize("stored", [False, True])
def test_weights_of_another_model_are_refused_before_the_engine_hears_of_them(engine, ray, trainer, stored, tmp_path):
    run, worker = trainer(), Remote(engine())
    version, _ = publish(run)
    arrays = tuple(buffer.numpy() for _, buffer in version.buckets) if stored else ()
    kept = (tmp_path / "log").read_text()
    contents = version.buckets[0][0]
    for change, said in (
        ({"names": ["strange", *contents.names[1:]]}, r"weight strange has the shape \(.*\) and the sampler's None"),
        (
            {"shapes": [[3, 3], *contents.shapes[1:]]},
            rf"weight {contents.names[0]} has the shape \(3, 3\) and the sampler's \(\d",
        ),
    ):
        wrong = replace(contents, **change), version.buckets[0][1]
        delivery = run.ends._delivery(0, (wrong, *version.buckets[1:]), arrays)
        with pytest.raises(UserError, match=said):
            worker.worker._take(delivery)
    assert (tmp_path / "log").read_text() == kept


def test_a_lost_engine_is_never_filled_with_the_weights_of_the_beginning(engine, ray, trainer):
    """The model in the sampler's process has these still."""
    run, worker = trainer(), Remote(engine("dies"))
    ray.get(run.ends.meet(worker))
    version, _ = publish(run)
    with pytest.raises(Gone, match="its process ended"):
        sampled(ray, run, version, worker)
    sampler = worker.worker.sampler
    with pytest.raises(UserError, match="its process ended"):
        sampler.snapshot()


def test_an_engine_that_was_not_sent_what_it_waits_for_is_lost_and_its_model_is_not_blamed(engine, monkeypatch):
    sampler = engine()
    lost = f"Worker failed: {broadcast.LOST} did not end within 120 s"
    for why, kind, said in (
        (lost, EngineLostError, "did not end within 120 s"),
        ("no such weight", UserError, "vLLM cannot run this model"),
    ):
        monkeypatch.setattr(sampler, "_heard", lambda why=why: ("answer", ["failed", why]))
        with pytest.raises(kind, match=said):
            list(sampler._hear("load"))


def test_with_filters_no_log_probs_come_of_an_old_model(engine, ray, trainer):
    run, worker = trainer(), Remote(engine())
    ray.get(run.ends.meet(worker))
    version, _ = publish(run)
    with pytest.raises(UserError, match="whose model is never updated cannot compute the log-probs"):
        ray.get(run.sampler.ask(version, REQUESTS, SamplingParams(6, top_p=0.9), worker))


@pytest.mark.parametrize(
    ("wish", "placed", "sampling", "lora", "cuda", "kind", "why"),
    [
        ("auto", {}, {}, False, True, "nccl", ""),
        ("nccl", {}, {}, False, True, "nccl", ""),
        ("object_store", {}, {}, False, True, None, ""),
        ("gloo", {}, {}, False, False, "gloo", ""),
        ("auto", {}, {}, False, False, None, ""),
        ("auto", {"sampler_gpus": 0.0}, {}, False, True, None, ""),
        ("nccl", {"sampler_gpus": 0.0}, {}, False, True, None, r"GPUs for the samplers \(placement.sampler_gpus\)"),
        ("nccl", {}, {}, False, False, None, "needs a GPU for the trainer"),
        ("auto", {}, {"top_p": 0.9}, False, True, None, ""),
        ("nccl", {}, {"top_k": 5}, False, True, None, "need a second copy of the weights"),
        ("nccl", {}, {"sampler": "embedded"}, False, True, None, "the sampler is embedded"),
        ("gloo", {}, {}, True, False, None, "needs only the adapter"),
        ("gloo", {"cluster": "ray://head:10001"}, {}, False, False, None, "not part of the cluster"),
    ],
)
def test_a_broadcast_is_chosen_where_it_can_be_and_refused_in_a_sentence(
    monkeypatch, wish, placed, sampling, lora, cuda, kind, why
):
    model = a_model(Lora(rank=4) if lora else None)
    monkeypatch.setattr(ray_placement.importlib.util, "find_spec", lambda name: object())
    if cuda:
        monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    placement = Placement(**{"cluster": "auto", "sampler_gpus": 1.0, "weight_transfer": wish, **placed})
    config = OnlineConfig(placement=placement, sampling=Sampling(**{"sampler": "vllm", **sampling}))
    if not why:
        assert ray_placement.agreed_transfer(config, model, Alone()) == kind
        return
    with pytest.raises(UserError, match=f"placement.weight_transfer={wish} is not possible, because .*{why}"):
        ray_placement.agreed_transfer(config, model, Alone())


def test_a_sampler_whose_engine_is_lost_ends_its_process():
    assert os.waitstatus_to_exitcode(forked(lambda: ray_sampler._end(RankLost("it is gone")))) == RankLost.exit_status


def test_a_version_is_gathered_out_of_shards_and_only_rank_0_holds_it(tmp_path):
    a_model().save(tmp_path / "model")
    ranks.run(2, "vllm_shards", "publishes", tmp_path / "model", tmp_path / "said.json", lockstep=True)
    assert json.loads((tmp_path / "said.json").read_text()) == [[3, True], [0, False]]
