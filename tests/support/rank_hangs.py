"""A process that stands still while the others wait for it."""

from __future__ import annotations

import os
import signal

from psigrad.processes.parallel.world import World


def main(world: World, hung: str) -> None:
    """All meet; then the one that is named stops, without an end."""
    world.all_gather(None)
    if world.rank == int(hung):
        os.kill(os.getpid(), signal.SIGSTOP)
    world.all_gather(None)
