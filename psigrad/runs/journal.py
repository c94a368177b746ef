"""The log of a run: the rows in its folder, trackers, timings, memory, warnings, and a watchdog for phases that hang."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from psigrad import redaction
from psigrad.processes.parallel.world import ALONE, World
from psigrad.records import rows, run_folder
from psigrad.records.read import prompt_text
from psigrad.records.row_lines import read_steps
from psigrad.records.run_folder import RunFolder
from psigrad.records.warnings import BY_NAME, RunWarning, SignalNames, Watch
from psigrad.runs.callbacks import Callbacks
from psigrad.runs.survival import Interrupted, Stopped, StopSignal
from psigrad.step import Observe, Outcome

STACKS = "stacks.txt"
# A phase hangs if it takes more than this multiple of the longest earlier phase of the same name.
_TIMES = 10
_STATUS_FIELDS = {"memory_bytes": "VmRSS", "peak_memory_bytes": "VmHWM", "anonymous_bytes": "RssAnon"}


class Tracker(Protocol):
    """A destination of metrics besides the run folder, such as W&B. Implementations: psigrad_extras/connect/trackers.py."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step."""

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log one step's rows of rollouts.jsonl."""

    def close(self) -> None:
        """Close the tracker at the end."""


class CompletionPrinter:
    """A tracker that prints at most `count` training completions, evenly spaced in the batch, every `every` steps."""

    def __init__(self, count: int, every: int) -> None:
        self._count, self._every, self._next = count, every, 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: the progress bar displays the metrics."""

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print a line for each selected completion: step, reward, the end of the prompt, and the start of the completion."""
        trained = [row for row in rows if row["kind"] == "train"]
        if step < self._next or not trained:
            return
        self._next = step + self._every
        for row in trained[:: -(-len(trained) // self._count)]:
            prompt = str(prompt_text(row["prompt"]))
            reward = "unscored" if row["reward"] is None else f"{row['reward']:.3g}"
            said = " ".join(row["completion"].split())
            redaction.say(f"step {step}  reward {reward}  …{' '.join(prompt.split())[-60:]} → {said[:120]}")

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class WarningReporter:
    """Reports the warnings of a run on stderr and as events, each rule of `psigrad.records.warnings` at most once."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._names, self._watch = folder, SignalNames(), Watch()
        self._reported: set[str] = set()
        self._started = False

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Check a row of metrics and report new warnings. A resumed run does not repeat its earlier ones."""
        if not self._started:
            self._started = True
            for before in read_steps(self._folder.path / "metrics.jsonl"):
                self._judge(before["step"], before)
        for alert in self._judge(step, row):
            rule = BY_NAME[alert.rule]
            self._folder.event("warning", rule=rule.name, step=alert.step, value=alert.value, says=f"{rule.title}. {rule.advice}")
            more = f"More: psigrad explain {rule.name}."
            redaction.say(f"warning from step {alert.step:g} on: {rule.title}. {rule.advice} {more}")

    def _judge(self, step: float, row: Mapping[str, Any]) -> list[RunWarning]:
        self._watch.update(step, {self._names.of(key): value for key, value in rows.figures(row).items()})
        found = self._watch.alerts()
        times = Counter(alert.rule for alert in found)
        standing = [a for a in found if a.ended is None and times[a.rule] >= BY_NAME[a.rule].min_count]
        new = [a for a in standing if a.rule not in self._reported and not self._watch.explains(a.rule)]
        self._reported |= {alert.rule for alert in new}
        return new


def memory() -> dict[str, int]:
    """Return this process's memory in bytes: current, peak, and anonymous (without mapped files); {} if /proc is missing."""
    try:
        said = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    found = {name: re.search(rf"^{key}:\s+(\d+) kB", said, re.M) for name, key in _STATUS_FIELDS.items()}
    return {name: 1024 * int(match[1]) for name, match in found.items() if match}


class MemoryTrimmer:
    """Returns freed memory to the system when the process uses over `above` times the peak of its first `steps` steps."""

    def __init__(self, steps: int = 3, above: float = 1.02) -> None:
        self._left, self._above, self._needed = steps, above, 0

    def __call__(self) -> dict[str, int]:
        """Trim the heap if the anonymous memory exceeds the limit. Return the current and peak memory. Call after each step."""
        held = memory()
        now = held.pop("anonymous_bytes", 0)  # cached pages of files vary with the machine's other needs
        if self._left > 0:
            self._left -= 1
            self._needed = max(self._needed, now)
        elif now > self._above * self._needed:
            trim_heap()  # not at every step: each returned page causes a page fault when it is used again
            self._needed = max(self._needed, memory().get("anonymous_bytes", 0))  # the remaining memory is in use
        return held


def trim_heap() -> None:
    """Make glibc return freed memory to the system. Do nothing if the C library is not glibc."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass(frozen=True)
class Journal:
    """The log of a run: its folder, trackers, warnings, stop signal and callbacks in one object.

    Measured times go to `timings`, since `metrics` and `rollouts` must be the same if the run is repeated.
    """

    folder: RunFolder
    trackers: Sequence[Tracker] = field(default_factory=tuple)
    signal: StopSignal | None = None
    reporter: WarningReporter | None = None
    watchdog: Watchdog | None = None
    world: World = ALONE
    """The processes of the run; only rank 0 writes and prints."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    trim: Callable[[], dict[str, int]] = field(default_factory=MemoryTrimmer)
    logged: set[str] = field(default_factory=set)
    """The kinds that `log_once` has logged."""

    @property
    def watch(self) -> Observe:
        """Write `with journal.watch(name):` to let the watchdog, if there is one, time the block as the phase `name`."""
        return self.watchdog.phase if self.watchdog is not None else contextlib.nullcontext

    def record(self, outcome: Outcome[Any]) -> None:
        """Write the rollouts, metrics and timings of one step. Print its messages for the user (`outcome.notes`)."""
        for kind, text in outcome.notes.items():
            self.log_once(kind, text)
        if self.world.rank == 0 and outcome.rows:
            self.rollouts(outcome.rows)
        self.metrics(outcome.state.step, outcome.metrics)
        self.timings(outcome.state.step, outcome.timings, outcome.tokens)

    def log(self, kind: str, text: str, **fields: Any) -> None:
        """Write an event of this `kind` with `fields`, and print `text` on stderr."""
        self.folder.event(kind, **fields)
        if self.world.rank == 0:
            redaction.say(text)

    def log_once(self, kind: str, text: str) -> None:
        """Log `text`, unless a text of this `kind` was logged before."""
        if kind not in self.logged:
            self.logged.add(kind)
            self.log(kind, text, why=text)

    def disk_low(self) -> str:
        """Return the reason why another checkpoint may not fit on the disk; "" if one fits."""
        return self.world.broadcast(self.folder.disk_low())

    def metrics(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write one row of metrics.jsonl, check it for warnings, and log it to the trackers."""
        if self.reporter is not None:
            self.reporter.update(step, figures)
        self.folder.metrics({"step": step, **figures})
        self.callbacks.add_row({"step": step, **figures})
        for tracker in self.trackers:
            tracker.log(step, {name: float(value) for name, value in figures.items() if isinstance(value, int | float)})

    def timings(self, step: int, seconds: Mapping[str, float], tokens: int) -> None:
        """Write one row of timings.jsonl. `seconds` are from `Clock.read`. `tokens` is the number of tokens processed."""
        rate = tokens / seconds["step_time"]
        self.folder.timings({"step": step, **seconds, "tokens": tokens, "tokens_per_second": rate, **self.trim()})

    def rollouts(self, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of rollouts.jsonl. Log them to the trackers, except episodes of `psigrad.control`, which have no text."""
        self.folder.rollouts(completions)
        shown = [row for row in completions if "completion" in row]  # in control, rows are episodes
        for tracker in self.trackers if shown else ():
            tracker.completions(int(shown[0]["step"]), shown)

    def stop_requested(self) -> bool:
        """Return True if any process received a signal to stop: SIGTERM, SIGHUP or Ctrl-C."""
        return any(self.world.all_gather(self.signal is not None and self.signal.requested))

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise `Interrupted` in the block when a signal requests a stop. Remove the rows that the block had already written.

        Do nothing if the run has several processes.
        """
        if self.signal is None or self.world.size > 1:  # the other processes would wait for this one forever
            yield
            return
        written, ends = dict(self.folder.rows), self.folder.ends()
        try:
            with self.signal.interrupting():
                yield
        except Interrupted:
            run_folder.truncate(self.folder, written, ends)
            raise

    def stopped(self, step: int) -> None:
        """Record the stop and raise `Stopped`. Call this after a requested stop, once the state is saved."""
        self.folder.event("stopped", step=step)
        stopped = Stopped(f"Stopped on request after step {step}; everything is saved. Repeat the command to resume the run.")
        stopped.exit_status += max(self.world.all_gather(self.signal.number if self.signal is not None else 0))
        raise stopped


class Watchdog:
    """A thread that writes the stacks of all threads to a file and calls `report(phase, seconds so far)` if a phase hangs.

    A phase hangs if it takes more than `seconds`, and more than ten times the longest earlier phase of the same name.
    """

    def __init__(self, seconds: float, folder: Path, report: Callable[[str, float], None]) -> None:
        self._limit, self._file, self._report = seconds, folder / STACKS, report
        self._phases = ["loading"]
        self._since = time.monotonic()
        self._longest: dict[str, float] = {}
        self._reported = False
        self._end = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While the block runs, check that no phase hangs. Do nothing if `seconds` is 0."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if self._limit:
            thread.start()
        try:
            yield
        finally:
            self._end.set()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase with this name."""
        self._turn()
        self._phases.append(name)
        begun = time.monotonic()
        try:
            yield
        finally:
            self._phases.pop()
            self._longest[name] = max(self._longest.get(name, 0.0), time.monotonic() - begun)
            self._turn()

    def _turn(self) -> None:
        self._phases[0] = "between the phases of a step"
        self._since, self._reported = time.monotonic(), False

    def _watch(self) -> None:
        while not self._end.wait(min(5.0, self._limit / 4)):
            phase, spent = self._phases[-1], time.monotonic() - self._since
            if not self._reported and spent > max(self._limit, _TIMES * self._longest.get(phase, 0.0)):
                self._reported = True
                with contextlib.suppress(OSError), self._file.open("a") as stream:
                    stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {phase} for {spent:.0f} s\n")
                    stream.flush()
                    faulthandler.dump_traceback(stream)
                redaction.say(f"The phase {phase!r} has lasted {spent:.0f} s; it may be stuck. Thread stacks: {self._file}.")
                self._report(phase, spent)
