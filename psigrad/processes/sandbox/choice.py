"""Which sandbox the machine offers, which executor a run gets, and under what a user's own process runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

from psigrad.processes.sandbox import cgroup, seccomp
from psigrad.processes.sandbox.bubblewrap import Bubblewrap, command
from psigrad.processes.sandbox.executor import Executor, SandboxError, Tier, TierName
from psigrad.processes.sandbox.remote import RemoteExecutor
from psigrad.processes.sandbox.unsafe import Unsafe

INSTALL = "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap util-linux; Fedora: dnf install bubblewrap)"


@cache
def tier_of_this_machine() -> Tier:
    """Tried, not guessed: a program is run in it."""
    missing = [name for name in ("bwrap", "prlimit", *(("setpriv",) if os.geteuid() == 0 else ())) if shutil.which(name) is None]
    if missing:
        return Tier("none", why_not=f"{', '.join(missing)} not found; {INSTALL}.")
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


def enclosing_command() -> list[str]:
    """The command to run a user's own process under: it reads what it reads outside, and writes and reaches nothing. There are no
    network, no capabilities, a read-only disk, /dev/shm for temporary files, and a process namespace that ends with it.

    Raises `SandboxError` where this machine has no bubblewrap that works.
    """
    tier = tier_of_this_machine()
    if tier.name == "none":
        raise SandboxError(f"environment_sandbox is set and this machine has no sandbox: {tier.why_not}")
    spaces = ["--unshare-user", "--disable-userns"] if tier.name == "user" else []
    spaces += [f"--unshare-{space}" for space in ("ipc", "pid", "net", "uts", "cgroup-try")]
    return [
        *("bwrap", *spaces, "--die-with-parent", "--cap-drop", "ALL"),
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
        *("--setenv", "TMPDIR", "/dev/shm", "--setenv", "HOME", "/dev/shm", "--"),
    ]
