"""Runs a function of a file on several processes, and gives back what rank 0 left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
MINUTES = 2.0
"""How long a process waits for the others."""
_SCRIPT = f"""
import importlib, os, signal, sys, torch
torch.set_num_threads(1)
from psigrad.processes.parallel.world import join_world
module, function, lockstep, *arguments = sys.argv[1:]
with join_world(lockstep=bool(int(lockstep)), minutes={MINUTES}) as world:
    getattr(importlib.import_module(module), function)(world, *arguments)
"""


def environment(rank: int, size: int, folder: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return {**os.environ, **ranks, "PSIGRAD_RANKS": folder, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(extra or {})}


def start(size: int, module: str, function: str, *arguments: str, lockstep: bool = False, extra=None, folder: str):
    """The processes, by rank."""
    command = [sys.executable, "-c", _SCRIPT, module, function, str(int(lockstep)), *map(str, arguments)]
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(command, env=environment(rank, size, folder, extra), stdout=pipe, stderr=pipe, text=True)
        for rank in range(size)
    ]


def run(size: int, module: str, function: str, *arguments: str, lockstep: bool = False, extra=None, seconds: float = 280) -> None:
    """Run to the end; an error of any rank is raised with what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(size, module, function, *arguments, lockstep=lockstep, extra=extra, folder=folder)
        try:
            said = [rank.communicate(timeout=seconds) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    bad = [f"rank {n} ended with {rank.returncode}:\n{said[n][1][-3000:]}" for n, rank in enumerate(ranks) if rank.returncode]
    assert not bad, "\n".join(bad)
