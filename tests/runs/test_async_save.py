"""Checkpoints that are written beside the steps: the run is the same, steps go on, and a kill at any point of one loses nothing
that was whole.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from resuming import digest
from tiny_jobs import forked, online_config, ppo_config, sft_config

from psigrad.config import Optim
from psigrad.language.models import tiny
from psigrad.language.models.language_model import Lora, prepare
from psigrad.language.recipes import learners, online, sft
from psigrad.language.recipes.learners import Learner
from psigrad.language.rollout.types import State
from psigrad.optim import Optimizer
from psigrad.processes.parallel.world import ALONE
from psigrad.records import checkpoint
from psigrad.runs.journal import Journal

PLACES = ("save_tensors", "seal", "_write_manifest", "sync_tree", "prune")
SHORT = ("_write_manifest",)
SLOW = pytest.mark.slow


def written_beside(config, job: Path, output: Path, **run):
    made = config(job, output, **run)
    return replace(made, run=replace(made.run, async_save=True))


@pytest.fixture(scope="module")
def expected(job, tmp_path_factory):
    """The digest of a run whose saves hold up its steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert forked(lambda: sft.run(sft_config(job, out))) == 0
    return digest(out)


def test_steps_go_on_while_a_checkpoint_is_written(job, expected, tmp_path, monkeypatch):
    """The first checkpoint, behind step 2, is written only when step 3 is done; a save that held up the steps waited in vain."""
    gone_on, waited = threading.Event(), []
    save, metrics = checkpoint.save, Journal.metrics

    def late(*arguments, **named):
        waited.append(gone_on.wait(20.0))
        return save(*arguments, **named)

    def tell(journal, step, row):
        metrics(journal, step, row)
        if step == 3:
            gone_on.set()

    monkeypatch.setattr(checkpoint, "save", late)
    monkeypatch.setattr(Journal, "metrics", tell)
    sft.run(written_beside(sft_config, job, tmp_path / "run"))
    assert waited == [True, True, True]
    assert digest(tmp_path / "run") == expected, "what was written is the state of step 2, not of step 4"


@pytest.mark.parametrize("place", [pytest.param(p, marks=() if p in SHORT else SLOW) for p in PLACES])
@pytest.mark.parametrize("before", [True, pytest.param(False, marks=SLOW)])
def test_a_kill_in_the_second_save_leaves_the_first(job, expected, tmp_path, place, before):
    run = partial(written_beside, sft_config, job, tmp_path / "run")

    def doomed():
        original, seen = getattr(checkpoint, place), []

        def dying(*arguments, **named):
            seen.append(place)
            if before and len(seen) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            found = original(*arguments, **named)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        setattr(checkpoint, place, dying)
        sft.run(run())

    status = forked(doomed)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert found.step == (4 if place == "prune" else 2) and not found.ignored
    assert forked(lambda: sft.run(run())) == 0
    assert digest(tmp_path / "run") == expected


def test_a_save_that_fails_ends_the_run(job, tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise checkpoint.CheckpointError("the disk is full")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(checkpoint.CheckpointError, match="the disk is full"):
        sft.run(written_beside(sft_config, job, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("config", [online_config, ppo_config, partial(ppo_config, critic_shared=True)])
def test_every_learner_is_copied(job, tmp_path, config):
    for name, made in (("here", config), ("beside", partial(written_beside, config))):
        assert forked(lambda name=name, made=made: online.run(made(job, tmp_path / name))) == 0
    assert digest(tmp_path / "here") == digest(tmp_path / "beside")


def learner(hidden: int, **settings) -> Learner:
    tokenizer = tiny.tokenizer(["hello world 123"] * 5, 280)
    model = prepare(tiny.model("qwen3", len(tokenizer), hidden=hidden, layers=2), tokenizer, **settings)
    optimizer = Optimizer(model.trainable(), Optim(learning_rate=1e-2))
    for p in optimizer.parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.apply(1.0, 1e-2)
    return Learner(model, optimizer)


@pytest.mark.parametrize("settings", [{}, {"lora": Lora(4)}], ids=["whole", "lora"])
def test_a_copy_is_of_its_moment(tmp_path, settings):
    """The weights change behind the copy, and the files hold those before."""
    one = learner(32, **settings)
    write = {copies: learners.stage(State(step=1), [one], ALONE, copies=copies) for copies in (True, False)}
    (tmp_path / "now").mkdir()
    write[False](tmp_path / "now", ALONE)
    with torch.no_grad():
        for p in [*one.optimizer.parameters.values(), *one.optimizer.state_dict().values()]:
            p.add_(1)
    for name, copies in (("copied", True), ("later", False)):
        (tmp_path / name).mkdir()
        write[copies](tmp_path / name, ALONE)
    files = [path.name for path in (tmp_path / "now").iterdir()]
    assert {*files} == {path.name for path in (tmp_path / "copied").iterdir()}
    # peft writes the names of modules as a set has them, in any order
    same = [name for name in files if name != "adapter_config.json"]
    alike = {name: (tmp_path / "now" / name).read_bytes() == (tmp_path / "copied" / name).read_bytes() for name in same}
    assert all(alike.values()), alike
    weights = "adapter_model.safetensors" if settings else "model.safetensors"
    for name in (weights, "optimizer.safetensors"):
        assert (tmp_path / "now" / name).read_bytes() != (tmp_path / "later" / name).read_bytes(), name


@pytest.mark.slow
def test_the_stall_is_about_the_copy():
    one = learner(768)
    held = [*one.model.network.parameters(), *one.optimizer.state_dict().values()]

    def least(work) -> float:
        found = []
        for _ in range(7):
            begin = time.process_time()
            work()
            found.append(time.process_time() - begin)
        return min(found)

    copy = least(lambda: [x.detach().to("cpu", copy=True) for x in held])
    stall = least(lambda: learners.stage(State(step=1), [one], ALONE, copies=True))
    print(f"copy {1000 * copy:.1f} ms, stall {1000 * stall:.1f} ms")
    assert stall <= 1.5 * copy, (stall, copy)
