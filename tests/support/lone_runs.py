"""The journal and the world of a run that has neither a folder nor other processes."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psigrad.processes.parallel.world import Alone
from psigrad.records.run_folder import RunFolder
from psigrad.runs.journal import Journal


@dataclass(frozen=True)
class Heard(Journal):
    """A journal that writes nothing: `said` has the (kind, text, fields) of what was logged."""

    folder: RunFolder = field(default_factory=lambda: RunFolder(Path("run"), io.BytesIO()))
    said: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def log(self, kind: str, text: str, **fields: Any) -> None:
        self.said.append((kind, text, fields))


class OneOf(Alone):
    """The world of one of `size` processes, of which the others are not there."""

    def __init__(self, size: int, rank: int = 0, **more: Any) -> None:
        self.size, self.rank = size, rank
        vars(self).update(more)
