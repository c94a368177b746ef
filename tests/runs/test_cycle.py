"""When the cycle saves, what it prints where there is no terminal, and what is left of a run that fails."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_jobs import online_config, sft_config
from tiny_rewards import fails_later

from psigrad.config import Evaluation, Run
from psigrad.errors import UserError
from psigrad.language.recipes import online
from psigrad.language.recipes.loops import LESS_MEMORY
from psigrad.language.rewards import RewardError
from psigrad.language.rollout.types import State
from psigrad.language.training.online import online_rl as training
from psigrad.optim import NonFiniteError
from psigrad.processes.parallel.world import ALONE
from psigrad.records import checkpoint
from psigrad.runs import cycle as module
from psigrad.runs import progress
from psigrad.runs.best import Best
from psigrad.runs.callbacks import Callbacks
from psigrad.runs.cycle import Loop, cycle
from psigrad.runs.progress import bar
from psigrad.step import Outcome


class Quiet:
    world = ALONE
    callbacks = Callbacks()
    folder = SimpleNamespace(checkpoints=Path("checkpoints"))

    def record(self, outcome):
        pass

    def stop_requested(self):
        return False

    def disk_low(self):
        return ""


def run(step, found, settings, total=10, *, updates=lambda: 0, journal=None, **loop):
    """A cycle of `step`, which returns a state; the steps that are saved go to `found`."""
    save = lambda state: found.append(state.step)  # noqa: E731
    given = {"evaluate": lambda state: None, "save": save, "updates": updates, **loop}
    made = Loop("x", total, lambda state: Outcome(step(state), {}), **given)
    return cycle(made, State(evaluated=True), settings, journal or Quiet())


def saves(settings, total=10, step=None):
    """The steps that were saved."""
    found = []
    run(step or (lambda state: replace(state, step=state.step + 1)), found, settings, total)
    return found


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by a minute each time that it is asked."""
    minutes = iter(range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: 60.0 * next(minutes))


def test_a_checkpoint_is_made_by_time_and_at_the_end(clock):
    assert saves(Run(progress=False, save_minutes=3.0)) == [3, 6, 9, 10]
    assert saves(Run(progress=False, save_minutes=0.0)) == [10]
    assert saves(Run(progress=False, save_minutes=0.0, save_steps=4)) == [4, 8, 10]


def test_a_run_is_saved_by_time_unless_it_is_told_otherwise():
    assert Run().save_minutes == 10.0 and Run().save_total_limit == 2


@pytest.mark.parametrize("error", [RewardError("rewards"), NonFiniteError("gradient")])
def test_what_was_good_is_saved_before_an_error_that_leaves_the_weights_alone(error):
    found = []

    def step(state):
        if state.step == 6:
            raise error
        return replace(state, step=state.step + 1, nonfinite=int(state.step + 1 > 4))

    settings = Run(progress=False, save_minutes=0.0)
    with pytest.raises(type(error)):
        run(step, found, settings)
    assert found == [4], "the steps behind it had no finite gradient"


def nonfinite_at(*steps):
    """A step whose gradient is finite but at these."""
    return lambda state: replace(state, step=state.step + 1, nonfinite=int(state.step + 1 in steps))


def test_the_last_step_is_saved_also_without_a_finite_gradient_where_there_is_something_new():
    """Its weights are those of the step before. Where those are saved, another checkpoint would only push an older one out."""
    assert saves(Run(progress=False, save_minutes=0.0), 4, nonfinite_at(4)) == [4]
    assert saves(Run(progress=False, save_minutes=0.0, save_steps=3), 4, nonfinite_at(4)) == [3]
    assert saves(Run(progress=False, save_minutes=0.0, save_steps=2), 4, nonfinite_at(2)) == [4]
    assert saves(Run(progress=False, save_minutes=0.0), 2, nonfinite_at(1, 2)) == [], "nothing was learned"


def test_the_best_evaluation_is_saved_also_behind_a_step_without_a_finite_gradient(job, tmp_path):
    evaluation = Evaluation(eval_steps=1, load_best_model_at_end=True)
    config = replace(sft_config(job, tmp_path), evaluation=evaluation)
    losses, found, best = iter([3.0, 2.0, 2.5, 2.6]), [], Best(evaluation)
    journal = Quiet()
    journal.callbacks = hooks = Callbacks([best], config)
    settings = Run(progress=False, save_minutes=0.0)
    evaluate = lambda s: hooks.add_row({"step": s.step, "eval/loss": next(losses)})  # noqa: E731
    run(nonfinite_at(2), found, settings, 4, journal=journal, evaluate=evaluate, eval_steps=1)
    assert best.step == 2 and found == [1, 2, 4]


def test_an_error_after_a_weight_has_moved_saves_nothing():
    found, moves = [], itertools.count()

    def step(state):
        if state.step == 3:
            raise ValueError
        return replace(state, step=state.step + 1)

    with pytest.raises(ValueError):
        run(step, found, Run(progress=False), updates=lambda: next(moves))
    assert found == []


def test_a_run_whose_rewards_fail_leaves_a_checkpoint_the_reason_and_the_traceback(job, tmp_path):
    config = online_config(job, tmp_path / "run", max_steps=50, save_steps=0)
    config = replace(config, reward=(fails_later,), evaluation=replace(config.evaluation, eval_steps=0))
    with pytest.raises(RewardError, match="the service is gone"):
        online.run(config)
    folder = tmp_path / "run"
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert checkpoint.latest(folder / "checkpoints").step == max(steps) > 0
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "failed" and "the service is gone" in last["reason"] and "check_unscored" in last["traceback"]


