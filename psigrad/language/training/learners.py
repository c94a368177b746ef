"""What must survive a stop of a language model's run: weights, optimisers, and the few numbers that change. Saved and restored
bitwise.
"""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from psigrad.config.load import to_dict
from psigrad.errors import UserError, nearest
from psigrad.language.rollout.types import Collected, Pending
from psigrad.language.training.update import Optimizer
from psigrad.processes.parallel import sharded, shards
from psigrad.processes.parallel.world import World, agree
from psigrad.records import checkpoint
from psigrad.runs import machine, session
from psigrad.runs.callbacks import PARTS, NonFiniteError, RunState
from psigrad.runs.cycle import LEFT
from psigrad.runs.journal import Journal

R = TypeVar("R")
Write = Callable[[Path, World], dict[str, Any] | None]
"""Writes into a folder, with the other ranks of a world; what it knows already of the files' sums."""
# What to do about a step that ran out of memory.
LESS_MEMORY = (
    "Go on with a smaller micro_batch_tokens, keep_activations_gb or sampling.max_decode_batch, or with "
    "model.gradient_checkpointing=true: a run may change these. `psigrad plan` shows where memory goes."
)
OPTIMIZER, PENDING = "optimizer.safetensors", "pending.jsonl"


@dataclass(frozen=True)
class State(RunState):
    """Everything that changes from step to step besides weights and optimiser moments.

    `cursor` counts the prompts (online) or rows (SFT) drawn from the endless sequence of shuffled epochs; `algorithm` is the
    `PolicyGradient`'s own state (moving-average baseline, adaptive KL coefficient); `ledger` says what became of the prompts
    (online; see `language/training/online/collect.py`).
    """

    cursor: int = 0
    algorithm: dict[str, float] = field(default_factory=dict)
    ledger: dict[str, int] = field(default_factory=dict)
    pending: tuple[Pending, ...] = ()
    """Collections for the steps to come, with a lag."""
    unscored: list[list[int]] = field(default_factory=list)
    """[faults of rewards, completions] of each of the last steps (online; see `rewards.check_unscored`)."""


class Saved(Protocol):
    """A model that writes itself into a folder."""

    def save(self, folder: Path) -> None:
        """Weights in Hugging Face form."""
        ...


@dataclass(frozen=True)
class Learner:
    """A model and its optimiser. The policy's place in a checkpoint is the folder itself, the critic's `critic/`."""

    model: Saved
    optimizer: Optimizer
    place: str = ""


@dataclass(frozen=True)
class Follower:
    """A model whose weights change without an optimiser, as a reference that follows the policy."""

    model: Saved
    place: str


Learners = Sequence[Learner | Follower]


def commit(root: Path, step: int, write: Write, world: World, meta: Mapping[str, Any]) -> Path | None:
    """A checkpoint of what `write` writes; the folder on rank 0. Where models are in shards all ranks call it."""
    if world.rank:
        if world.lockstep:
            write(world.broadcast(root), world)
        return None
    return checkpoint.save(
        root, step, lambda folder: write(world.broadcast(folder) if world.lockstep else folder, world), meta=meta
    )


def stage(state: State, learners: Learners, world: World, *, copies: bool) -> Write:
    """What writes a checkpoint of now: with `copies` of everything that training changes in the host's memory, so that it may be
    called while steps go on. Raises `NonFiniteError` where there is something in the weights that no run should go on from.
    """
    for learner in learners:
        if isinstance(learner, Follower):
            continue
        if bad := [name for name, p in learner.optimizer.held.items() if p.numel() and not _finite(p)]:
            raise NonFiniteError(
                f"The weights are not finite after step {state.step} ({', '.join(bad[:3])}), so no checkpoint was made of them; "
                "the last one is sound. Lower the learning rate."
            )
    parts = [_part(learner, copies) for learner in learners]

    def write(folder: Path, world: World) -> dict[str, Any] | None:
        for learner, part in zip(learners, parts, strict=True):
            part(folder / learner.place, world)
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


def _finite(x: torch.Tensor) -> bool:
    least, most = x.detach().aminmax()  # in one pass, with no tensor as large
    return math.isfinite(float(least)) and math.isfinite(float(most))


