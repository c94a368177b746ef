"""What a sandbox can guarantee on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TierName = Literal["root", "user", "none"]
INSTALL = "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap util-linux; Fedora: dnf install bubblewrap)"


@dataclass(frozen=True)
class Tier:
    """Which kind of sandbox there is, and what it holds.

    root: namespaces made by root, and a user id of its own for each program. user: an unprivileged user namespace. none: no
    sandbox; code rewards are refused unless unsafe code is allowed.
    """

    name: TierName
    cgroups: tuple[str, ...] = ()
    """Controllers that limit a program's whole tree: pids, memory."""
    seccomp: bool = False
    why_not: str = ""
    """Where the tier is none: what is missing and what to do."""

    def sentence(self) -> str:
        """One line for people."""
        if self.name == "none":
            return "none, so code rewards are refused"
        parts = ["own user id per program" if self.name == "root" else "user namespace", "no network", "own processes and files"]
        parts.append("cgroups: " + ", ".join(self.cgroups) if self.cgroups else "no cgroups (limits hold per process)")
        parts.append("seccomp" if self.seccomp else "no seccomp on this processor")
        return f"{self.name}: {'; '.join(parts)}"
