"""The settings and limits of a studio."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = "127.0.0.1"
DAY = 24 * 3600


@dataclass(frozen=True)
class StudioSettings:
    """Folders, database and address, and limits per request and per second."""

    runs: Path = Path("runs")
    """Folder that holds run folders."""
    database: str = ""
    """Where labels are kept, a path or a postgresql:// URL; empty: labels.db beside the runs folder."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which a reverse proxy asks for the studio, as in labels.example.org. The studio itself listens on loopback."""
    port: int = 8420
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """Opens the studio; made anew at every start. Anyone who has it may do whatever the studio can."""
    session_seconds: float = 7 * DAY
    body_bytes: int = 256 * 1024
    import_bytes: int = 16 * 2**20
    """A file of completions to be labelled, which only administrators may send."""
    body_seconds: float = 10.0
    """A body that takes longer to arrive is refused."""
    header_seconds: float = 5.0
    """A connection that has not sent its headers by then is closed."""
    requests_per_second: float = 100.0
    burst: int = 300
    strangers_per_second: float = 5.0
    """Rate of refused requests. Above it strangers get 429, even for valid requests."""
    strangers_burst: int = 60
    work_at_once: int = 2
    """Computations side by side; further ones wait, then are told to come back."""
    work_seconds: float = 2.0
    """A computation that takes longer answers with what it has."""
    cache_bytes: int = 64 * 2**20
    checkpoints: tuple[Path, ...] = ()
    """Models to chat with besides those in the runs folder."""
    model_bytes: int = 8 * 10**9
    """Weights that are kept in memory for the chat page; the models used longest ago are freed first."""

    @property
    def hosts(self) -> frozenset[str]:
        """The accepted Host headers. Any other name could be DNS rebinding."""
        return self.own_hosts | frozenset(self.allowed_hosts)

    @property
    def own_hosts(self) -> frozenset[str]:
        """Those of `hosts` that mean this machine."""
        names = {f"{name}:{self.port}" for name in (LOOPBACK, "localhost")}
        return frozenset(names | ({LOOPBACK, "localhost"} if self.port == 80 else set()))

    @property
    def origins(self) -> frozenset[str]:
        """The accepted Origin headers. A proxy may serve HTTPS to the outside."""
        return frozenset({f"http://{name}" for name in self.hosts} | {f"https://{name}" for name in self.allowed_hosts})

    @property
    def labels(self) -> str:
        """Path or URL of the labels."""
        # the parent of "." and of ".." is "." to pathlib
        return self.database or os.path.normpath(self.runs / ".." / "labels.db")
