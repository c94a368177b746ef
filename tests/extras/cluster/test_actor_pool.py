"""Which worker of a pool gets which job, on a stand-in for Ray that answers when it is told to."""

from __future__ import annotations

import itertools
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest

from psigrad.errors import UserError
from psigrad_extras.cluster import actor_pool, ray_connection
from psigrad_extras.cluster.actor_pool import ActorPool, Affinity


class Lost(Exception):
    pass


class Raised(Exception):
    def __init__(self, cause, said=""):
        super().__init__(said)
        self.cause = cause


@dataclass(frozen=True)
class Ref:
    """An answer of an actor."""

    number: int
    answer: object
    identity: int = field(default_factory=itertools.count().__next__)


class Ray:
    """Actors are numbered. An answer is there once its actor is not `held`; an actor in `dead` has none."""

    exceptions = SimpleNamespace(RayError=Lost, RayTaskError=Raised)

    def __init__(self):
        self.held, self.dead, self.made = set(), set(), 0

    def remote(self, **wants):
        return lambda kind: SimpleNamespace(remote=self._make)

    def _make(self, *arguments):
        self.made += 1
        number = self.made
        return SimpleNamespace(number=number, ready=SimpleNamespace(remote=lambda: Ref(number, True)))

    def wait(self, refs, num_returns, timeout):
        return [ref for ref in refs if ref.number in self.dead or ref.number not in self.held], []

    def get(self, ref):
        if ref.number in self.dead:
            raise Lost
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer

    def kill(self, actor):
        self.dead.add(actor.number)

    def cluster_resources(self):
        return {"CPU": 4.0, "GPU": 1.0}


@pytest.fixture
def ray(monkeypatch):
    made = Ray()
    monkeypatch.setattr(ray_connection, "connect", lambda address: made)
    return made


def make(count=2, **settings) -> ActorPool:
    usual = {"name": "worker", "address": "", "cpus": 1, "minutes": 1.0, "log": lambda *a, **k: None}
    return ActorPool(object, (), count=count, **{**usual, **settings})


def whose(answer, worker):
    """A job: its answer and the number of the worker that was asked."""
    return Ref(worker.number, (answer, worker.number))


def run(pool, affinities) -> dict[int, int]:
    """By job, the worker that answered it."""
    return {place: by for place, (_, by) in pool.run([partial(whose, place) for place in range(len(affinities))], affinities)}


def test_a_job_goes_back_to_its_worker_and_elsewhere_only_when_that_is_lost(ray):
    pool, affinities = make(), [Affinity() for _ in range(8)]
    first = run(pool, affinities)
    assert set(first.values()) == {1, 2}
    for _ in range(3):
        assert run(pool, affinities) == first
    backwards = run(pool, affinities[::-1])
    assert {7 - place: by for place, by in backwards.items()} == first
    ray.dead.add(1)
    after = run(pool, affinities)
    assert all(by == 2 for place, by in after.items() if first[place] == 2), "the others stay where they were"
    assert {by for place, by in after.items() if first[place] == 1} <= {2, 3}
    assert pool.entries["lost"] == 1


def test_a_worker_that_does_not_answer_is_left(ray, monkeypatch):
    pool, affinities = make(), [Affinity() for _ in range(8)]
    first = run(pool, affinities)
    monkeypatch.setattr(actor_pool, "PATIENCE", 0.0)
    monkeypatch.setattr(actor_pool, "TIMES", 0.0)
    ray.held.add(1)
    after = run(pool, affinities)
    assert set(first.values()) == {1, 2} and 1 not in after.values()
    assert pool.entries["again"] >= 1


def test_every_worker_is_greeted_also_one_in_the_place_of_another(ray):
    greeted = []
    pool = make(greet=lambda worker: greeted.append(worker.number) or Ref(worker.number, ""))
    run(pool, [None] * 4)
    assert greeted == [1, 2]
    ray.dead.add(1)
    run(pool, [None] * 4)
    assert greeted == [1, 2, 3]


