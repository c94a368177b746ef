"""Which sandbox the machine offers, which executor a run gets, and under what a user's own process runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

from psigrad.processes.sandbox import cgroup, seccomp
from psigrad.processes.sandbox.bubblewrap import Bubblewrap
from psigrad.processes.sandbox.enclosure import Enclosure, command, user_of, users_here
from psigrad.processes.sandbox.executor import Executor, SandboxError, Tier, TierName
from psigrad.processes.sandbox.remote import RemoteExecutor
from psigrad.processes.sandbox.unsafe import Unsafe

INSTALL = "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap util-linux; Fedora: dnf install bubblewrap)"


@cache
def tier_of_this_machine() -> Tier:
    """Tried, not guessed: a program is run in it. Root without user ids to give away is a user, as in a rootless container."""
    root = os.geteuid() == 0 and users_here()[1] > 0
    missing = [name for name in ("bwrap", "prlimit", *(("setpriv",) if root else ())) if shutil.which(name) is None]
    if missing:
        return Tier("none", why_not=f"{', '.join(missing)} not found; {INSTALL}.")
    reason = ""
    names: tuple[TierName, ...] = ("root", "user") if root else ("user",)
    for name in names:
        line = command(name, user_of(os.getpid(), 0))
        tried = subprocess.run([*line, "/bin/true"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
        if tried.returncode == 0:
            return Tier(name, tuple(cgroup.homes()), seccomp.program() is not None)
        reason = reason or (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
    return Tier(
        "none",
        why_not=f"bwrap cannot start here ({reason}); allow unprivileged user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0), or in a container run it with "
        "--security-opt seccomp=unconfined --cap-add SYS_ADMIN.",
    )


def executor_for(url: str = "", *, token: str = "", allow_unsafe_code: bool = False) -> Executor:
    """The service at `url`, else this machine's sandbox, else, only if it is allowed, none at all.

    Raises `SandboxError` where there is no sandbox and `allow_unsafe_code` is off.
    """
    if url:
        return RemoteExecutor(url, token)
    tier = tier_of_this_machine()
    if tier.name != "none":
        return Bubblewrap(tier)
    if allow_unsafe_code:
        return Unsafe()
    raise SandboxError(
        f"There is no sandbox for code on this machine: {tier.why_not} Or set allow_unsafe_code, and the programs that the model "
        "writes run with your rights."
    )


def enclosure_of_workers(files: Sequence[str] = (), *, sockets: bool = False) -> Enclosure:
    """What to run a user's own process in: it reads Python, what it imports from, its working folder and `files`, and writes to
    a temporary folder of its own. With `sockets` it may talk to itself, and to what a socket among `files` leads to.

    Raises `SandboxError` where this machine has no bubblewrap that works.
    """
    tier = tier_of_this_machine()
    if tier.name == "none":
        raise SandboxError(f"environment_sandbox is set and this machine has no sandbox: {tier.why_not}")
    return Enclosure.of_worker(tier.name, files, sockets=sockets)
