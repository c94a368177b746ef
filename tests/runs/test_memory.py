"""What a run holds stays what it held in its first steps, and each row of timings says how much it is."""

from __future__ import annotations

import functools
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from psigrad.runs import journal, machine
from psigrad.runs.journal import Clock, Journal, Trimmer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says what a process holds")
MB, ROOT = 1 << 20, Path(__file__).parents[2]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the process will hold at the end of each step, and, as negative numbers, what was given back."""
    found: list[int] = []
    monkeypatch.setattr(journal, "memory", lambda: {"memory_bytes": found[0]})
    monkeypatch.setattr(journal, "give_back", lambda: found.append(-found[0]))
    yield found


def test_memory_is_given_back_above_what_the_first_steps_held(held: list[int]) -> None:
    trim = Trimmer(steps=2)
    for bytes_held, given in ((100, False), (90, False), (102, False), (103, True), (102, False)):
        held[:] = [bytes_held]
        assert trim() == {"memory_bytes": bytes_held}
        assert held[1:] == ([-bytes_held] if given else []), bytes_held


def test_what_is_held_after_it_was_given_back_is_needed(held: list[int]) -> None:
    trim = Trimmer(steps=1)
    for bytes_held, given in ((100, False), (200, True), (204, False), (205, True)):
        held[:] = [bytes_held]
        trim()
        assert held[1:] == ([-bytes_held] if given else []), bytes_held


def see_peaks(trims: int, leak: int) -> None:
    """Prints the peak after 60 steps as a share of that after 25, with tensors of ever new sizes between small ones that stay.

    Until it has settled it goes up by a twentieth; what leaks 2 MB a step goes up by a fifth meanwhile.
    """
    machine.keep_freed_memory()
    journal.give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    draw, caches, leaked, found = random.Random(0), [], [], []
    ours = Trimmer() if trims else journal.memory
    for _ in range(60):
        live: list[torch.Tensor] = []
        for _ in range(30):
            live.append(torch.ones(draw.randrange(1 << 16, 1 << 20)))
            if draw.random() < 0.3:
                caches.append(torch.ones(2048))
            if len(live) > 6:
                live.pop(draw.randrange(6))
        del live, caches[:-200]
        leaked.append(torch.ones(leak))
        found.append(ours()["peak_memory_bytes"])
    print(found[-1] / found[24])


def rise(trims: int, leak: int, processes: int = 5) -> float:
    """The peak of a process as a share of where it had settled, on average. Where holes in the heap lie is a matter of luck: 24
    processes showed 1.00 to 1.06 with trims (mean 1.025), and 1.04 to 1.19 without (mean 1.11).
    """
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests/support"))
    words, env = [sys.executable, __file__, str(trims), str(leak)], {**os.environ, "PYTHONPATH": paths}
    run = functools.partial(subprocess.run, words, env=env, capture_output=True, text=True, check=True)
    return statistics.mean(float(run().stdout) for _ in range(processes))


def test_the_peak_stays_what_it_was() -> None:
    assert rise(trims=1, leak=1) <= 1.05


def test_negative_control_a_leak_of_two_megabytes_a_step_is_seen() -> None:
    assert rise(trims=1, leak=MB // 2, processes=1) > 1.15


def test_negative_control_the_peak_rises_where_nothing_is_given_back() -> None:
    assert rise(trims=0, leak=1) > 1.05


def test_every_row_of_timings_says_what_the_process_holds() -> None:
    rows: list[dict[str, float]] = []

    class Folder:
        def timings(self, row: dict[str, float]) -> None:
            rows.append(row)

    Journal(Folder()).timings(1, Clock(), 5)  # type: ignore[arg-type]
    assert 10 * MB < rows[0]["memory_bytes"] <= rows[0]["peak_memory_bytes"]


if __name__ == "__main__":
    see_peaks(*map(int, sys.argv[1:]))
