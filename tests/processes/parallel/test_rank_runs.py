"""Runs on several processes: alike on any number of them, bitwise after a kill -9, checkpoints that any number can read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ranks
import torch
from cases import slow
from rank_gradients import make_models
from safetensors.torch import load_file
from warm import warm

from psigrad.processes.parallel.world import RankLost
from psigrad.records import checkpoint


def train(job: Path, out: Path, recipe: str, size: int, strategy: str, kill: str = "", lora: str = "") -> Path:
    ranks.run(size, "rank_runs", "main", job, out, recipe, strategy, kill, lora, lockstep=strategy == "fsdp")
    return out


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """whole(recipe, size, strategy): the folder of a run that nobody interrupted."""
    done = {}

    def of(recipe: str, size: int, strategy: str) -> Path:
        key = (recipe, size, strategy)
        if key not in done:
            done[key] = train(job, tmp_path_factory.mktemp("whole") / "run", recipe, size, strategy)
        return done[key]

    return of


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "recipe",
    ["grpo", *(pytest.param(r, marks=pytest.mark.long) for r in ("sft", "ppo", "dpo", "reward", "online_dpo", "episodes"))],
)
def test_two_processes_train_as_one_does(whole, recipe, strategy):
    one, two = rows(whole(recipe, 1, "ddp")), rows(whole(recipe, 2, strategy))
    for row in (*one, *two):  # a process alone reuses what sampling computed, and compares less often
        for name in [name for name in row if name.startswith("sampling/")]:
            row.pop(name)
    assert [row.keys() for row in one] == [row.keys() for row in two]
    for before, after in zip(one, two, strict=True):
        for name, value in before.items():
            if isinstance(value, str):  # which pairs were right
                assert after[name] == value, (before["step"], name)
                continue
            close = 2e-3 if name == "explained_variance" else 2e-4  # a ratio to a variance of next to nothing
            assert after[name] == pytest.approx(value, rel=2e-3, abs=close), (before["step"], name)
    assert (whole(recipe, 2, strategy) / "model" / "config.json").exists()


KILLS = [
    ("fsdp", "backward 1 5"),
    *slow(("fsdp", "save 1 2"), ("ddp", "backward 1 5")),
    *(
        pytest.param(*x, marks=pytest.mark.long)
        for x in (("ddp", "save-alone 0 2"), ("ddp", "gather 0 40"), ("ddp", "forward 1 9"))
    ),
    *(pytest.param("fsdp", kill, marks=pytest.mark.long) for kill in ("gather 0 40", "forward 0 9", "save 0 2", "save 0 1")),
]


@pytest.mark.parametrize(("strategy", "kill"), KILLS)
def test_a_killed_process_ends_the_others_and_the_run_goes_on_bitwise(job, whole, tmp_path, strategy, kill):
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (job, tmp_path / "run", "grpo", strategy, kill)
        group = ranks.start(2, "rank_runs", "main", *arguments, lockstep=strategy == "fsdp", folder=meeting)
        killed = int(kill.split()[1])
        assert group[killed].wait(240) == -signal.SIGKILL
        began = time.monotonic()
        said = group[1 - killed].communicate(timeout=240)[1]
        assert time.monotonic() - began < 60 * ranks.MINUTES / 2, "it was told, and did not wait for the time-out"
        assert group[1 - killed].returncode not in (0, -signal.SIGKILL) and "RankLost" in said, said[-2000:]
        group[killed].communicate()
    train(job, tmp_path / "run", "grpo", 2, strategy)
    undisturbed = whole("grpo", 2, strategy)
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert any(row["step"] > 2 for row in rows(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["", "save 1 2"])
def test_shards_are_written_beside_the_steps(job, whole, tmp_path, kill):
    """Two processes write what they would have written while steps waited, also after one was killed in its second save."""
    if kill:
        with tempfile.TemporaryDirectory() as meeting:
            arguments = (job, tmp_path / "run", "sft beside", "fsdp", kill)
            group = ranks.start(2, "rank_runs", "main", *arguments, lockstep=True, folder=meeting)
            for rank in group:
                rank.communicate(timeout=240)
        assert group[1].returncode == -signal.SIGKILL and group[0].returncode not in (0, -signal.SIGKILL)
        assert checkpoint.latest(tmp_path / "run" / "checkpoints").step == 2
    train(job, tmp_path / "run", "sft beside", 2, "fsdp")
    undisturbed = whole("sft", 2, "fsdp")
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed / name).read_bytes(), name
    one, other = (checkpoint.latest(folder / "checkpoints") for folder in (undisturbed, tmp_path / "run"))
    assert one.step == other.step and not other.ignored
    assert one.manifest["files"].keys() == other.manifest["files"].keys()
    files = [name for name in one.manifest["files"] if "shard-" in name]
    assert len(files) >= 2
    for name in files:  # whose tensors stand in another order
        held, there = (load_file(found.path / name) for found in (one, other))
        assert held.keys() == there.keys() and all(torch.equal(x, there[key]) for key, x in held.items()), name


def test_a_disk_that_is_full_on_one_process_is_said_by_the_one_that_speaks(tmp_path):
    make_models(tmp_path)
    ranks.run(2, "rank_runs", "full", tmp_path, tmp_path / "saved", lockstep=True)
    first, second = ((tmp_path / f"saved-{rank}.error").read_text() for rank in (0, 1))
    assert first.startswith("CheckpointError: The checkpoint of step 3 could not be written") and "free some space" in first
    assert "No space left on device" in first and second == "OSError: [Errno 28] No space left on device"
    assert not list((tmp_path / "saved").iterdir()), "nothing half written is left"


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite_on_one_process_moves_no_weight_on_any(tmp_path, sharded):
    make_models(tmp_path)
    ranks.run(2, "rank_runs", "poisoned", tmp_path, lockstep=sharded)


def test_shards_are_rounded_to_bfloat16_as_the_whole_weight_is(tmp_path):
    make_models(tmp_path)
    ranks.run(2, "rank_runs", "rounded", tmp_path, lockstep=True)


@pytest.mark.parametrize("damaged", [1, None, *slow(0, 2)])
def test_each_process_sums_its_share_of_a_checkpoint_and_all_hear_of_a_fault(tmp_path, damaged):
    """Three processes, of whom one finds the damage; the checkpoint before is then verified likewise."""
    root = tmp_path / "checkpoints"

    def write(folder: Path) -> None:
        for n in range(3):
            (folder / f"shard-{n}.safetensors").write_bytes(bytes([n] * 1000))

    for step in (1, 2):
        checkpoint.save(root, step, write, meta={})
    if damaged is not None:
        (root / "step-00000002" / f"shard-{damaged}.safetensors").write_bytes(bytes([9] * 1000))
    ranks.run(3, "rank_runs", "newest", root)
    each = [json.loads(Path(f"{root}-{rank}.json").read_text()) for rank in range(3)]
    assert all(one["step"] == (2 if damaged is None else 1) for one in each)
    assert all(
        [f"shard-{damaged}.safetensors has SHA-256" in line for line in one["ignored"]] == [True] * (damaged is not None)
        for one in each
    )
    for rank, one in enumerate(each):
        steps = (2,) if damaged is None else (2, 1)
        assert one["summed"] == [f"step-{step:08d}/shard-{rank}.safetensors" for step in steps], "each file on one rank, once"


def command(job: Path, out: Path, *more: str) -> list[str]:
    settings = ["--model", str(job / "base"), "--dataset", str(job / "train.jsonl"), "--output-dir", str(out)]
    quiet = ["--batch-size", "4", "--no-progress", "--no-report", "--eval-prompts", "0", "--threads", "1"]
    return [sys.executable, "-m", "psigrad", "sft", *settings, *quiet, *more]


def started(job: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """The command, on two processes, that has written rows of metrics and would go on for ever."""
    environment = {**os.environ, "PYTHONPATH": str(ranks.ROOT), "OMP_NUM_THREADS": "1"}
    endless = command(job, out, "--processes", "2", "--max-steps", "100000", *more)
    metrics = out / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    run = subprocess.Popen(endless, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not metrics.exists() or metrics.stat().st_size < before + 500:
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    return run


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    """The process of each rank: the children of the launcher, which is the child of the command, in the order of their start."""
    (launcher,) = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return list(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))


def test_the_command_line_starts_processes_and_says_which_one_failed(job, tmp_path):
    with warm():
        run = started(job, tmp_path / "run")
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    said = run.communicate(timeout=240)[1]
    assert run.returncode == 137
    assert "process 1 of 2 (counted from 0) was ended by SIGKILL" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_process_that_stands_still_while_all_save_beside_the_steps_is_named_soon(job, tmp_path):
    """Its save waits for it for hours; neither the end of the run nor that of Python waits for the save."""
    more = ["--strategy", "fsdp", "--async-save", "--save-steps", "1", "--timeout-minutes", "0.2"]
    run = started(job, tmp_path / "run", *more)
    os.kill(ranks_of(run)[1], signal.SIGSTOP)
    began = time.monotonic()
    said = run.communicate(timeout=120)[1]
    assert run.returncode == 75 and "Process 1 of 0 to 1 of this run has ended or does not answer" in said, said[-3000:]
    assert time.monotonic() - began < 12 + 60


@pytest.mark.slow
def test_asked_to_stop_all_stop_together_and_the_same_command_goes_on(job, tmp_path):
    """What one process does when asked is in tests/runs/test_stopping.py."""
    for _ in range(2):
        run = started(job, tmp_path / "run")
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=240)[1]
        assert run.returncode == 143 and said.count("everything is saved") == 1, said
        told = [line for line in said.splitlines() if line.startswith("psigrad:")]
        assert len(told) == len(set(told)), "one process speaks"
    # a mistake is told once
    environment = {**os.environ, "PYTHONPATH": str(ranks.ROOT), "OMP_NUM_THREADS": "1"}
    wrong = subprocess.run(
        command(job, tmp_path / "run", "--processes", "2", "--resume", "never"), env=environment, capture_output=True, text=True
    )
    assert wrong.returncode == 2 and wrong.stderr.count("resume is 'never'") == 1, wrong.stderr


def test_from_python_several_processes_are_refused_with_the_way_to_start_them(job, tmp_path):
    import psigrad
    from psigrad.errors import UserError

    with pytest.raises(UserError, match="torchrun --nproc-per-node=2"):
        psigrad.train("sft", model=job / "base", dataset=str(job / "train.jsonl"), processes=2, output_dir=str(tmp_path / "run"))
    assert RankLost.exit_status == 75


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_rank_0_calls_the_callbacks_and_all_ranks_do_what_they_ask_for(job, tmp_path, strategy):
    for size in (1, 2):
        ranks.run(size, "rank_runs", "directed", job, tmp_path / str(size), "sft", strategy, lockstep=strategy == "fsdp")
    one, two = rows(tmp_path / "1"), rows(tmp_path / "2")
    assert [row["step"] for row in one] == [row["step"] for row in two] == [0, 0, 1, 1, 1, 2, 3, 4, 4, 4]
    rates = [row["learning_rate"] for row in two if "learning_rate" in row]
    assert rates == pytest.approx([1e-4, 1e-4 * 5 / 6, 1e-5 * 4 / 6, 1e-5 * 3 / 6])
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-3)


@pytest.mark.slow
def test_a_callback_that_fails_ends_every_rank_with_its_name(job, tmp_path):
    ranks.run(2, "rank_runs", "directed", job, tmp_path / "run", "sft", "ddp", "fails")
    told = [(tmp_path / f"run-{rank}.error").read_text() for rank in (0, 1)]
    assert told[0] == told[1] and "The callback Director raised in on_step_end" in told[0]
