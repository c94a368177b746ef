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
    """The folder that contains the run folders."""
    home: str = ""
    """The page that visitors with the key arrive at; "": the first."""
    database: str = ""
    """The database of labels: a path or a postgresql:// URL; empty: labels.db next to the runs folder."""
    allowed_hosts: tuple[str, ...] = ()
    """The host names of a reverse proxy, such as labels.example.org. The studio itself listens on loopback."""
    port: int = 8420
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """The key that opens the studio, new at every start. Anyone with it may do everything that the studio can."""
    session_seconds: float = 7 * DAY
    body_bytes: int = 256 * 1024
    import_bytes: int = 16 * 2**20
    """The largest file of completions to be labelled, which only administrators may send."""
    body_seconds: float = 10.0
    """The time limit for receiving a body. A slower body is refused."""
    header_seconds: float = 5.0
    """The time limit for receiving headers. A slower connection is closed."""
    requests_per_second: float = 100.0
    burst: int = 300
    strangers_per_second: float = 5.0
    """The rate of refused requests. Above it, strangers get 429, even for valid requests."""
    strangers_burst: int = 60
    work_at_once: int = 2
    """The number of concurrent computations. Further ones wait, then get a response to retry later."""
    work_seconds: float = 2.0
    """The time limit of a computation. After it, the computation returns a partial result."""
    cache_bytes: int = 64 * 2**20
    checkpoints: tuple[Path, ...] = ()
    """Models to chat with, in addition to those in the runs folder."""
    model_bytes: int = 8 * 10**9
    """The bytes of weights kept in memory for the chat page. The least recently used models are freed first."""

    @property
    def hosts(self) -> frozenset[str]:
        """The accepted Host headers. Any other name could be DNS rebinding."""
        return self.own_hosts | frozenset(self.allowed_hosts)

    @property
    def own_hosts(self) -> frozenset[str]:
        """The entries of `hosts` that mean this machine."""
        names = {f"{name}:{self.port}" for name in (LOOPBACK, "localhost")}
        return frozenset(names | ({LOOPBACK, "localhost"} if self.port == 80 else set()))

    @property
    def origins(self) -> frozenset[str]:
        """The accepted Origin headers. A proxy may serve HTTPS to the outside."""
        return frozenset({f"http://{name}" for name in self.hosts} | {f"https://{name}" for name in self.allowed_hosts})

    @property
    def labels(self) -> str:
        """The path or URL of the labels."""
        # For pathlib, the parent of "." and of ".." is ".".
        return self.database or os.path.normpath(self.runs / ".." / "labels.db")
