"""Checkpoints of a language model's run: weights, optimisers and the training state, saved and restored bitwise."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from psigrad.config.load import to_dict
from psigrad.language.models import sharded
from psigrad.language.rollout.types import Collected, State
from psigrad.optim import Optimizer
from psigrad.optim.optimizer import STATE_FILE, check_weights
from psigrad.processes.parallel import shards
from psigrad.processes.parallel.world import World, check_equal
from psigrad.records import checkpoint
from psigrad.runs import machine, session
from psigrad.runs.cycle import LEFT
from psigrad.runs.journal import Journal

Write = Callable[[Path, World], dict[str, Any] | None]
"""Writes files into a folder, together with the other ranks. Returns {file: checksum}, or None if the checksums are unknown."""
PENDING = "pending.jsonl"


class Saveable(Protocol):
    """A model that can write itself into a folder."""

    def save(self, folder: Path) -> None:
        """Write weights in Hugging Face format."""


@dataclass(frozen=True)
class Learner:
    """A model and its optimiser. `folder` is their folder in a checkpoint: "" for the policy, "critic" for a critic."""

    model: Saveable
    optimizer: Optimizer
    folder: str = ""


@dataclass(frozen=True)
class Follower:
    """A model whose weights change without an optimiser, such as a reference that follows the policy."""

    model: Saveable
    folder: str


Learners = Sequence[Learner | Follower]


def commit(root: Path, step: int, write: Write, world: World, meta: Mapping[str, Any]) -> Path | None:
    """Write the checkpoint of step `step` into a folder below `root`. Return this folder on rank 0, and None on other ranks.

    `meta` is added to the manifest. With sharded models, all ranks must call this.
    """
    if world.rank:
        if world.lockstep:
            write(world.broadcast(root), world)
        return None
    return checkpoint.save(
        root, step, lambda folder: write(world.broadcast(folder) if world.lockstep else folder, world), meta=meta
    )


def stage(state: State, learners: Learners, world: World, *, copies: bool) -> Write:
    """Return a function that writes a checkpoint of the current state.

    With `copies`, the values are copied now, so that training can continue. Raises `NonFiniteError` if a weight is not finite.
    """
    for learner in learners:
        if isinstance(learner, Follower):
            continue
        check_weights({name: w.local for name, w in learner.optimizer.weights.items()}, state.step)
    parts = [_part(learner, copies) for learner in learners]

    def write(folder: Path, world: World) -> dict[str, Any] | None:
        for learner, part in zip(learners, parts, strict=True):
            part(folder / learner.folder, world)
        if world.rank == 0:
            (folder / "state.json").write_text(json.dumps(_numbers(state), indent=1) + "\n")
            if state.pending:
                (folder / PENDING).write_text("".join(p.result().to_json() + "\n" for p in state.pending))
        if not world.lockstep:
            return None
        own = [path for path in folder.rglob(f"shard-{world.rank + 1:05d}-*") if path.is_file()]
        each = world.all_gather({str(path.relative_to(folder)): checkpoint.seal_file(path) for path in own})  # all have written
        return {name: entry for sums in each for name, entry in sums.items()}

    return write


def _part(learner: Learner | Follower, copies: bool) -> Callable[[Path, World], None]:
    """Return a function that writes a learner's weights and optimiser state to a folder.

    With `copies`, the values are copied now.
    """
    moments = learner.optimizer.state_dict() if isinstance(learner, Learner) else {}
    model: Any = learner.model
    if getattr(model, "shard_root", None) is not None:
        weights: dict[str, Any] = sharded.named_weights(model) | moments
        if copies:
            weights = shards.copy_to_host(weights)
        return lambda folder, world: sharded.save(model, folder, weights, world)
    if copies:
        model, moments = copy_weights(model), shards.copy_to_host(moments)

    def write(folder: Path, world: World) -> None:
        model.save(folder)
        if isinstance(learner, Learner):
            checkpoint.save_tensors(folder / STATE_FILE, moments)

    return write


def copy_weights(model: Any) -> Any:
    """Return a copy of a model with its weights in host memory. The copy can be saved, but not run."""
    modules = {
        name: module for name in ("network", "adapter", "value_head") if (module := getattr(model, name, None)) is not None
    }
    memo: dict[int, Any] = {}
    for module in modules.values():
        memo |= {id(p): nn.Parameter(p.detach().to("cpu", copy=True), requires_grad=False) for p in module.parameters()}
        memo |= {id(x): x.detach().to("cpu", copy=True) for x in module.buffers()}
    twin = copy.copy(model)
    for name, module in modules.items():
        object.__setattr__(twin, name, copy.deepcopy(module, memo))
    return twin


def _numbers(state: State) -> dict[str, Any]:
    return {f.name: getattr(state, f.name) for f in fields(state) if f.name != "pending"}


def restore(path: Path, learners: Learners) -> State:
    """Restore the optimisers from a verified checkpoint, and return the state that it holds. The caller loads the models."""
    for learner in learners:
        if not isinstance(learner, Learner):
            continue
        if getattr(learner.model, "shard_root", None) is not None or shards.has_shards(path / learner.folder):
            shards.read(path / learner.folder, learner.optimizer.state_dict())
        else:
            learner.optimizer.load_state_dict(checkpoint.load_tensors(path / learner.folder / STATE_FILE))
    kept = path / PENDING
    pending = tuple(Collected.from_json(line) for line in kept.read_text().splitlines()) if kept.exists() else ()
    state = State(**json.loads((path / "state.json").read_text()), pending=pending)
    if isinstance(learners[0], Learner):
        learners[0].optimizer.nonfinite = state.nonfinite
    return state


class CheckpointWriter:
    """The writer of a training loop's checkpoints. With `async_save` and no callbacks, a thread writes while training goes on."""

    def __init__(self, config: Any, journal: Journal, learners: Learners, pinned: Mapping[str, str]) -> None:
        self._config, self._journal, self._learners, self._pinned = config, journal, learners, pinned
        # callbacks expect a checkpoint that is already written
        self._async = config.run.async_save and not journal.callbacks
        # in a process group of its own, the thread does not disturb the steps
        make: Callable[[], World] | None = getattr(journal.world, "new_group", None) if self._async else None
        self._world: World = make() if make is not None and journal.world.lockstep else journal.world
        self._job: Future[None] | None = None

    def __call__(self, now: State) -> None:
        """Save a checkpoint of the state, once the previous one is complete."""
        world, journal = self._journal.world, self._journal
        if world.rank and not world.lockstep:
            return
        self.wait()
        # The rows must be on disk before the checkpoint that vouches for them.
        journal.folder.flush(now.step, getattr(self._config, "record_rows", 0))
        meta = {**machine.versions(), **self._pinned, **session.folder_facts(journal)}
        write = stage(now, self._learners, world, copies=self._async)
        if self._async:
            self._job = _in_thread(partial(self._finish, now, write, meta))
        else:
            self._finish(now, write, meta)

    def _finish(self, now: State, write: Write, meta: Mapping[str, Any]) -> None:
        folder = self._journal.folder
        path = commit(folder.checkpoints, now.step, write, self._world, meta)
        if path is not None:
            checkpoint.prune(folder.checkpoints, self._config.run.save_total_limit, _best(now))
            folder.checkpoint_bytes = checkpoint.size_of(path)
        folder.event("saved", step=now.step)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the checkpoint is written. Raise `TimeoutError` after `seconds`, or the error if writing failed."""
        job, self._job = self._job, None
        if job is not None:
            job.result(self._await_all_ranks(job) if seconds is None and self._journal.world.lockstep else seconds)

    def _await_all_ranks(self, job: Future[None]) -> float | None:
        """Wait until all ranks have written their parts of the checkpoint, or one has failed.

        Return the time limit in seconds for this rank's `job`; None means no limit.
        """
        states = [0]
        # Asking each second, a rank notices within minutes, not hours, that another one hangs.
        while 0 in states and 2 not in states:
            ended = bool(futures.wait([job], 1.0).done)
            states = self._journal.world.all_gather(0 if not ended else 1 if job.exception() is None else 2)
        return LEFT if 2 in states else None


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Run `work` in a daemon thread, so that Python can exit while the thread waits for another rank. Return its future."""
    found: Future[None] = Future()

    def run() -> None:
        try:
            work()
            found.set_result(None)
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    return found


