"""Whole runs of the tiny job on several processes, of which one may kill itself; and checkpoints read by any number of them."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import tiny_jobs
import torch
from rank_gradients import load
from safetensors.torch import load_file, save_file

from psigrad.config import Model, Optim, Placement
from psigrad.errors import UserError
from psigrad.language.loading.model_source import convert_to_folder
from psigrad.language.models import sharded
from psigrad.language.models.backbone import reshard
from psigrad.language.models.language_model import LanguageModel
from psigrad.language.recipes import dispatch
from psigrad.language.recipes import learners as saved
from psigrad.language.recipes.learners import Learner
from psigrad.language.rollout.types import State
from psigrad.optim import Optimizer
from psigrad.optim.low_memory import dither
from psigrad.processes.parallel import shards
from psigrad.processes.parallel import world as worlds
from psigrad.processes.parallel.world import World
from psigrad.runs import session
from psigrad.runs.callbacks import Callback

CONFIGS = {
    "sft": tiny_jobs.sft_config,
    "sft beside": partial(tiny_jobs.sft_config, async_save=True),
    "grpo": tiny_jobs.online_config,
    "ppo": lambda job, out, **run: replace(tiny_jobs.ppo_config(job, out, **run), critic_learning_rate=1e-4),
    "dpo": tiny_jobs.preference_config,
    "reward": tiny_jobs.reward_config,
    "episodes": tiny_jobs.episodes_config,
    "online_dpo": lambda job, out, **run: replace(tiny_jobs.online_config(job, out, "online_dpo", **run), num_minibatches=1),
}


def config(job: str, out: str, recipe: str, strategy: str, *, lora: bool = False):
    made = CONFIGS[recipe](Path(job), Path(out))
    strategy, *sizes = strategy.split()
    division = dict(zip(("dp_replicate_size", "tp_size", "cp_size"), map(int, sizes), strict=False))
    # at a high rate Adam turns the sign of a gradient near 0, which rounding decides, into another run
    placed = Placement(strategy=strategy, timeout_minutes=1.0, **division)
    made = replace(made, placement=placed, optim=replace(made.optim, learning_rate=1e-4))
    return replace(made, model=Model(path=made.model.path, lora_rank=4, lora_save="both")) if lora else made


def main(world: World, job: str, out: str, recipe: str, strategy: str, kill: str = "", lora: str = "") -> None:
    """Train; with kill = "phase rank count" that rank kills itself at its count-th time in the phase."""
    if kill:
        phase, rank, count = kill.split()
        if world.rank == int(rank):
            _deadly(phase, int(count))
    dispatch.run(config(job, out, recipe, strategy, lora=bool(lora)))


class Director(Callback):
    """Lowers the rate after step 2 and ends the run after step 4; or fails."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def on_step_end(self, args, state, control, **kwargs):
        if self.fails:
            raise ZeroDivisionError("division by zero")
        control.should_evaluate = state.step == 1
        control.should_training_stop = state.step == 4
        if state.step == 2:
            control.change(learning_rate=1e-5)


def directed(world: World, job: str, out: str, recipe: str, strategy: str, fails: str = "") -> None:
    """Train with a callback."""
    made = config(job, out, recipe, strategy)
    made = replace(made, run=replace(made.run, callbacks=(Director(bool(fails)),)))
    try:
        dispatch.run(made)
    except UserError as error:
        Path(f"{out}-{world.rank}.error").write_text(str(error))


def _deadly(phase: str, count: int) -> None:
    owner, *names = {
        "forward": (LanguageModel, "evaluate"),
        "backward": (torch.Tensor, "backward"),
        "gather": (worlds.Ranks, "all_gather", "exchange"),
        "save": (shards, "write"),
        "save alone": (saved.checkpoint, "save_tensors"),
    }[phase.replace("-", " ")]
    left = count

    def deadly(original):
        def killing(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return killing

    for name in names:
        setattr(owner, name, deadly(getattr(owner, name)))


def checkpoint(world: World, folder: str, case: str, to: str, read: str = "") -> None:
    """Save a model and its optimiser after a step; or read a checkpoint and write what was read as plain tensors."""
    from rank_gradients import CASES, groups_of

    made = CASES[case]
    model, _ = load(made, Path(folder), world)
    optimizer = Optimizer(model.trainable(), Optim(learning_rate=1e-2), world=world)
    learners = [Learner(model, optimizer)]
    if not read:
        optimizer.step(made.losses(made, world, model, None, groups_of(), ""), 1e-2)
        saved.commit(Path(to), 3, saved.stage(State(step=3, tokens=5), learners, world, copies=False), world, {})
        place = Path(to) / "step-00000003"
    else:
        place = Path(read)
        if shards.has_shards(place) or world.lockstep:
            shards.read(place, sharded.named_weights(model))
        assert saved.restore(place, learners) == State(step=3, tokens=5)
    reshard(model)
    held = {f"p.{n}": p for n, p in optimizer.parameters.items()} | optimizer.state_dict()
    whole = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in held.items()}
    if world.rank == 0:
        save_file({key: x.detach().contiguous().clone() for key, x in whole.items()}, f"{to}-tensors.safetensors")


