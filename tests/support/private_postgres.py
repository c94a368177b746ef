"""A PostgreSQL server of one's own in a temporary folder, spoken to over a socket in it."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import machine
from scratch import MEMORY


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The start of a URL for databases of a running server: add a name. It is gone with its data afterwards."""
    initdb, postgres = machine.postgres("initdb"), machine.postgres("postgres")
    folder = Path(tempfile.mkdtemp(prefix="psigrad-pg-", dir=MEMORY or "/tmp"))  # a socket's path is at most 107 characters long
    user = None if os.getuid() else _unprivileged(folder)
    common = {"user": user, "cwd": folder, "stdout": subprocess.DEVNULL, "env": {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}}
    data = folder / "data"
    process = None
    try:
        subprocess.run([initdb, "-D", data, "-U", "psigrad", "-A", "trust", "-N"], check=True, **common)
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=200", "-k", folder]
        log = (folder / "log").open("w")
        # in a session of its own: Ctrl-C would stop it before the tests that are still asking it
        process = subprocess.Popen([postgres, "-D", data, *options], stderr=log, start_new_session=True, **common)
        ready = [machine.postgres("pg_isready") or "pg_isready", "-h", folder, "-U", "psigrad", "-t", "30"]
        for _ in range(300):
            if process.poll() is not None:
                raise RuntimeError((folder / "log").read_text())
            if subprocess.run(ready, capture_output=True).returncode == 0:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        yield f"postgresql://psigrad@/?host={folder}&dbname="
    finally:
        if process is not None:
            process.terminate()
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged(folder: Path) -> int:
    """The server refuses to run as root."""
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            uid = pwd.getpwnam(name).pw_uid
            os.chown(folder, uid, -1)
            return uid
    raise RuntimeError("PostgreSQL does not run as root, and there is no user postgres or nobody")