@dataclass(frozen=True)
class RunStart:
    """The start of a new or resumed run: its state, and the `CheckpointWriter` that saves its checkpoints."""

    state: State
    save: CheckpointWriter


def begin(
    config: Any,
    journal: Journal,
    learners: Learners,
    pinned: Mapping[str, str],
    saved: Path | None,
    fresh: State,
    rows: tuple[int, int],
) -> RunStart:
    """Return the start of a run: from the checkpoint `saved` if there is one, otherwise from the state `fresh`.

    `pinned` are the values that must not change when the run resumes. `rows` are the numbers of training and held-out rows.
    """
    world = journal.world
    if world.size > 1:
        pinned = {**pinned, "ranks": str(world.size)}
        check_equal(world, {**pinned, "settings": json.dumps(to_dict(config), sort_keys=True), **_sums_of(learners)})
    if saved is not None:
        session.check_pins(config.run, journal, checkpoint.read_manifest(saved), pinned)
    first = fresh if saved is None else restore(saved, learners)
    if config.run.extend:
        first = replace(first, ended=False)
    model: Any = learners[0].model
    if journal.callbacks and world.rank == 0 and not world.lockstep:
        journal.callbacks.set_model(model.adapter or model.network, model.tokenizer)
    slower = getattr(model, "slow_reason", "")
    how = {"slower": slower, "instructions": getattr(model, "instructions", "")}
    session.note_start(config.run, journal, saved, first.step, pinned, **how, rows=rows[0], eval_rows=rows[1])
    if slower:
        journal.log("slower", slower, why=slower)

    return RunStart(first, CheckpointWriter(config, journal, learners, pinned))


def _best(state: State) -> int:
    """Return the step whose weights `load_best_model_at_end` keeps; 0 if there is none."""
    return int(state.callbacks.get("Best", {}).get("step", 0))


def _sums_of(learners: Learners) -> dict[str, str]:
    """Return {"weights": the sum of each unsharded trainable weight, as text}. It must be the same on all ranks."""
    optimizers = [learner.optimizer for learner in learners if isinstance(learner, Learner)]
    whole = (w.local for optimizer in optimizers for w in optimizer.weights.values() if w.local is w.parameter)
    return {"weights": " ".join(str(float(p.detach().double().sum())) for p in whole)}
