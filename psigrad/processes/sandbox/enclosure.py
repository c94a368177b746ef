"""A user's own process in bubblewrap: it reads what it reads outside, and writes and reaches nothing."""

from __future__ import annotations

from psigrad.processes.sandbox.choice import tier_of_this_machine
from psigrad.processes.sandbox.executor import SandboxError


def enclosed() -> list[str]:
    """The command that a process is run under: no network, no capabilities, a read-only disk, /dev/shm for temporary files, and
    a process namespace that ends with it.

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