def test_jobs_without_an_affinity_go_to_whoever_is_free(ray):
    pool = make()
    assert set(run(pool, [None] * 6).values()) == {1, 2}


def begin(pool, ray, jobs: int, needs: object = None):
    """A batch of so many jobs, under way on workers that do not answer yet."""
    batch = pool.begin(needs)
    for job in range(jobs):
        batch.add(partial(whose, job))
    assert batch.answers(0.0) == []
    return batch


def at_work(pool) -> dict[int, list[object]]:
    """By worker, what the jobs that it is at need."""
    return {w.actor.number: [owed.batch.needs for owed in w.work.values()] for w in pool._workers}


def test_a_worker_is_at_several_jobs_and_the_next_goes_to_who_has_the_fewest(ray):
    pool = make(count=3, depth=4)
    assert run(pool, [None]) == {0: 1}
    ray.held |= {1, 2, 3}
    batch = begin(pool, ray, 5)
    assert sorted(map(len, at_work(pool).values())) == [1, 2, 2]
    for job in range(9):
        batch.add(partial(whose, 5 + job))
    batch.answers(0.0)
    assert [len(jobs) for jobs in at_work(pool).values()] == [4, 4, 4] and len(batch.waiting) == 2
    ray.held.discard(2)
    answered = batch.answers(0.0)
    assert {by for _, (_, by) in answered} == {2} and len(answered) >= 4
    ray.held.clear()
    while batch.pending:
        answered += batch.answers(0.1)
    assert sorted(place for place, _ in answered) == list(range(14)) and pool.entries["again"] == 0


def test_other_weights_wait_until_a_worker_has_written_all_of_those_before(ray):
    pool = make(count=2, depth=4)
    run(pool, [None] * 4)
    ray.held |= {1, 2}
    first, second = begin(pool, ray, 6, needs=3), begin(pool, ray, 5, needs=4)
    assert at_work(pool) == {1: [3, 3, 3], 2: [3, 3, 3]}, "a worker with room does not mix them"
    also = begin(pool, ray, 1, needs=3)
    assert sorted(map(len, at_work(pool).values())) == [3, 3], "nor does the younger batch go before the older"
    ray.held.discard(1)
    while len(first.done) < 3:
        first.answers(0.1)
    ray.held.add(1)
    second.answers(0.0), also.answers(0.0)
    assert at_work(pool)[2] == [3, 3, 3] and set(at_work(pool)[1]) <= {4}


def test_collections_of_the_same_weights_share_a_flight(ray):
    """As at the start of a run with a lag, and where an evaluation is beside a collection."""
    pool = make(count=1, depth=4)
    run(pool, [None])
    ray.held.add(1)
    first, second = begin(pool, ray, 2, needs=0), begin(pool, ray, 3, needs=0)
    assert at_work(pool) == {1: [0, 0, 0, 0]} and (len(first.waiting), len(second.waiting)) == (0, 1)


def test_of_a_workers_jobs_the_late_one_alone_goes_to_another(ray):
    pool = make(count=2, depth=2)
    run(pool, [None] * 2)
    ray.held |= {1, 2}
    one, batch = pool._workers[0], pool.begin()
    for job in range(2):
        batch.add(partial(whose, job), Affinity(one))
    assert batch.answers(0.0) == [] and at_work(pool) == {1: [None, None], 2: []}
    late = next(iter(one.work.values()))
    object.__setattr__(late, "since", late.since - 2 * actor_pool.PATIENCE)
    assert batch.answers(0.0) == [] and pool.entries["again"] == 1
    ray.held.discard(2)
    answered = [one for _ in range(3) for one in batch.answers(0.0)]
    assert answered == [(0, (0, 2))] and pool.entries["again"] == 1, "the other is in time"