def full(world: World, folder: str, to: str) -> None:
    """A checkpoint for which the disk of the last rank has no room; write down what each rank says."""
    from rank_gradients import CASES
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    model, _ = load(CASES["dapo"], Path(folder), world)
    learners = [Learner(model, Optimizer(model.trainable(), Optim(learning_rate=1e-2), world=world))]
    if world.rank == world.size - 1:
        HuggingFaceStorageWriter.write_data = _no_room
    try:
        saved.commit(Path(to), 3, saved.stage(State(step=3), learners, world, copies=False), world, {})
    except Exception as error:
        Path(f"{to}-{world.rank}.error").write_text(f"{type(error).__name__}: {error}")


def _no_room(self, plan, planner):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def poisoned(world: World, folder: str) -> None:
    """A step of which the last rank's losses are no numbers; none may move a weight."""
    from rank_gradients import CASES, groups_of

    made = CASES["dapo"]
    model, _ = load(made, Path(folder), world)
    optimizer = Optimizer(model.trainable(), Optim(learning_rate=1e-2), world=world)
    before = [shards.local_of(p.detach()).clone() for p in optimizer.parameters.values()]
    factor = float("nan") if world.rank == world.size - 1 else 1.0
    losses = made.losses(made, world, model, None, groups_of(), "")
    assert optimizer.step([lambda loss=loss: factor * loss() for loss in losses], 1e-2) is None and optimizer.nonfinite == 1
    for p, kept in zip(optimizer.parameters.values(), before, strict=True):
        assert torch.equal(shards.local_of(p.detach()), kept)
    assert optimizer.step(made.losses(made, world, model, None, groups_of(), ""), 1e-2) and optimizer.nonfinite == 0


def rounded(world: World, folder: str) -> None:
    """A step in bfloat16: the shards of a weight are rounded as the whole weight is, by the index of each number in it."""
    from rank_gradients import CASES, groups_of

    made = CASES["dapo bfloat16"]
    model, _ = load(made, Path(folder), world)
    optimizer = Optimizer(model.trainable(), Optim(learning_rate=1e-2), world=world)
    assert optimizer.step(made.losses(made, world, model, None, groups_of(), ""), 1e-2)
    differ = False
    for name, w in optimizer.weights.items():
        whole, stored = (
            x.full_tensor().flatten() for x in (shards.shard_like(w.master.detach(), w.parameter), w.parameter.detach())
        )
        assert torch.equal(stored, dither(whole)), name
        differ |= not torch.equal(w.local.detach().flatten(), dither(w.master.detach().flatten()))
    assert differ == (world.rank > 0)  # the control: by an index that begins anew in each shard


def newest(world: World, run: str) -> None:
    """Look for the newest checkpoint together; write down which it is, what was passed over, and what this rank summed."""
    saved.checkpoint._verified.clear()  # what the parent of this fork knows
    summed, plain = [], saved.checkpoint.sha256
    saved.checkpoint.sha256 = lambda path: summed.append(f"{path.parent.name}/{path.name}") or plain(path)
    found = session._verify_together(world, Path(run))
    told = {"step": found.step, "ignored": found.ignored, "summed": summed}
    Path(f"{run}-{world.rank}.json").write_text(json.dumps(told))


__all__ = ["checkpoint", "config", "load_file", "main", "newest", "poisoned", "rounded"]


def converted(world: World, adapter: str, out: str) -> None:
    """Merge an adapter on the last rank alone, and write down the files."""
    if world.rank == world.size - 1:
        Path(out).write_text(json.dumps(sorted(path.name for path in Path(convert_to_folder(adapter)).iterdir())))
    world.all_gather(0)