def test_without_a_terminal_a_line_of_figures_is_printed_now_and_then(capsys):
    with bar("grpo", 25, every=10) as advance:
        for step in range(25):
            advance(note=f"reward {step}")
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split("  ")[:2] for line in lines]
    assert shown == [["grpo 10/25", "reward 9"], ["grpo 20/25", "reward 19"], ["grpo 25/25", "reward 24"]]
    with bar("grpo", 25, every=0) as advance:
        advance()
    with bar("grpo", 25, enabled=False, every=1) as advance:
        advance()
    assert capsys.readouterr().out == ""


def test_without_a_terminal_a_slow_step_is_reported_after_ten_seconds_with_the_time_left(capsys, monkeypatch):
    seconds = iter([0.0, 4.0, 8.0, 12.0, 16.0, 200.0])  # the start, then the end of each step
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with bar("grpo", 5, every=1000) as advance:
        for _ in range(5):
            advance(note="reward 1")
    assert capsys.readouterr().out.splitlines() == [
        "grpo 3/5  reward 1  4 s a step, 8 s left",  # 12 s, of 2 more steps at 4 s each
        "grpo 5/5  reward 1  94 s a step",  # (200 − 12) / 2
    ]
    assert [progress.format_remaining(s) for s in (89, 91, 5399, 9000)] == [
        "89 s left",
        "2 min left",
        "90 min left",
        "2.5 h left",
    ]


def test_weights_that_are_not_finite_are_never_sealed(job, tmp_path):
    config = online_config(job, tmp_path / "run", max_steps=6, save_steps=1)
    config = replace(config, optim=replace(config.optim, learning_rate=3e38, max_grad_norm=0.0), num_minibatches=1)
    with pytest.raises(UserError, match=r"not finite|sampler and trainer differ"):
        online.run(config)
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    for file in [] if found.path is None else found.path.glob("*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(file).values())


def failing(error, at, moves=None, every=0, lockstep=False):
    """The steps saved by a cycle whose step number `at` raises `error`, and the error that came out."""
    found = []

    def step(state):
        if state.step + 1 == at:
            raise error
        return replace(state, step=state.step + 1)

    settings = Run(progress=False, save_minutes=0.0, save_steps=every)
    journal = Quiet()
    if lockstep:
        journal.world = SimpleNamespace(lockstep=True, broadcast=lambda value: value)
    count = (lambda: next(moves)) if moves else (lambda: 0)
    with pytest.raises(Exception) as raised:
        run(step, found, settings, updates=count, journal=journal, less_memory=LESS_MEMORY)
    return found, raised.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
        ),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["python", "gpu", "cpu", "driver", "cublas", "triton"],
)
def test_a_run_out_of_memory_is_saved_and_told_what_takes_less(error):
    found, raised = failing(error, 7)
    assert found == [6] and isinstance(raised, UserError)
    assert "Step 7 ran out of memory; the run is saved at step 6. Resume with a smaller micro_batch_tokens" in str(raised)


def test_negative_control_other_errors_of_a_gpu_stay_as_they_are():
    error = RuntimeError("CUDA error: device-side assert triggered")
    assert failing(error, 7)[1] is error


def test_out_of_memory_after_a_weight_has_moved_names_the_last_checkpoint():
    found, raised = failing(MemoryError(), 7, moves=itertools.count())
    assert found == [] and "Step 7 ran out of memory; no step is saved. " in str(raised)


@pytest.mark.parametrize(("every", "saved", "said"), [(0, [], "no step is saved"), (4, [4], "the run is saved at step 4")])
def test_with_fsdp_out_of_memory_names_the_last_checkpoint(every, saved, said):
    found, raised = failing(MemoryError(), 7, every=every, lockstep=True)
    assert found == saved and f"Step 7 ran out of memory; {said}. " in str(raised)


def test_memory_that_does_not_suffice_in_a_real_run_leaves_a_checkpoint(job, tmp_path, monkeypatch):
    config = online_config(job, tmp_path / "run", max_steps=6, save_steps=0)
    steps = itertools.count()
    whole = training.learn

    def learn(*given):
        if next(steps) >= 3:  # also in micro-batches of half the tokens
            torch.empty(1 << 60)
        return whole(*given)

    monkeypatch.setattr(training, "learn", learn)
    with pytest.raises(UserError, match=r"Step 4 ran out of memory; the run is saved at step 3\."):
        online.run(config)
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").step == 3
    monkeypatch.setattr(training, "learn", whole)
    smaller = replace(config, micro_batch_tokens=16)
    assert online.run(smaller).after["step"] == 6


def test_a_disk_that_gets_full_stops_the_run_while_a_checkpoint_still_fits(job, tmp_path, monkeypatch):
    config = online_config(job, tmp_path / "run", max_steps=6, save_steps=2)
    free = iter([1 << 40] * 2 + [1000] * 9)
    monkeypatch.setattr("psigrad.records.run_folder.checkpoint.free_bytes", lambda path: next(free))
    with pytest.raises(UserError, match=r"has 1000 bytes free, and a checkpoint takes \d+\. The run is saved at step 5"):
        online.run(config)
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").step == 5
    monkeypatch.undo()
    assert online.run(config).after["step"] == 6
