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
    """The settings of a studio: folders, database and address, and limits on requests."""

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
    """The key that opens the studio, new at every start. Anyone with the key has full access."""
    session_seconds: float = 7 * DAY
    body_bytes: int = 256 * 1024
    import_bytes: int = 16 * 2**20
    """The maximum number of bytes of a file of completions to be labelled, which only administrators may send."""
    body_seconds: float = 10.0
    """The time limit for receiving a body. A slower body is refused."""
    header_seconds: float = 5.0
    """The time limit for receiving headers. A slower connection is closed."""
    requests_per_second: float = 100.0
    burst: int = 300
    strangers_per_second: float = 5.0
    """The rate limit of refused requests. Above it, strangers get status 429, even for valid requests."""
    strangers_burst: int = 60
    work_at_once: int = 2
    """The maximum number of concurrent computations.

    Further requests wait, and after a time-out they get an error that asks to retry later.
    """
    work_seconds: float = 2.0
    """The time limit of a computation, after which it returns a partial result."""
    cache_bytes: int = 64 * 2**20
    checkpoints: tuple[Path, ...] = ()
    """Models to chat with, in addition to those in the runs folder."""
    model_bytes: int = 8 * 10**9
    """The maximum number of bytes of weights in memory for the chat page. The least recently used models are freed first."""

    @property
    def hosts(self) -> frozenset[str]:
        """The accepted Host headers. Others are refused, to prevent DNS rebinding."""
        return self.own_hosts | frozenset(self.allowed_hosts)

    @property
    def own_hosts(self) -> frozenset[str]:
        """The entries of `hosts` that name this machine."""
        names = {f"{name}:{self.port}" for name in (LOOPBACK, "localhost")}
        return frozenset(names | ({LOOPBACK, "localhost"} if self.port == 80 else set()))

    @property
    def origins(self) -> frozenset[str]:
        """The accepted Origin headers. A proxy may serve HTTPS to the outside."""
        return frozenset({f"http://{name}" for name in self.hosts} | {f"https://{name}" for name in self.allowed_hosts})

    @property
    def labels(self) -> str:
        """The path or URL of the database of labels."""
        # This is not `runs.parent`, since for pathlib the parent of "." and of ".." is ".".
        return self.database or os.path.normpath(self.runs / ".." / "labels.db")