def test_the_jobs_of_a_lost_worker_all_go_to_others(ray):
    pool = make(count=2, depth=3)
    run(pool, [None] * 4)
    ray.held |= {1, 2}
    batch = begin(pool, ray, 6)
    ray.dead.add(1)
    ray.held.discard(2)
    answered = []
    while batch.pending:
        answered += batch.answers(0.1)
    assert sorted(place for place, _ in answered) == list(range(6)) and {by for _, (_, by) in answered} <= {2, 3}
    assert pool.entries["lost"] == 1 and pool.entries["again"] == 3


def test_a_job_that_ends_every_worker_ends_the_run(ray):
    """As one that needs more memory than a machine has: each worker starts well, and none comes back from it."""
    told = []
    pool = make(log=lambda kind, text, **fields: told.append(kind))

    def deadly(worker):
        ray.dead.add(worker.number)
        return Ref(worker.number, None)

    with pytest.raises(UserError, match=r"^6 workers were lost .* during the same job; the last one: Lost"):
        list(pool.run([deadly]))
    assert told.count("worker_lost") == pool.entries["lost"] == 6 and pool.entries["again"] == 5


def test_an_only_worker_that_stands_still_is_replaced(ray, monkeypatch):
    """Nobody else could do its work; a worker that is late and no more goes on."""
    monkeypatch.setattr(actor_pool, "PATIENCE", 0.0)
    monkeypatch.setattr(actor_pool, "TIMES", 0.0)
    pool = make(count=1, minutes=0.01)
    assert run(pool, [None]) == {0: 1}
    ray.held.add(1)
    began = time.monotonic()
    assert run(pool, [None] * 2) == {0: 2, 1: 2} and time.monotonic() - began > 0.6
    assert pool.entries["lost"] == 1 and 1 in ray.dead


def test_a_job_is_entered_while_no_other_thread_looks_at_what_waits(ray):
    """Else a deque would change while it is looked through."""
    inside, go = threading.Event(), threading.Event()

    class Slow(list):
        def append(self, job):
            inside.set()
            assert go.wait(10.0)
            super().append(job)

    pool = make()
    batch = pool.begin()
    batch.jobs = Slow()
    adding = threading.Thread(target=batch.add, args=(partial(whose, 0),))
    adding.start()
    assert inside.wait(10.0)
    assert not pool._watch._stirred.acquire(timeout=0.1)
    go.set()
    adding.join()
    assert [answer for answer, _ in batch.answers(1.0)] == [0]


@pytest.mark.parametrize(("settings", "wanted"), [({}, 4), ({"spare_cpus": 3}, 1), ({"spare_cpus": 9}, 1), ({"gpus": 0.5}, 2)])
def test_as_many_as_there_is_room_for_leaves_room_for_others(ray, settings, wanted):
    assert make(0, **settings).wanted == wanted


def test_what_a_worker_raises_is_told_with_its_place(ray):
    told = []
    pool = make(log=lambda kind, text, **fields: told.append((kind, fields)))

    def run(raised):
        with pytest.raises(UserError) as error:
            list(pool.run([lambda worker: Ref(worker.number, raised)]))
        return str(error.value)

    assert run(Raised(UserError("no such thing"))) == "no such thing"
    files = (("/x/psigrad/a.py", 1), ("/home/me/mine.py", 7), ("/y/site-packages/torch/b.py", 9))
    said = "\n".join(f'File "{file}", line {line}, in f' for file, line in files)
    assert run(Raised(KeyError("x"), said)) == "A worker failed on the cluster (KeyError: 'x', /home/me/mine.py, line 7)."
    assert told[-1] == ("worker_failed", {"traceback": said})


# What Ray 2.60 says, its figures of the object store and the list of the largest processes cut.
LOW = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: 65) was 7.46GB used / "
    "23.54GB limit (0.316838)\nOOM kill reason: Memory usage 8008544256B exceeded threshold of 1263825152B (5.0% of "
    "25276502016B limit)\n" + "PID\tMEM(GB)\tCOMMAND\n" * 90 + "To revert to the legacy policy, set it."
)


