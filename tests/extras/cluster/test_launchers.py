"""The same run started by `--processes 2`, by torchrun, accelerate, Ray Train and as a job of a Ray cluster: the same bytes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from clusters import PATIENT, same
from ranks import ROOT, SUPPORT
from tiny_jobs import make_job

pytestmark = pytest.mark.cluster


def run(*command: str) -> str:
    """What a command said, which must end well."""
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **PATIENT}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict:
    folder = make_job(tmp_path_factory.mktemp("job"))
    return {
        "model": {"path": str(folder / "base")},
        "data": {"dataset": str(folder / "train.jsonl"), "eval_dataset": str(folder / "held_out.jsonl")},
        "optim": {"learning_rate": 1e-3},
        "sampling": {"max_completion_length": 4},
        "evaluation": {"eval_prompts": 4, "eval_steps": 2, "eval_kl": True},
        "reward": ["tiny_rewards:early_letters"],
        "prompts_per_step": 4,
        "num_generations": 4,
        "run": {"max_steps": 4, "threads": 1, "progress": False, "report": False},
    }


def written(settings: dict, out: Path) -> Path:
    """run.yaml with this run folder."""
    file = out.parent / "run.yaml"
    file.write_text(yaml.safe_dump({**settings, "run": {**settings["run"], "output_dir": str(out)}}))
    return file


@pytest.fixture(scope="module")
def by_itself(settings, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("processes") / "run"
    run("-m", "psigrad", "grpo", "--config", str(written(settings, out)), "--processes", "2")
    return out


def test_torchrun(settings, by_itself, tmp_path):
    file = written(settings, tmp_path / "run")
    run("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "psigrad", "grpo", "--config", str(file))
    same(tmp_path / "run", by_itself)


def test_accelerate_launch(settings, by_itself, tmp_path):
    """As on a machine with GPUs, where it starts a process for each."""
    file = written(settings, tmp_path / "run")
    how = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    run("-m", "accelerate.commands.launch", *how, "-m", "psigrad", "grpo", "--config", str(file))
    same(tmp_path / "run", by_itself)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The address of the dashboard of a cluster of this machine, which has jobs."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else whoever submits needs the token that Ray makes
    ray = str(Path(sys.executable).with_name("ray"))
    port = free_port()
    start = ["start", "--head", "--num-cpus=2", "--num-gpus=0", "--port=6399", f"--dashboard-port={port}"]
    environment = {**os.environ, **PATIENT, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
    subprocess.run([sys.executable, ray, *start], env=environment, check=True, capture_output=True, timeout=120)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([sys.executable, ray, "stop", "--force"], check=True, capture_output=True, timeout=120)


def test_the_command_of_the_ray_job_on_kubernetes(settings, cluster, tmp_path):
    """Submitted to a cluster of this machine, with as many processes and samplers as it has room for."""
    (job,) = yaml.safe_load_all((ROOT / "examples/cluster/rayjob.yaml").read_text())
    asked, file = job["spec"]["entrypoint"], written(settings, tmp_path / "run")
    here = {
        "psigrad grpo": f"{sys.executable} -m psigrad grpo",
        "/runs/run.yaml": str(file),
        "/runs/grpo": str(tmp_path / "run"),
        "--processes 8": "--processes 2",
        "--samplers 8 --sampler-gpus 1 --sampler-cpus 8": "--samplers 2 --sampler-gpus 0 --sampler-cpus 1",
    }
    for there, own in here.items():
        assert there in asked
        asked = asked.replace(there, own)
    ray = str(Path(sys.executable).with_name("ray"))
    said = run(ray, "job", "submit", f"--address={cluster}", "--entrypoint-num-cpus=0", "--", *asked.split())
    assert "succeeded" in said
    run(*asked.replace(f"{tmp_path / 'run'} ", f"{tmp_path / 'typed'} ").split()[1:])
    same(tmp_path / "run", tmp_path / "typed")


def test_the_documented_ray_train_script(settings, by_itself, tmp_path):
    file = written(settings, tmp_path / "run")
    (block,) = [
        code for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/scale.md").read_text(), re.S) if "ray.train" in code
    ]
    here = block.replace("/shared/run.yaml", str(file)).replace("use_gpu=True", "use_gpu=False")
    here = here.replace('"cpu:gloo,cuda:nccl"', '"cpu:gloo"')  # this torch has no NCCL
    assert here.count(str(file)) == 1 and "use_gpu=False" in here
    script = tmp_path / "train.py"
    script.write_text(f"import ray\nray.init(num_cpus=2, include_dashboard=False)\n{here}")
    run(str(script))
    same(tmp_path / "run", by_itself)


def test_one_process_is_not_two(settings, by_itself, tmp_path):
    """Negative control: the comparison sees another number of processes."""
    run("-m", "psigrad", "grpo", "--config", str(written(settings, tmp_path / "run")))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() != (by_itself / "metrics.jsonl").read_bytes()
