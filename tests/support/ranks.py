"""Runs a function of a file on several processes, and gives back what rank 0 left."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from psigrad.kernels import kernels
from psigrad.processes.parallel.world import Division, join_world

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
MINUTES = 2.0
"""How long a process waits for the others."""


class Rank:
    """A process that is forked, as starting Python and loading torch takes longer than most tests; read as a `Popen` is."""

    def __init__(
        self, environment: Mapping[str, str], lockstep: bool | Division, module: str, function: str, *arguments: str
    ) -> None:
        self._said = os.memfd_create("said")
        given = (environment, lockstep, module, function, *arguments)
        self._process = multiprocessing.get_context("fork").Process(target=self._main, args=given)
        self._process.start()

    def _main(
        self, environment: Mapping[str, str], lockstep: bool | Division, module: str, function: str, *arguments: str
    ) -> None:
        gc.freeze()  # another test's process groups are not collected here, where their threads are not
        for descriptor in (1, 2):
            os.dup2(self._said, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
        os.environ.update(environment)
        torch.set_num_threads(1)
        for kept in (kernels.kernels, kernels.library):
            kept.cache_clear()  # which an environment may switch off
        try:
            division = lockstep if isinstance(lockstep, Division) else None
            with join_world(lockstep=bool(lockstep), minutes=MINUTES, division=division) as world:
                getattr(importlib.import_module(module), function)(world, *arguments)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self.returncode

    def communicate(self, timeout: float = 280) -> tuple[str, str]:
        """All that it said, as the second; raises `TimeoutExpired`."""
        if self.wait(timeout) is None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return "", os.pread(self._said, os.fstat(self._said).st_size, 0).decode()

    def end(self) -> None:
        """Kill it, if it is there yet."""
        self._process.kill()
        self._process.join(60)
        os.close(self._said)


def environment(rank: int, size: int, folder: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return {**ranks, "PSIGRAD_RANKS": folder, "OMP_NUM_THREADS": "1", **(extra or {})}


def start(
    size: int, module: str, function: str, *arguments: object, lockstep: bool | Division = False, extra=None, folder: str
) -> list[Rank]:
    """The processes, by rank."""
    importlib.import_module(module)  # here, once, and not in each of them
    if lockstep:
        for sharding in ("torch.distributed.fsdp", "torch.distributed.checkpoint"):
            importlib.import_module(sharding)
    return [
        Rank(environment(rank, size, folder, extra), lockstep, module, function, *map(str, arguments)) for rank in range(size)
    ]


def run(
    size: int, module: str, function: str, *arguments: object, lockstep: bool | Division = False, extra=None, seconds: float = 280
) -> None:
    """Run to the end; an error of any rank is raised with what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(size, module, function, *arguments, lockstep=lockstep, extra=extra, folder=folder)
        try:
            said = [rank.communicate(seconds)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.end()
    bad = [f"rank {n} ended with {rank.returncode}:\n{said[n][-3000:]}" for n, rank in enumerate(ranks) if rank.returncode]
    assert not bad, "\n".join(bad)
