"""The start and end of a run: its locked folder, the checkpoint to resume from, and its results."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from psigrad import extras, paths, redaction
from psigrad.config import Run
from psigrad.config.fields import LENGTH, find_marked, idle
from psigrad.config.load import to_dict
from psigrad.processes.parallel import launch
from psigrad.processes.parallel.world import ALONE, Division, World, join_world
from psigrad.records import checkpoint, pins
from psigrad.records.read import KEEPS, find_best_step
from psigrad.records.row_lines import last_event, read_steps
from psigrad.records.rows import merge_by_step
from psigrad.records.run_folder import NullRunFolder, RunFolder
from psigrad.runs import callbacks, machine
from psigrad.runs.best import Best
from psigrad.runs.callbacks import Callbacks
from psigrad.runs.journal import CompletionPrinter, Journal, WarningReporter, Watchdog
from psigrad.runs.machine import device, prepared_torch
from psigrad.runs.progress import ignore_closed_output
from psigrad.runs.result import Result
from psigrad.runs.survival import Stopped, StopSignal, convert_exits


@contextlib.contextmanager
def open_run(config: Any, recipe: str) -> Iterator[Journal]:
    """Set up a run for the duration of the block: connect its processes, lock its folder, open trackers, and handle signals.

    Yield the run's journal. Only rank 0 writes to the folder.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(ignore_closed_output())
        world = ALONE
        language = hasattr(config, "model")
        recompute = language and config.model.gradient_checkpointing
        stack.enter_context(prepared_torch(config.run, recompute=recompute, tf32=language))
        if hasattr(config, "placement"):
            launch.check(config.placement.processes)
            given = config.placement
            lockstep, minutes = given.strategy == "fsdp", given.timeout_minutes
            division = Division(given.dp_replicate_size, given.tp_size, given.cp_size)
            joined = join_world(device=device(config.run), lockstep=lockstep, minutes=minutes, division=division)
            world = stack.enter_context(joined)
        path = world.broadcast(paths.absolute(config.run.output_dir or new_folder(recipe)))
        yield stack.enter_context(_open_as(world, path, config, recipe))


@contextlib.contextmanager
def _open_as(world: World, path: Path, config: Any, recipe: str) -> Iterator[Journal]:
    settings = {"recipe": recipe, **to_dict(config)}
    if world.rank:
        with StopSignal() as stop, convert_exits():
            null_folder = NullRunFolder(path, world.broadcast(False))
            yield Journal(null_folder, signal=stop, world=world, callbacks=_callbacks(config, null_folder, world))
        return
    with RunFolder.open(path, settings, config.run.resume, type(config)) as folder, StopSignal() as stop:
        world.broadcast(folder.finished)
        names = () if folder.finished else config.run.report_to
        trackers = extras.load("trackers").open_trackers(names, folder.path, folder.settings) if names else []
        if count := getattr(config, "show_completions", 0):
            trackers = [*trackers, CompletionPrinter(count, max(config.run.logging_steps, 1))]
        watchdog = Watchdog(
            60 * config.run.watchdog_minutes, path, lambda phase, s: folder.event("hanging", phase=phase, seconds=s)
        )
        try:
            with watchdog.watching(), convert_exits():
                callbacks = _callbacks(config, folder, world)
                journal = Journal(folder, trackers, stop, WarningReporter(folder), watchdog, world, callbacks)
                if not folder.finished and (unheard := idle(config)):
                    journal.log("no_effect", " ".join(unheard.values()), settings=list(unheard))
                yield journal
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


def _callbacks(config: Any, folder: RunFolder, world: World) -> Callbacks:
    """Return the callbacks in the settings, plus `Best` if it is needed. Print which of their `on_…` methods are never called."""
    with paths.kept_folder():
        found = [callbacks.resolve(given) for given in config.run.callbacks]
    evaluation: Any = getattr(config, "evaluation", None)
    found += [Best(evaluation)] if Best.is_needed(evaluation) else []
    for callback in found if world.rank == 0 else ():
        if never := callbacks.never_called(callback):
            given, events = f"{', '.join(never)} of {type(callback).__name__}", ", ".join(callbacks.EVENTS)
            redaction.say(f"psigrad never calls {given}; it calls only {events}.")
    return Callbacks(found, config, folder, world)