def _part(learner: Learner | Follower, copies: bool) -> Callable[[Path, World], None]:
    """What writes a learner's weights and moments into its place, those of now where they are copied."""
    moments = tensors_of(learner.optimizer) if isinstance(learner, Learner) else {}
    model: Any = learner.model
    if getattr(model, "root", None) is not None:
        weights: dict[str, Any] = sharded.named_weights(model) | moments
        if copies:
            weights = shards.copied(weights)
        return lambda folder, world: sharded.save(model, folder, weights, world)
    if copies:
        model, moments = copy_weights(model), shards.copied(moments)

    def write(folder: Path, world: World) -> None:
        model.save(folder)
        if isinstance(learner, Learner):
            checkpoint.save_tensors(folder / OPTIMIZER, moments)

    return write


def copy_weights(model: Any) -> Any:
    """A model with weights of its own in the host's memory, which can be saved and does nothing else."""
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
    """The state of a verified checkpoint; fills the optimisers in. The models are loaded from `path` by the caller."""
    for learner in learners:
        if not isinstance(learner, Learner):
            continue
        if getattr(learner.model, "root", None) is not None or shards.written_in(path / learner.place):
            shards.read(path / learner.place, tensors_of(learner.optimizer))
        else:
            load_tensors(learner.optimizer, checkpoint.load_tensors(path / learner.place / OPTIMIZER))
    kept = path / PENDING
    pending = tuple(Collected.from_json(line) for line in kept.read_text().splitlines()) if kept.exists() else ()
    state = State(**json.loads((path / "state.json").read_text()), pending=pending)
    if isinstance(learners[0], Learner):
        learners[0].optimizer.nonfinite = state.nonfinite
    return state


def tensors_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Moments by parameter name and, for half-precision models, the float32 master weights; in shards where the weights are."""
    masters = {f"master.{n}": m.detach() for n, m in optimizer.masters.items() if m is not optimizer.held[n]
               and n not in optimizer.bare}  # fmt: skip
    found = {**optimizer.rule.tensors(), **masters}
    return {key: shards.like(x, optimizer.parameters[key.partition(".")[2]]) for key, x in found.items()}


def load_tensors(optimizer: Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `tensors_of`."""
    with torch.no_grad():
        for name, master in optimizer.masters.items():
            if f"master.{name}" in tensors and name not in optimizer.bare:
                master.copy_(tensors[f"master.{name}"])
    optimizer.rule.load({name: t for name, t in tensors.items() if not name.startswith("master.")})


