"""Samplers on a Ray cluster: the same run on any number of them, and through the loss of workers, machines and the head."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from clusters import PATIENT, same
from ranks import ROOT, SUPPORT
from tiny_jobs import make_job
from two_machines import Machines

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def start(job: Path, out: Path, *, size: int = 1, **settings) -> subprocess.Popen:
    """The driver of a run; with `size` above 1 rank 0 of as many that train together, started by torchrun."""
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **PATIENT}
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={size}"] if size > 1 else []
    command = [sys.executable, *launcher, str(SUPPORT / "cluster_runs.py"), str(job), str(out), json.dumps(settings)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(run: subprocess.Popen, status: int = 0, seconds: float = 400) -> str:
    try:
        said = run.communicate(timeout=seconds)[0]
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == status, said[-4000:]
    return said


def train(job: Path, out: Path, **settings) -> Path:
    finish(start(job, out, **settings))
    return out


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """whole(lag, steps): a run on two workers that nothing disturbed."""
    done = {}

    def of(lag: int = 0, steps: int = 6) -> Path:
        if (lag, steps) not in done:
            done[lag, steps] = train(job, tmp_path_factory.mktemp("whole") / "run", lag=lag, steps=steps)
        return done[lag, steps]

    return of


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def kinds(folder: Path) -> list[str]:
    return [event["kind"] for event in events(folder)]


def joined(folder: Path) -> int:
    """The most workers that there have been at once."""
    begun = (folder / "events.jsonl").exists()
    return max((event["workers"] for event in events(folder) if event["kind"] == "worker_joined"), default=0) if begun else 0


def steps_done(folder: Path) -> int:
    file = folder / "timings.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return max((row["step"] for row in rows), default=0)


def until(condition, run: subprocess.Popen, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, run.communicate()[0][-4000:]
        assert time.monotonic() < end
        time.sleep(0.02)


def workers(run: subprocess.Popen, kind: str = "RolloutWorker") -> list[psutil.Process]:
    """The worker processes of a kind; a driver's own cluster is in its process tree."""
    return [p for p in psutil.Process(run.pid).children(recursive=True) if kind in " ".join(p.cmdline())]


@pytest.mark.parametrize("lag", [0, 1])
def test_rewards_on_the_cluster_are_those_of_the_trainers_machine(job, whole, tmp_path, lag):
    run = start(job, tmp_path / "run", lag=lag, steps=30, samplers=1, scorers=1)
    until(lambda: steps_done(tmp_path / "run") >= 4, run)
    scorers = workers(run, "RewardWorker")
    assert len(scorers) == 1
    scorers[0].kill()
    assert "A scorer was lost" in finish(run)
    same(tmp_path / "run", whole(lag, 30))
    assert kinds(tmp_path / "run").count("worker_lost") == 1


@pytest.mark.parametrize("lag", [0, 2])
def test_environments_on_the_cluster_play_as_on_the_trainers_machine(job, tmp_path, lag):
    here = train(job, tmp_path / "here", kind="episodes", lag=lag, steps=30, samplers=1)
    there = tmp_path / "there"
    run = start(job, there, kind="episodes", lag=lag, steps=30, samplers=1, environment_actors=2, cpus=3)
    for step in (3, 9):
        until(lambda step=step: steps_done(there) >= step, run)
        actors = workers(run, "EnvironmentWorker")
        below = actors[0].children(recursive=True)
        actors[0].kill()
        psutil.wait_procs(below, 10)
        assert not any(child.is_running() for child in below), "the environment's own processes end with it"
    assert "An environment actor was lost" in finish(run)
    same(there, here)
    assert kinds(there).count("worker_lost") >= 2


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_workers_gives_the_same_run(job, whole, tmp_path, lag, count):
    same(train(job, tmp_path / "run", lag=lag, samplers=count), whole(lag))


def test_two_processes_in_shards_train_with_samplers_on_a_cluster(job, whole, tmp_path):
    out = tmp_path / "run"
    finish(start(job, out, size=2, strategy="fsdp", lag=2))
    for name in ("reward", "completions/mean_length", "grad_norm"):
        before, after = ([row.get(name) for row in rows(folder)] for folder in (whole(2), out))
        assert after == pytest.approx(before, rel=2e-3)