def test_a_worker_that_its_machines_memory_ended_is_told_as_that(ray, monkeypatch):
    monkeypatch.setattr(actor_pool, "SOONER", 0.0)
    monkeypatch.setattr(Ray, "get", lambda self, ref: (_ for _ in ()).throw(Lost(LOW)))
    told = []
    pool = make(log=lambda kind, text, **fields: told.append((kind, text, fields)))
    why = "Lost: Ray ended the process because its machine ran low on memory (7.46 of 23.54 GB in use); in placement, give each"
    with pytest.raises(UserError, match=re.escape(f"6 workers in a row could not start on the cluster: {why}")):
        run(pool, [None])
    assert told and all(kind == "worker_lost" and why in text for kind, text, _ in told)
    said = told[0][2]["said"]
    assert "OOM kill reason" in said and said.endswith("To revert to the legacy policy, set it.") and len(said) < 1300 < len(LOW)


def test_a_cluster_that_cannot_ask_the_driver_is_told_as_that():
    """Where the driver wants Ray's token and the cluster has none; what Ray 2.60 says of it."""
    said = "The actor is dead because all references to the actor were removed including lineage ref count. The actor never ran"
    reason, found = actor_pool._cause_of(Lost(f"{said} - it was cancelled before it started running."))
    assert "RAY_AUTH_MODE=disabled for this process too" in reason and found.startswith(said)
    assert "RAY_AUTH_MODE" not in actor_pool._cause_of(Lost(said.replace("never ran", "ran")))[0]


def test_a_cluster_that_refuses_workers_for_a_moment_ends_no_run(ray, monkeypatch):
    """As one does that just began: each of them dies within milliseconds, and six would be gone before it is ready."""
    ray.dead |= set(range(1, 20))
    pool, begun = make(count=1), time.monotonic()
    monkeypatch.setattr(actor_pool, "SOONER", 0.05)  # waits of 0.1, 0.2, 0.4, 0.8 and 1.6 s
    threading.Timer(1.0, ray.dead.clear).start()
    assert run(pool, [None]).keys() == {0}
    assert time.monotonic() - begun > 1.0 and 4 <= ray.made < actor_pool.LOSSES


def test_where_no_more_workers_can_start_those_that_are_there_go_on(ray):
    """As on a machine that was cut off, where each dies at once: the next is tried after 2, 4, 8, … s, and none ends the run."""
    pool = make(count=2)
    assert set(run(pool, [None] * 4).values()) == {1, 2}
    ray.dead |= set(range(2, 20))
    for _ in range(actor_pool.LOSSES + 2):
        assert set(run(pool, [None] * 4).values()) == {1}
    assert ray.made == 3, "one was tried again"
    for _ in range(actor_pool.LOSSES):
        pool._next_start = 0.0
        assert set(run(pool, [None] * 4).values()) == {1}
    assert ray.made == 3 + actor_pool.LOSSES
    ray.dead -= set(range(10, 20))
    pool._next_start = 0.0
    assert set(run(pool, [None] * 4).values()) == {1, 10}
    assert pool._failed == 0


@pytest.mark.parametrize("address", ["auto", "ray-head"])
def test_a_cluster_that_wants_a_token_is_no_missing_cluster(monkeypatch, address):
    """By default Ray makes a token for the first cluster of its own on a machine, and wants it of those started later."""

    def init(**settings):
        assert settings.get("address"), "no cluster of its own is started beside the one that is there"
        raise ConnectionError("Failed to connect") from RuntimeError("RPC error: InvalidAuthToken: missing")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(UserError, match="set RAY_AUTH_MODE=token"):
        ray_connection.connect(address)


def test_without_a_cluster_auto_starts_one(monkeypatch):
    begun = []

    def init(**settings):
        begun.append(settings.get("address"))
        if settings.get("address"):
            raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    ray_connection.connect("auto")
    assert begun == ["auto", None]
    with pytest.raises(UserError, match="There is no Ray cluster at 'ray-head'"):
        ray_connection.connect("ray-head")
