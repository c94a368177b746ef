"""A run's session: its folder with its lock, where it goes on from, and how it is saved."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from psigrad.config import OnlineConfig, PreferenceConfig, RewardConfig, Run, SFTConfig
from psigrad.config.fields import LENGTH, marked
from psigrad.config.load import to_dict
from psigrad.errors import UserError
from psigrad.language.models.native.kernels import kernels
from psigrad.language.models.native.processor import default_threads
from psigrad.processes.parallel import launch
from psigrad.processes.parallel.world import ALONE, World, agree, joined
from psigrad.records import checkpoint, pins
from psigrad.records.run_folder import Bystander, RunFolder
from psigrad.runs import callbacks, state
from psigrad.runs.callbacks import Callbacks
from psigrad.runs.journal import Announcer, Journal, Stopped
from psigrad.runs.provenance import command, provenance
from psigrad.runs.result import Result
from psigrad.runs.state import Learner, Learners, State
from psigrad.runs.stop import StopSignal
from psigrad.runs.trackers import open_trackers
from psigrad.runs.watchdog import Watchdog

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Bytes of the blocks that are kept: where memory is short, so few that no hole is as large as a tensor.
_ALL, _PIECE = 1 << 30, 1 << 20
Config = SFTConfig | OnlineConfig | RewardConfig | PreferenceConfig | Any  # or control's


@contextlib.contextmanager
def open_run(config: Config, recipe: str) -> Iterator[Journal]:
    """The processes of the run, its folder with its lock, the trackers, and the stop signal, for the length of the block.

    Rank 0 has the folder; the others write nothing.
    """
    with contextlib.ExitStack() as stack:
        world = ALONE
        if hasattr(config, "placement"):
            launch.check(config.placement.processes)
            prepare_torch(config.run, recompute=config.model.gradient_checkpointing)
            lockstep, minutes = config.placement.strategy == "fsdp", config.placement.timeout_minutes
            world = stack.enter_context(joined(device=device(config.run), lockstep=lockstep, minutes=minutes))
        else:
            prepare_torch(config.run)
        path = world.broadcast(Path(config.run.output_dir) if config.run.output_dir else new_folder(recipe))
        yield stack.enter_context(_open_as(world, path, config, recipe))


@contextlib.contextmanager
def _open_as(world: World, path: Path, config: Config, recipe: str) -> Iterator[Journal]:
    settings = {"recipe": recipe, **to_dict(config)}
    if world.rank:
        with StopSignal() as stop:
            bystander = Bystander(path, world.broadcast(False))
            yield Journal(bystander, signal=stop, world=world, callbacks=_callbacks(config, bystander, world))
        return
    with RunFolder.open(path, settings, config.run.resume, type(config)) as folder, StopSignal() as stop:
        world.broadcast(folder.finished)
        trackers = [] if folder.finished else open_trackers(config.run.report_to, folder.path, settings)
        watchdog = Watchdog(
            60 * config.run.watchdog_minutes, path, lambda phase, s: folder.event("hanging", phase=phase, seconds=s)
        )
        try:
            with watchdog.watching():
                callbacks = _callbacks(config, folder, world)
                yield Journal(folder, trackers, stop, Announcer(folder), watchdog, world, callbacks)
        except Stopped:
            raise
        except BaseException as error:
            with contextlib.suppress(Exception):  # a full disk must not hide the reason
                reason = f"{type(error).__name__}: {error}"
                folder.event("failed", reason=reason, traceback="".join(traceback.format_exception(error))[-8000:])
            raise
        finally:
            for tracker in trackers:
                tracker.close()


def _callbacks(config: Config, folder: RunFolder, world: World) -> Callbacks:
    """The run's callbacks, ready to be told."""
    found = [callbacks.resolve(given) for given in config.run.callbacks]
    if found and not hasattr(config, "placement"):
        raise UserError("run.callbacks are of language models; in control an agent's learn() takes callback=.")
    for callback in found if world.rank == 0 else ():
        if never := callbacks.never_called(callback):
            print(f"psigrad: {', '.join(never)} of {type(callback).__name__} is never called; the events are "
                  f"{', '.join(callbacks.EVENTS)}.", file=sys.stderr, flush=True)  # fmt: skip
    return Callbacks(found, config, folder, world)


