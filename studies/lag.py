"""The gain and cost of a lag between sampling and training on many devices: an event simulation.

Every duration is assumed, none was measured: the defaults are guesses for a model of 8 billion parameters on GPUs of 2024. The
simulation studies the order of events, which follows from long-tailed lengths: the waiting times, and the completions of each
step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from psigrad.errors import UserError
from psigrad.language.training.online.lag import begun_by
from studies import drawing
from studies.drawing import BLUE, GREEN, INK, PINK, RUST
from studies.settings import LagSettings

SHARES = (0.5, 0.625, 0.75)
"""The tested shares of devices that sample. The best is reported."""
MODES = (("in order", 1), ("in order", 2), ("in order", 4), ("first come", 4))


@dataclass(frozen=True)
class LagRow:
    """The figures of one number of devices with one way to divide the work."""

    devices: int
    mode: str
    """The mode: "in turns" (all sample, then all train), "in order" (psigrad's lag) or "first come" (trains on whatever ended
    first).
    """
    lag: int
    share: float
    """The share of the devices that sample."""
    speed: float
    """The tokens per second and device, after the first third of the steps."""
    gain: float
    """The speed relative to taking turns."""
    staleness: float
    """The mean number of versions between sampling and training."""
    oldest: int
    """The largest number of versions."""
    first_lengths: float
    """The mean length of the completions in the first three steps, divided by that of all completions."""


@dataclass(frozen=True)
class LagResult:
    """The results of `run`."""

    settings: LagSettings
    rows: tuple[LagRow, ...]


def check(s: LagSettings) -> None:
    """Raise an error for invalid settings."""
    for name in ("completions", "mean_length", "longest", "steps", "slots", "most_devices"):
        if getattr(s, name) < 1:
            raise UserError(f"{name} is {getattr(s, name)}; it must be at least 1.")
    if s.most_devices < 8:
        raise UserError(f"most_devices is {s.most_devices}; give at least 8.")
    if s.spread < 0 or s.steps < 3:
        raise UserError(f"spread is {s.spread} and steps {s.steps}; give a spread of at least 0 and at least 3 steps.")


def run(settings: LagSettings) -> LagResult:
    """Simulate every mode on 8, 32, 128, … devices, and on the largest number."""
    check(settings)
    found: list[LagRow] = []
    counts = [8 * 4**n for n in range(16) if 8 * 4**n < settings.most_devices]
    for devices in [*counts, settings.most_devices]:
        turns = in_turns(settings, devices)
        found.append(turns)
        for mode, lag in MODES:
            tries = [apart(settings, devices, share, lag, mode == "in order", turns.speed) for share in SHARES]
            found.append(max(tries, key=lambda row: row.speed))
    return LagResult(settings, tuple(found))


def lengths(s: LagSettings, count: int) -> list[int]:
    """Return lengths in tokens: log-normal with the mean `mean_length`, cut at `longest`."""
    drawn = np.random.default_rng(s.seed).lognormal(math.log(s.mean_length) - s.spread**2 / 2, s.spread, count)
    found: list[int] = np.clip(drawn, 1, s.longest).astype(int).tolist()
    return found


def seconds_to_train(s: LagSettings, tokens: float, devices: int) -> float:
    """Return the seconds of a step on `tokens` tokens. Every doubling beyond 8 devices costs 3 % of the speed."""
    speed: float = 0.97 ** max(0.0, math.log2(devices / 8))
    return tokens * s.train_token / devices / speed


def seconds_to_publish(s: LagSettings, samplers: int) -> float:
    """Return the seconds until all samplers have new weights. They continue meanwhile, the trainers wait."""
    return s.publish * (1 + 0.2 * math.log2(max(2, samplers)))


class Samplers:
    """Devices that decode, each up to `slots` completions at a time.

    With n completions, one token of each takes weights + n · cache seconds. A device decodes under one version of the weights.
    Completions of another version wait until the current ones have ended, unless the device is `free` to switch weights in the
    middle of a completion.
    """

    def __init__(self, s: LagSettings, devices: int, free: bool = False) -> None:
        self._s, self._free = s, free
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._version = [0] * devices
        self._active: list[list[tuple[float, int]]] = [[] for _ in range(devices)]  # heaps of (device tokens at end, completion)
        self._done, self._at, self._stamp = [0.0] * devices, [0.0] * devices, [0] * devices
        self._events: list[tuple[float, int, int]] = []

    def add(self, items: Sequence[tuple[int, int, int]], now: float) -> None:
        """Add completions as (number, length, version). They go to the devices with the fewest."""
        self._waiting.extend(items)
        free = [(len(own), d) for d, own in enumerate(self._active) if len(own) < self._s.slots]
        heapq.heapify(free)
        touched: set[int] = set()
        while self._waiting and free:
            count, device = heapq.heappop(free)
            if not self._takes(device):
                continue
            if device not in touched:
                touched.add(device)
                self._advance(device, now)
            self._begin(device)
            if count + 1 < self._s.slots:
                heapq.heappush(free, (count + 1, device))
        for device in touched:
            self._announce(device)

    def next(self) -> float:
        """Return the time at which the next completion ends."""
        while self._events and self._events[0][2] != self._stamp[self._events[0][1]]:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def end(self) -> int:
        """End the next completion and return its number."""
        now = self.next()
        _, device, _ = heapq.heappop(self._events)
        self._advance(device, now)
        _, number = heapq.heappop(self._active[device])
        while self._waiting and len(self._active[device]) < self._s.slots and self._takes(device):
            self._begin(device)
        self._announce(device)
        return number

    def _takes(self, device: int) -> bool:
        """Return True if the device may start the first waiting completion."""
        return self._free or not self._active[device] or self._version[device] == self._waiting[0][2]

    def _begin(self, device: int) -> None:
        number, length, self._version[device] = self._waiting.popleft()
        heapq.heappush(self._active[device], (self._done[device] + length, number))

    def _advance(self, device: int, now: float) -> None:
        if self._active[device]:
            self._done[device] += (now - self._at[device]) / self._token(device)
        self._at[device] = now

    def _token(self, device: int) -> float:
        return self._s.decode_weights + self._s.decode_cache * len(self._active[device])

    def _announce(self, device: int) -> None:
        self._stamp[device] += 1
        if self._active[device]:
            left = max(0.0, self._active[device][0][0] - self._done[device])
            heapq.heappush(self._events, (self._at[device] + left * self._token(device), device, self._stamp[device]))


def in_turns(s: LagSettings, devices: int) -> LagRow:
    """Simulate all devices sampling a step's completions, then all training on them."""
    sizes, now, tokens = lengths(s, s.steps * s.completions), 0.0, 0
    for step in range(s.steps):
        batch = sizes[step * s.completions : (step + 1) * s.completions]
        samplers, ended = Samplers(s, devices), 0.0
        samplers.add([(i, size, 0) for i, size in enumerate(batch)], 0.0)
        for _ in batch:
            ended = samplers.next()
            samplers.end()
        now += ended + s.swap + seconds_to_train(s, sum(batch), devices)
        tokens += sum(batch)
    return LagRow(devices, "in turns", 0, 1.0, tokens / now / devices, 1.0, 0.0, 0, 1.0)


