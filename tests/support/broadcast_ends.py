"""Processes that join a group as those of an engine do: `python broadcast_ends.py RANK FAULT FOLDER KIND HOST PORT SIZE`, then on
the standard input how many bytes each buffer has.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from ranks import ROOT


class Ends:
    """All but the trainer's; those that are left are ended with the block."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, meeting: Sequence[object], folder: Path, faults: Mapping[int, str] | None = None) -> None:
        """Start them. One with a fault "dies" or "hangs" in the place of its second buffer."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for rank in range(1, int(str(meeting[3]))):
            words = [sys.executable, __file__, str(rank), (faults or {}).get(rank, "none"), str(folder), *map(str, meeting)]
            self.processes[rank] = subprocess.Popen(words, stdin=subprocess.PIPE, text=True, env=environment)

    def expect(self, sizes: Sequence[int]) -> None:
        """Tell them what is sent."""
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.write(f"{' '.join(map(str, sizes))}\n")
            process.stdin.flush()

    def wait(self, rank: int) -> int:
        """The status with which one ends."""
        return self.processes[rank].wait(60.0)


def main(rank: int, fault: str, folder: Path, kind: str, host: str, port: int, size: int) -> None:
    """One of them."""
    import torch

    from psigrad_extras.vllm import broadcast

    group = broadcast.join(broadcast.Meeting(kind, host, port, size), rank, torch.device("cpu"))  # type: ignore[arg-type]
    for place, count in enumerate(map(int, sys.stdin.readline().split())):
        if place == 1 and fault == "dies":
            os._exit(9)
        if place == 1 and fault == "hangs":
            time.sleep(60.0)
        torch.save(group.receive(count), folder / f"{rank}-{place}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5], int(sys.argv[6]), int(sys.argv[7]))