def new_folder(recipe: str) -> Path:
    """Return the path of a folder that does not exist yet, named after the recipe and the time."""
    name = f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(
        path for path in (Path(f"{name}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 10000)))) if not path.exists()
    )


def load_finished(config: Any, journal: Journal, run_pins: Mapping[str, str]) -> Result | None:
    """If the run is finished, check its pins, print that nothing was done, and return its result. Otherwise return None.

    `run_pins` is {name in `pins.PINS`: current value, such as a hash}.
    """
    folder = journal.folder.path
    if not journal.folder.finished:
        journal.folder.pins = dict(run_pins)  # for `note_end`
        return None
    pins.check_pins(folder, journal.folder.pins, run_pins, config.run.allow)
    if journal.world.rank == 0:
        length = find_marked(type(config), LENGTH)[0].rpartition(".")[2]
        print(
            f"{folder} is finished; nothing was done. To continue training, set a larger {length} and add --extend.",
            file=sys.stderr,
        )
    before, after = evaluations(folder)
    report = folder / "report.html"
    return Result(folder, folder / "model", report if report.exists() else None, before, after)


def newest_checkpoint(journal: Journal) -> Path | None:
    """Return the newest intact checkpoint, or None. Remove the rows of steps after it from the run folder."""
    found = _verify_together(journal.world, journal.folder.checkpoints)
    for line in found.ignored:
        journal.folder.event("checkpoint_ignored", reason=line)
    rows, ends = (found.manifest.get(name) or {} for name in ("rows", "ends"))
    journal.folder.rewind(found.step if found.path is not None else -1, rows, ends)
    return found.path


def _verify_together(world: World, root: Path) -> checkpoint.Latest:
    """Return the newest intact checkpoint in `root`. Rank 0 lists the checkpoints, and each rank hashes a share of the files."""

    def check(path: Path) -> dict[str, Any]:
        manifest, fault = dict[str, Any](), ""
        try:
            manifest = checkpoint.verify(path, world.rank, world.size)
        except checkpoint.CheckpointError as error:
            fault = str(error)
        if faults := list(filter(None, world.all_gather(fault))):
            raise checkpoint.CheckpointError(faults[0])
        checkpoint.trust(path, manifest)
        return manifest

    return checkpoint.latest(world.broadcast(checkpoint.steps(root)), check=check)


def save_checkpoint(journal: Journal, step: int, write: Callable[[Path], None], run: Run, meta: Mapping[str, Any]) -> None:
    """Flush the run's rows, save a checkpoint, and delete old ones. For `write` and `meta`, see `checkpoint.save`."""
    journal.folder.flush()
    path = checkpoint.save(journal.folder.checkpoints, step, write, meta={**meta, **folder_facts(journal)})
    checkpoint.prune(journal.folder.checkpoints, run.save_total_limit)
    journal.folder.checkpoint_bytes = checkpoint.size_of(path)
    journal.folder.event("saved", step=step)


def folder_facts(journal: Journal) -> dict[str, Any]:
    """Return what a checkpoint's manifest stores about the run folder: settings, and the row and byte counts of each file."""
    return {"settings": journal.folder.settings, "rows": dict(journal.folder.rows), "ends": journal.folder.ends()}


def note_end(journal: Journal, **noted: Any) -> None:
    """Write the event `finished`, with the hashes of the model's files, the run's pins (`pins.PINS`), and `noted`."""
    folder = journal.folder
    folder.flush()
    if journal.world.rank == 0:
        sums = checkpoint.seal(folder.path / "model")
        sums = {name: sum for name, sum in sums.items() if not name.endswith("README.md")}  # a user may edit the card
        folder.event("finished", model=sums, pins=folder.pins, **noted)


def note_start(run: Run, journal: Journal, checkpoint: Path | None, step: int, pinned: Mapping[str, str], **noted: Any) -> None:
    """Write the event `started`, or `resumed` if `checkpoint` is given: step, command, machine, code hashes, and `noted`."""
    here = machine.provenance(device(run))
    del here["when"]  # an event has its own time
    kind = "started" if checkpoint is None else "resumed"
    if code := {name: pinned[name] for name in pins.CODE if name in pinned}:
        noted["code"] = code
    journal.folder.event(kind, step=step, command=machine.command(), machine=here | {"threads": torch.get_num_threads()}, **noted)


def check_pins(run: Run, journal: Journal, manifest: Mapping[str, Any], pinned: Mapping[str, str]) -> None:
    """Raise `UserError` if a pin differs between a checkpoint's `manifest` and `pinned`, unless `run.allow` names it."""
    if manifest.get("ranks", "1") != pinned.get("ranks", "1"):
        # sharing the work among more or fewer processes implies other rounding
        journal.folder.event("ranks_changed", before=manifest.get("ranks", "1"), now=pinned.get("ranks", "1"))
        pinned = {name: value for name, value in pinned.items() if name not in ("ranks", "threads")}
    for change in pins.check_pins(journal.folder.path, manifest, pinned, run.allow):
        journal.folder.event("allowed", name=change.name, before=change.before, now=change.now)
    versions = {name: [manifest[name], now] for name, now in machine.versions().items() if manifest.get(name, now) != now}
    if versions:
        journal.folder.event("versions_changed", versions=versions)


def evaluations(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metrics of the first evaluation and of the final model, each with its "step"; ({}, {}) if there are none."""
    kept = find_best_step([last_event(folder / "events.jsonl", *KEEPS)])
    rows = merge_by_step(row for row in read_steps(folder / "metrics.jsonl") if any(name.startswith("eval/") for name in row))
    ordered = [rows[step] for step in sorted(rows) if step <= kept]
    return (ordered[0], ordered[-1]) if ordered else ({}, {})
