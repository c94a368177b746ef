"""Workers on a Ray cluster as the section `placement` asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from psigrad.config import Placement
from psigrad.errors import UserError
from psigrad.processes.parallel.fleet import Fleet
from psigrad.processes.parallel.worker_logs import kept
from psigrad.runs.journal import Journal


@contextlib.contextmanager
def fleet(
    placement: Placement,
    journal: Journal,
    kind: type,
    arguments: Sequence[Any],
    *,
    name: str,
    count: int,
    cpus: int,
    gpus: float = 0.0,
) -> Iterator[Fleet]:
    """`count` workers of a kind, for the length of the block; 0: as many as there is room for beside those that were counted.
    What they print goes to the terminal and to workers.log of the run folder.

    Raises `UserError` where no cluster is named.
    """
    if not placement.cluster:
        raise UserError(f"placement asks for {name}s on a Ray cluster and none was named; give --cluster, or leave them out.")
    counted = placement.scorers * placement.scorer_cpus + placement.environment_actors * placement.environment_cpus
    made = Fleet(
        kind,
        arguments,
        name=name,
        address=placement.cluster,
        count=count,
        cpus=cpus,
        gpus=gpus,
        spare_cpus=counted,
        minutes=placement.timeout_minutes,
        tell=journal.tell,
    )
    try:
        with kept(kind.__name__, journal.folder.path / "workers.log"):
            yield made
    finally:
        made.close()