class Keeper:
    """What loops save through: writes a checkpoint of a state at once, or, with `async_save`, in a thread beside the steps.

    All ranks of a world have theirs together; a thread's has a `world` of its own.
    """

    def __init__(self, config: Any, journal: Journal, learners: Learners, pinned: Mapping[str, str]) -> None:
        self._config, self._journal, self._learners, self._pinned = config, journal, learners, pinned
        # a callback is shown a checkpoint that is there
        self._beside = config.run.async_save and not journal.callbacks
        make: Callable[[], World] | None = getattr(journal.world, "beside", None) if self._beside else None
        self._world: World = make() if make is not None and journal.world.lockstep else journal.world
        self._job: Future[None] | None = None

    def __call__(self, now: State) -> None:
        """A checkpoint of the state; the one before is there then."""
        world, journal = self._journal.world, self._journal
        if world.rank and not world.lockstep:
            return
        self.wait()
        # the rows are on the disk before the checkpoint that vouches for them
        journal.folder.flush(now.step, getattr(self._config, "record_rows", 0))
        meta = {**machine.versions(), **self._pinned, **session.vouch_for(journal)}
        write = stage(now, self._learners, world, copies=self._beside)
        if self._beside:
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
        """Until the checkpoint is there, or for so many seconds (`TimeoutError`). Raises what its writing raised, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result(self._meet(job) if seconds is None and self._journal.world.lockstep else seconds)

    def _meet(self, job: Future[None]) -> float | None:
        """Wait until all have written, or one has failed: then so many seconds are left. By this one that stands still is missed
        as in a step; what is written would wait for it for hours.
        """
        states = [0]
        while 0 in states and 2 not in states:
            ended = bool(futures.wait([job], 1.0).done)
            states = self._journal.world.all_gather(0 if not ended else 1 if job.exception() is None else 2)
        return LEFT if 2 in states else None


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """What comes of `work` in a thread. It may wait for a process that stands still, so Python ends without it."""
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
class Begun:
    """Where a run begins or goes on: its state, and what loops save through."""

    state: State
    save: Keeper


def begin(
    config: Any,
    journal: Journal,
    learners: Learners,
    pinned: Mapping[str, str],
    found: Path | None,
    fresh: State,
    rows: tuple[int, int],
) -> Begun:
    """The state to start from: `fresh`, or that of the checkpoint `found`, which fills in the learners' optimisers too.

    `pinned` is what checkpoints pin (`language/recipes/pinned.py`), `rows` how many are trained on and held out. Raises
    `UserError` where a pin differs from the checkpoint's, and `run.allow` does not name the difference.
    """
    world = journal.world
    if world.size > 1:
        pinned = {**pinned, "ranks": str(world.size)}
        agree(world, {**pinned, "settings": json.dumps(to_dict(config), sort_keys=True), **_sums_of(learners)})
    if found is not None:
        session.check_pins(config.run, journal, checkpoint.read_manifest(found), pinned)
    first = fresh if found is None else restore(found, learners)
    if config.run.extend:
        first = replace(first, ended=False)
    model: Any = learners[0].model
    if journal.callbacks and world.rank == 0 and not world.lockstep:
        journal.callbacks.know(model.adapter or model.as_transformers(), model.tokenizer)
    slower = getattr(model, "slower", "")
    how = {"slower": slower, "instructions": getattr(model, "instructions", "")}
    session.note_start(config.run, journal, found, first.step, **how, rows=rows[0], eval_rows=rows[1])
    if slower:
        journal.tell("slower", slower, why=slower)

    return Begun(first, Keeper(config, journal, learners, pinned))


def _best(state: State) -> int:
    """The step whose weights `load_best_model_at_end` wants; 0 where there is none."""
    return int(state.callbacks.get("Best", {}).get("step", 0))


def _sums_of(learners: Learners) -> dict[str, str]:
    """The sum of every weight that learns, to tell whether two processes begin alike."""
    optimizers = [learner.optimizer for learner in learners if isinstance(learner, Learner)]
    whole = (p for optimizer in optimizers for name, p in optimizer.parameters.items() if optimizer.held[name] is p)
    return {"weights": " ".join(str(float(p.detach().double().sum())) for p in whole)}


def with_changes(run: R, changes: Mapping[str, Any]) -> R:
    """The parts of a run (`Online` or `Offline`) with these settings. Raises `UserError` where a part has no such number."""
    made: Any = run
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        if head in PARTS:
            made = _with_part(made, head, rest, value)
            continue
        made = replace(made, config=_replace_in(made.config, name.split("."), value, name))
        if head == "sampling" and hasattr(made, "params"):
            made = replace(made, params=_replace_in(made.params, [rest], value, name))
        if name == "critic_learning_rate" and getattr(made, "critic", None) is not None:
            made = replace(made, critic=replace(made.critic, learning_rate=value))
    same: R = made
    return same


def apply_changes(run: R, changes: Mapping[str, Any]) -> R:
    """As `with_changes`, the optimisers with it."""
    if not changes:
        return run
    made: Any = with_changes(run, changes)
    for optimizer in (made.optimizer, *([made.critic.optimizer] if getattr(made, "critic", None) is not None else ())):
        optimizer.optim = made.config.optim
        optimizer.rule.weight_decay = made.config.optim.weight_decay
    same: R = made
    return same


def _with_part(run: Any, head: str, rest: str, value: float) -> Any:
    """The run with another number in its algorithm, or in its preference loss."""
    name = f"{head}.{rest}"
    if head == "loss":
        tasks = {own: task for own in ("task", "held_out") if (task := getattr(run, own)) is not None}
        changed = {own: replace(t, loss=_replace_in(t.loss, rest.split("."), value, name)) for own, t in tasks.items()}
        return replace(run, **changed)
    algorithm = _replace_in(run.algorithm, rest.split("."), value, name)
    if getattr(algorithm, "needs_reference", False) and run.reference is None:
        raise UserError(f"{name} is changed to {value!r} and the run has no reference; begin with a coefficient above 0.")
    return replace(run, algorithm=algorithm)


def _replace_in(thing: Any, path: list[str], value: Any, name: str) -> Any:
    """A copy of a frozen dataclass with another value at the end of `path`."""
    known = [f.name for f in fields(thing)] if is_dataclass(thing) else []
    if path[0] not in known:
        raise UserError(f"{name} cannot be changed: there is no {path[0]!r}{nearest(path[0], known) or '.'}")
    held = getattr(thing, path[0])
    if len(path) > 1:
        value = _replace_in(held, path[1:], value, name)
    elif "." in name and name.partition(".")[0] in PARTS and (isinstance(held, bool) or not isinstance(held, int | float)):
        raise UserError(f"{name} cannot be changed: it is {held!r} and no number.")
    return replace(thing, **{path[0]: value})