def rows(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "reward" in row]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_killed_worker_costs_nothing_but_time(job, whole, tmp_path, lag):
    run = start(job, tmp_path / "run", lag=lag, steps=30)
    for step in (3, 9):
        until(lambda step=step: steps_done(tmp_path / "run") >= step, run)
        workers(run)[0].kill()
    finish(run)
    same(tmp_path / "run", whole(lag, 30))
    assert kinds(tmp_path / "run").count("worker_lost") >= 2
    last = events(tmp_path / "run")[-1]
    assert last["kind"] == "finished" and last["ledger"]["issued"] == last["ledger"]["trained"] + sum(
        count for name, count in last["ledger"].items() if name.startswith("dropped")
    )


def test_a_worker_that_stands_still_is_passed_by(job, whole, tmp_path):
    run = start(job, tmp_path / "run", lag=2, steps=120, patience=2.0)
    until(lambda: steps_done(tmp_path / "run") >= 3 and joined(tmp_path / "run") >= 2, run)  # else the one is not at work yet
    workers(run)[0].suspend()
    finish(run)
    same(tmp_path / "run", whole(2, 120))
    assert "worker_late" in kinds(tmp_path / "run")


def test_the_driver_killed_goes_on_bitwise(job, whole, tmp_path):
    run = start(job, tmp_path / "run", lag=2, steps=30)
    until(lambda: steps_done(tmp_path / "run") >= 9, run)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    train(job, tmp_path / "run", lag=2, steps=30)
    same(tmp_path / "run", whole(2, 30))
    assert "resumed" in kinds(tmp_path / "run")


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


def test_machines_come_and_go(job, whole, tmp_path, request):
    undisturbed = whole(2, 120)  # before there is a cluster, which "auto" would find
    cluster = request.getfixturevalue("cluster")
    node = cluster.add_node(num_cpus=1)
    run = start(job, tmp_path / "run", lag=2, steps=120, cluster=cluster.address, samplers=0)
    until(lambda: steps_done(tmp_path / "run") >= 3 and joined(tmp_path / "run") >= 2, run)  # one of them on the node
    cluster.remove_node(node, allow_graceful=False)
    before = steps_done(tmp_path / "run")
    until(lambda: steps_done(tmp_path / "run") >= before + 5, run)
    cluster.add_node(num_cpus=2)
    finish(run)
    same(tmp_path / "run", undisturbed)
    found = events(tmp_path / "run")
    assert any(event["kind"] == "worker_lost" for event in found)
    assert joined(tmp_path / "run") >= 2


@pytest.fixture
def machines(tmp_path):
    made = Machines(tmp_path, {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]), "OMP_NUM_THREADS": "1", **PATIENT})
    yield made
    made.close()