def new_folder(recipe: str) -> Path:
    """A folder that no run has yet, named by recipe and time."""
    name = f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(
        path for path in (Path(f"{name}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 10000)))) if not path.exists()
    )


def prepare_torch(run: Run, *, recompute: bool = False) -> None:
    """Threads as asked for, and a loud refusal of a device that is not there."""
    torch.set_num_threads(run.threads or default_threads())
    keep_freed_memory(up_to=_PIECE if recompute else _ALL)
    transformers.utils.logging.disable_progress_bar()  # a bar per weight file drowns ours
    if run.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"device is {run.device!r} and this torch sees no CUDA device; use device=cpu or install a CUDA build of torch."
        )


def keep_freed_memory(up_to: int = _ALL) -> None:
    """Let glibc keep blocks of `up_to` so many bytes that torch frees, for the next tensor of that size.

    By default it gives every large block back to the kernel at once, and takes a new one, page fault by page fault, a moment
    later: on a CPU a fifth of a training step and more, and half of it where the vocabulary is large. What is kept lies in pieces
    that not every tensor fits into. Other C libraries have no such setting.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, up_to)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def device(run: Run) -> str:
    """The device of the run: what was asked for, or cuda where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if run.device == "auto" else run.device


def finished(config: Config, journal: Journal) -> Result | None:
    """The result of a run that came to its end before, after saying so; None where there is something left to do."""
    folder = journal.folder.path
    if not journal.folder.finished:
        return None
    if journal.world.rank == 0:
        length = marked(type(config), LENGTH)[0].rpartition(".")[2]
        print(f"{folder} is finished; nothing was done. To train on, give a larger {length} with --extend.", file=sys.stderr)
    before, after = evaluations(folder)
    report = folder / "report.html"
    return Result(folder, folder / "model", report if report.exists() else None, before, after)


def newest_checkpoint(journal: Journal) -> Path | None:
    """The newest checkpoint that verifies, after the run folder was taken back to its step; without one, to the beginning."""
    world = journal.world
    found = world.broadcast(checkpoint.latest(journal.folder.checkpoints) if world.rank == 0 else checkpoint.Found(None))
    for line in found.ignored:
        journal.folder.event("checkpoint_ignored", reason=line)
    journal.folder.rewind(found.step if found.path is not None else -1)
    return found.path


@dataclass(frozen=True)
class Begun:
    """Where a run begins or goes on: its state, and the function that loops save through."""

    state: State
    save: Callable[[State], None]


def begin(
    config: Config,
    journal: Journal,
    learners: Learners,
    pinned: Mapping[str, str],
    found: Path | None,
    fresh: State,
    rows: tuple[int, int],
) -> Begun:
    """The state to start from: `fresh`, or that of the checkpoint `found`, which fills in the learners' optimisers too.

    `pinned` is what checkpoints pin (`language/recipes/pinned.py`), `rows` how many are trained on and held out. Raises `UserError`
    where a pin differs from the checkpoint's, and `run.allow` does not name the difference.
    """
    world = journal.world
    if world.size > 1:
        pinned = {**pinned, "ranks": str(world.size)}
        agree(world, {**pinned, "settings": json.dumps(to_dict(config), sort_keys=True), **_sums_of(learners)})
    if found is not None:
        check_pins(config.run, journal, checkpoint.verify(found), pinned)
    first = fresh if found is None else state.restore(found, learners)
    if config.run.extend:
        first = replace(first, ended=False)
    journal.callbacks.know(learners[0].model)
    why = getattr(learners[0].model, "why_padded", "")
    note_start(config.run, journal, found, first.step, why_padded=why, rows=rows[0], eval_rows=rows[1])
    if why:
        journal.tell("padded", f"Sequences are padded, not packed, which takes more time and memory: {why}.", why=why)

    def save(now: State) -> None:
        if world.rank and not world.lockstep:
            return
        journal.folder.flush()  # the rows are on the disk before the checkpoint that vouches for them
        path = state.save(journal.folder.checkpoints, now, learners, keep=config.run.save_total_limit, meta=pinned, world=world)
        if path is not None:
            journal.folder.checkpoint_bytes = checkpoint.size_of(path)
        journal.folder.event("saved", step=now.step)

    return Begun(first, save)


def note_start(run: Run, journal: Journal, found: Path | None, step: int, **noted: Any) -> None:
    """The event that a run has begun, or goes on from the checkpoint `found`: at which step, by which command, and where."""
    here = provenance(device(run))
    del here["when"]  # an event has its time
    kind = "started" if found is None else "resumed"
    journal.folder.event(kind, step=step, command=command(), machine=here | {"threads": torch.get_num_threads()}, **noted)


def check_pins(run: Run, journal: Journal, manifest: Mapping[str, Any], pinned: Mapping[str, str]) -> None:
    """Refuse to go on with what a checkpoint's manifest pins otherwise, and record what `run.allow` takes."""
    if manifest.get("ranks", "1") != pinned.get("ranks", "1"):
        # who shares the work among more or fewer processes asks for other rounding
        journal.folder.event("ranks_changed", before=manifest.get("ranks", "1"), now=pinned.get("ranks", "1"))
        pinned = {name: value for name, value in pinned.items() if name not in ("ranks", "threads")}
    for change in pins.check_pins(journal.folder.path, manifest, pinned, run.allow):
        journal.folder.event("allowed", name=change.name, before=change.before, now=change.now)
    versions = {name: [manifest[name], now] for name, now in state.versions().items() if manifest.get(name, now) != now}
    if versions:
        journal.folder.event("versions_changed", versions=versions)


def machine(run: Run) -> dict[str, str]:
    """Pins of the machine: threads and kernels change the last bits of sums, and a device more."""
    return {
        "threads": str(torch.get_num_threads()),
        "kernels": "off" if isinstance(kernels(), str) else "on",
        "device": torch.device(device(run)).type,
    }


def _sums_of(learners: Learners) -> dict[str, str]:
    """The sum of every weight that learns, to tell whether two processes begin alike."""
    return {
        "weights": " ".join(
            str(float(p.detach().double().sum()))
            for learner in learners
            if isinstance(learner, Learner)
            for name, p in learner.optimizer.parameters.items()
            if learner.optimizer.held[name] is p
        )
    }


def evaluations(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last evaluation of a run, with their steps."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if any(name.startswith("eval/") for name in row):
            rows.setdefault(row["step"], {}).update(row)
    ordered = [rows[step] for step in sorted(rows)]
    return (ordered[0], ordered[-1]) if ordered else ({}, {})
