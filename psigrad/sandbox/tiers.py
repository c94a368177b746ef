"""What a sandbox can guarantee on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from typing import Literal

from psigrad.sandbox import cgroup, seccomp

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
            return f"no sandbox for code: {self.why_not}"
        parts = ["own user id per program" if self.name == "root" else "user namespace", "no network", "own processes and files"]
        parts.append("cgroups: " + ", ".join(self.cgroups) if self.cgroups else "no cgroups (limits hold per process)")
        parts.append("seccomp" if self.seccomp else "no seccomp on this processor")
        return f"sandbox for code ({self.name}): {'; '.join(parts)}"


@cache
def tier_of_this_machine() -> Tier:
    """Tried, not guessed: a program is run in it."""
    missing = [name for name in ("bwrap", "prlimit", *(("setpriv",) if os.geteuid() == 0 else ())) if shutil.which(name) is None]
    if missing:
        return Tier("none", why_not=f"{', '.join(missing)} not found; {INSTALL}.")
    from psigrad.sandbox.bubblewrap import command  # it asks which tier it is for

    name: TierName = "root" if os.geteuid() == 0 else "user"
    tried = subprocess.run([*command(name), "/bin/true"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1] if tried.stderr.strip() else f"exit status {tried.returncode}"
        return Tier(
            "none",
            why_not=f"bwrap cannot start here ({reason}); allow unprivileged user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0), or in a container run it with "
            "--security-opt seccomp=unconfined --cap-add SYS_ADMIN.",
        )
    return Tier(name, tuple(cgroup.homes()), seccomp.program() is not None)