def test_a_machine_that_is_cut_off_is_passed_by_and_may_come_back(job, whole, tmp_path, request, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # as on its machines: a driver that wants a token answers to none of them
    undisturbed = whole(2, 400)  # before there is a cluster, which "auto" would find
    machines, out = request.getfixturevalue("machines"), tmp_path / "run"
    run = start(job, out, lag=2, steps=400, cluster=machines.address, samplers=2, patience=2.0)
    machines.join()
    until(lambda: steps_done(out) >= 3 and joined(out) >= 2, run)
    machines.cut()
    until(lambda: "worker_late" in kinds(out), run)  # the task that it had is another's
    before = steps_done(out)
    until(lambda: steps_done(out) >= before + 5, run)
    until(lambda: "worker_lost" in kinds(out), run)
    machines.mend()
    until(lambda: kinds(out).count("worker_joined") >= 3, run)
    finish(run)
    same(out, undisturbed)


def test_a_lost_head_ends_the_run_which_then_goes_on(job, whole, tmp_path, request):
    undisturbed = whole(2, 120)  # before there is a cluster, which "auto" would find
    cluster, out = request.getfixturevalue("cluster"), tmp_path / "run"
    cluster.add_node(num_cpus=1)
    run = start(job, out, lag=2, steps=120, cluster=cluster.address, samplers=2)
    until(lambda: steps_done(out) >= 12, run)
    cluster.shutdown()
    said = run.communicate(timeout=500)[0]
    assert run.returncode not in (0, None), said[-3000:]
    train(job, out, lag=2, steps=120)
    same(out, undisturbed)
    assert "resumed" in kinds(out)


def test_a_head_that_no_longer_answers_is_told_before_ray_ends_the_driver(job, tmp_path, cluster):
    """The control plane alone is lost, as where it is on another machine; workers go on for a while."""
    cluster.add_node(num_cpus=1)
    run, out = start(job, tmp_path / "run", lag=2, steps=100_000, cluster=cluster.address, samplers=2), tmp_path / "run"
    sentence = f"The head of the Ray cluster at {cluster.address} has not answered for 30 s"
    until(lambda: steps_done(out) >= 6, run)
    cluster.head_node.kill_gcs_server()
    said = finish(run, status=1)
    assert f"psigrad: {sentence}." in said and "head_lost" in kinds(out)
    reason = events(out)[-1]["reason"]
    assert f"{sentence}; start a cluster again, and repeat the command to resume from the newest checkpoint." in reason


def test_workers_that_are_ended_because_memory_is_short_are_told_as_that(job, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    said = finish(start(job, tmp_path / "run", samplers=1), status=1)
    assert re.search(
        r"6 samplers in a row .*: OutOfMemoryError: Ray ended the process .* ran low on memory \([\d.]+ of [\d.]+ GB", said
    )


def line_of(what: str) -> int:
    """The line of faulty_user.py that raises."""
    lines = (SUPPORT / "faulty_user.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if f"# line of {what}" in line)


def test_what_users_code_prints_and_raises_on_workers_reaches_the_driver(job, tmp_path):
    file, out = SUPPORT / "faulty_user.py", tmp_path / "run"
    own = {"reward": [f"{file}:reward"], "environment": f"{file}:Environment", "max_unscored": 1.0}
    placed = {"samplers": 1, "scorers": 1, "environment_actors": 1, "cpus": 3}
    said = finish(start(job, out, kind="episodes", steps=4, config=own, **placed))
    reasons = {row["reason"] for row in map(json.loads, (out / "rollouts.jsonl").read_text().splitlines()) if row.get("reason")}
    assert f"reward raised ValueError: an odd answer (faulty_user.py, line {line_of('reward')})" in reasons
    assert f"the environment raised KeyError: 'the board' (faulty_user.py, line {line_of('environment')})" in reasons
    log = (out / "workers.log").read_text()
    for kind, words in (("RewardWorker", "the reward speaks"), ("EnvironmentWorker", "the environment speaks")):
        assert f"({kind} pid=" in said and words in said
        assert any(f" {kind} " in line and words in line for line in log.splitlines()), log


def test_a_sampler_that_raises_ends_the_run_with_its_file_and_line(job, tmp_path):
    file, out = SUPPORT / "faulty_user.py", tmp_path / "run"
    said = finish(start(job, out, sampler=f"{file}:Sampler", samplers=1), status=1)
    assert f"A sampler failed on the cluster (RuntimeError: no more tokens, {file}, line {line_of('sampler')})." in said
    (failed,) = [event for event in events(out) if event["kind"] == "worker_failed"]
    assert "raise RuntimeError" in failed["traceback"]


def test_mistakes_are_one_sentence(job, tmp_path):
    said = finish(start(job, tmp_path / "run", cluster="127.0.0.1:1"), status=1)
    assert "There is no Ray cluster at '127.0.0.1:1'" in said
    said = finish(start(job, tmp_path / "two", sampler_gpus=1.0, timeout_minutes=0.1), status=1)
    assert "each needs 1 CPU and 1 GPU" in said and "request less in placement" in said
    said = finish(start(job, tmp_path / "three", cluster="", environment_actors=1, kind="episodes"), status=1)
    assert "environment actors on a Ray cluster, but there is no --cluster" in said
