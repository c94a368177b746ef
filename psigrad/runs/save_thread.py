"""A save that goes on in a thread beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from psigrad.processes.parallel.world import World


class SaveThread:
    """One thread, with one job at a time. All ranks of a world make theirs together, and it has a `world` of its own."""

    def __init__(self, world: World) -> None:
        make: Callable[[], World] | None = getattr(world, "beside", None)
        self.world: World = make() if make is not None and world.lockstep else world
        self._thread = ThreadPoolExecutor(1, "save")
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job. The one before has been waited for."""
        self._job = self._thread.submit(job)

    def wait(self) -> None:
        """Until the job is done. Raises what it raised, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    @classmethod
    def saving(cls, keep: Callable[[Any], None], beside: SaveThread) -> Callable[[Any], None]:
        """`keep` as a cycle takes it, which waits through it where a save must be whole."""
        keep.wait = beside.wait  # type: ignore[attr-defined]
        return keep