def apart(s: LagSettings, devices: int, share: float, lag: int, in_order: bool, base: float) -> LagRow:
    """Simulate some devices sampling while the others train.

    At most `lag` + 1 steps' completions are issued beyond the newest version. A step trains on its own completions (in order), or
    on whatever ended first.
    """
    count = s.completions
    samplers = max(1, int(devices * share))
    sizes = lengths(s, (s.steps + lag + 1) * count)
    engines, version, now, issued = Samplers(s, samplers, free=not in_order), 0, 0.0, 0
    born, left, ready = [0] * len(sizes), [count] * (s.steps + lag + 1), deque[int]()
    until, trained, ages, first = math.inf, 0, [], []
    begun = (0.0, 0)

    def issue() -> None:
        nonlocal issued
        upto = begun_by(version, lag, s.steps + lag + 1) * count
        born[issued:upto] = [version] * (upto - issued)
        engines.add([(i, sizes[i], version) for i in range(issued, upto)], now)
        issued = upto

    issue()
    while version < s.steps:
        if until == math.inf and (left[version] == 0 if in_order else len(ready) >= count):
            own = range(version * count, (version + 1) * count) if in_order else [ready.popleft() for _ in range(count)]
            batch = [sizes[i] for i in own]
            ages += [version - born[i] for i in own]
            first += batch if version < 3 else []
            trained += sum(batch)
            until = now + seconds_to_train(s, sum(batch), devices - samplers) + seconds_to_publish(s, samplers)
        if until <= engines.next():
            now, until, version = until, math.inf, version + 1
            if version == s.steps // 3:
                begun = (now, trained)
            issue()
        else:
            now = engines.next()
            number = engines.end()
            left[number // count] -= 1
            ready.append(number)
    speed = (trained - begun[1]) / (now - begun[0]) / devices
    bias = float(np.mean(first) / np.mean(sizes))
    mode = "in order" if in_order else "first come"
    return LagRow(devices, mode, lag, share, speed, speed / base, float(np.mean(ages)), max(ages), bias)


def tables(result: LagResult) -> Iterator[Table | Text]:
    """Yield one row for each number of devices and mode."""
    head = ("devices", "mode", "lag", "sample", "tokens/s", "gain", "stale", "oldest", "first")
    table = drawing.new_table("Sampling and training on many devices (simulated)", *head)
    last = 0
    for row in result.rows:
        share = "all" if row.mode == "in turns" else f"{row.share:.0%}"
        shown = str(row.devices) if row.devices != last else ""
        last = row.devices
        figures = (f"{row.speed:,.0f}", f"{row.gain:.2f}×", f"{row.staleness:.1f}", str(row.oldest), f"{row.first_lengths:.2f}")
        table.add_row(shown, row.mode, str(row.lag) if row.lag else "–", share, *figures)
    yield table
    yield drawing.note(
        "All durations are assumed. sample: devices that sample, best of three shares",
        "tokens/s: of each device; stale, oldest: versions between sampling and training",
        "first: mean length in the first three steps, over that of all completions",
    )


def picture(found: Mapping[str, Any], path: Path) -> Path:
    """Plot the gain over taking turns, and the lengths in the first steps, over the number of devices."""
    figure, (left, right) = drawing.new_figure(9.5, 3.4, 1, 2)
    for (mode, lag), colour in zip(MODES, (BLUE, GREEN, INK, RUST), strict=True):
        rows = [row for row in found["rows"] if (row["mode"], row["lag"]) == (mode, lag)]
        devices, style = [row["devices"] for row in rows], {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.6}
        left.plot(devices, [row["gain"] for row in rows], label=f"{mode}, lag {lag}", **style)
        right.plot(devices, [row["first_lengths"] for row in rows], **style)
    left.axhline(1.0, color=PINK, linewidth=1.2, linestyle=(0, (4, 2)), label="in turns")
    for axes, title in (
        (left, "Tokens per second and device, over taking turns"),
        (right, "Mean length in the first three steps"),
    ):
        drawing.tidy(axes, title, grid="y")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("devices", color=INK, fontsize=9)
    right.set_ylim(0, 1.1)
    left.legend(fontsize=8, frameon=False)
    return drawing.save(figure, path)
