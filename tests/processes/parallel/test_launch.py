"""The launcher of one machine's processes: who it says has ended the others."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from psigrad.config import OnlineConfig
from psigrad.config.fields import flag_of, settings_of
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
        assert f"process {told} of 2 (counted from 0) {how}" in said and "last words" in said


def test_where_those_that_wait_are_ended_by_a_signal_who_is_still_at_work_is_named(capsys, monkeypatch):
    """As NCCL's own time-out does: process 1 stands still, and the others are aborted."""
    monkeypatch.setattr(launch, "GRACE", 0.1)
    status = launch._watch([rank_of(0, -6), rank_of(1, None), rank_of(2, -6)])
    said = capsys.readouterr().err
    assert status == 134 and "process 0 of 3 (counted from 0) was ended by SIGABRT" in said
    assert "process 1 was still running" in said
    launch._watch([rank_of(0, -6), rank_of(1, None), rank_of(2, None)])
    assert "processes 1, 2 were still running and may have hung, which makes the others fail" in capsys.readouterr().err


def rank_of(number: int, code: int | None):
    rank = launch._Rank.__new__(launch._Rank)
    rank.rank, rank.words = number, b"last words"
    rank.process = SimpleNamespace(returncode=code, poll=lambda: code)
    return rank


FILES = Path(__file__).parents[3] / "examples" / "cluster"


SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""


SCONTROL = """#!/bin/bash
[ "$1" = show ] && { echo machine1; echo machine2; } || echo "$@" >> "$CALLS"
"""


# a run that ends well, fails at once, or saves for a while after SIGTERM and then ends as torchrun does
TORCHRUN = """#!/bin/bash
echo "$@" > "$CALLS.torchrun"
case "$KIND" in
  well) exit 0;;
  fails) exit 1;;
  saves) trap 'sleep 0.3; touch "$CALLS.saved"; exit 1' TERM; touch "$CALLS.ready"; while true; do sleep 0.02; done;;
  finishes) trap 'sleep 0.1; exit 0' TERM; touch "$CALLS.ready"; while true; do sleep 0.02; done;;
esac
"""


@pytest.fixture
def slurm(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", TORCHRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"

    def run(kind: str, over: bool = False) -> tuple[int, str]:
        """(exit status, what scontrol was told) of a job; `over`: its time is over once it trains."""
        own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "KIND": kind}
        job = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "machine[1-2]"}
        words = ["bash", str(FILES / "slurm.sh"), "/shared/run.yaml", "/shared/runs/grpo"]
        script = subprocess.Popen(words, env={**os.environ, **own, **job})
        try:
            end = time.monotonic() + 20
            while over and not (tmp_path / "calls.ready").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            if over:
                script.send_signal(signal.SIGTERM)  # what --signal=B:TERM sends, to the script alone
            status = script.wait(timeout=20)
        finally:
            script.kill()
        return status, calls.read_text() if calls.exists() else ""

    return run


def test_a_job_whose_time_is_over_saves_and_goes_back_into_the_queue(slurm, tmp_path):
    assert slurm("saves", over=True) == (0, "requeue 77\n")
    assert (tmp_path / "calls.saved").exists(), "the script has waited for the checkpoint"
    said = (tmp_path / "calls.torchrun").read_text()
    assert "--shutdown-timeout=840" in said and "--rdzv-endpoint=machine1:29500" in said and "--nnodes=2" in said


@pytest.mark.parametrize(("kind", "over", "status"), [("fails", False, 1), ("well", False, 0), ("finishes", True, 0)])
def test_what_fails_or_is_finished_does_not(slurm, kind, over, status):
    assert slurm(kind, over) == (status, "")


def test_the_job_asks_for_whole_machines_and_has_time_to_save():
    text = (FILES / "slurm.sh").read_text()
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--exclusive", "--mem=0", "--cpus-per-task=96", "--requeue"} <= {*asked}
    (before,) = (int(line.partition("@")[2]) for line in asked if line.startswith("--signal=B:TERM@"))
    (patience,) = (int(word.partition("=")[2]) for word in text.split() if word.startswith("--shutdown-timeout="))
    assert 30 < patience < before, "torchrun ends the ranks before SLURM ends the job"


def flags_of(command: str) -> list[str]:
    return [word for word in shlex.split(command) if word.startswith("--")]


def test_samplers_find_no_room_where_the_trainer_is():
    cluster = yaml.safe_load((FILES / "ray.yaml").read_text())
    kinds = cluster["available_node_types"]
    assert kinds[cluster["head_node_type"]]["resources"] == {"CPU": 0, "GPU": 0}
    assert kinds["sampler"]["resources"]["GPU"] > 0
    job = yaml.safe_load((FILES / "rayjob.yaml").read_text())["spec"]
    head, (samplers,) = job["rayClusterSpec"]["headGroupSpec"], job["rayClusterSpec"]["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"} and job["entrypointNumCpus"] == 0
    words = shlex.split(job["entrypoint"])
    given = dict(itertools.pairwise(words))
    (own,) = head["template"]["spec"]["containers"]
    (other,) = samplers["template"]["spec"]["containers"]
    assert own["resources"]["limits"]["nvidia.com/gpu"] == int(given["--processes"])
    room = samplers["replicas"] * other["resources"]["limits"]["nvidia.com/gpu"]
    assert room == int(given["--samplers"]) * int(given["--sampler-gpus"])
    cores = int(other["resources"]["requests"]["cpu"]) // int(given["--sampler-cpus"])
    assert cores >= other["resources"]["limits"]["nvidia.com/gpu"], "each GPU's sampler finds its cores"


@pytest.mark.parametrize("name", ["slurm.sh", "ray.yaml", "rayjob.yaml"])
def test_their_commands_have_flags_that_there_are(name):
    known = {flag_of(setting) for setting in settings_of(OnlineConfig)} | {"--config"}
    text = (FILES / name).read_text().replace("\\\n", " ")
    if name == "rayjob.yaml":
        text = yaml.safe_load(text)["spec"]["entrypoint"]
    commands = [line.partition("psigrad grpo ")[2].rstrip("&") for line in text.splitlines() if "psigrad grpo " in line]
    assert commands and all(flags_of(command) for command in commands)
    assert not {flag for command in commands for flag in flags_of(command)} - known
