"""A connection to the policy's server for agents in a sandbox without a network, through a Unix socket in the file system."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

Reach = Callable[[], socket.socket]
LONGEST = 75
"""The maximal bytes of the temporary folder's path.

A socket's path may have about 104 bytes, and 24 are added to the folder's.
"""


def lead(listening: socket.socket, reach: Reach) -> None:
    """Forward each connection to `listening` to a new socket from `reach()`, in threads, until `listening` is closed."""
    threading.Thread(target=_accept, args=(listening, reach), name="tunnel", daemon=True).start()


@contextlib.contextmanager
def opened(reach: Reach) -> Iterator[str]:
    """Open a Unix socket whose connections are forwarded to `reach()`, and yield its path, which is hard to guess."""
    place = None if len(os.fsencode(tempfile.gettempdir())) < LONGEST else "/tmp"
    with tempfile.TemporaryDirectory(prefix="psigrad-", dir=place) as folder, socket.socket(socket.AF_UNIX) as listening:
        path = os.path.join(folder, "policy")
        listening.bind(path)
        os.chmod(path, 0o666)  # a process in a sandbox has another user id
        os.chmod(folder, 0o711)
        listening.listen(64)
        lead(listening, reach)
        try:
            yield path
        finally:  # closing alone does not wake `accept`
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)


def through(path: str) -> int:
    """Return a local port of this machine or sandbox whose connections are forwarded to the Unix socket at `path`."""

    def reach() -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.connect(path)
        return made

    listening = socket.create_server(("127.0.0.1", 0))
    lead(listening, reach)
    return int(listening.getsockname()[1])


def _accept(listening: socket.socket, reach: Reach) -> None:
    while True:
        try:
            come, _ = listening.accept()
        except OSError:
            if listening.fileno() < 0:
                return
            time.sleep(0.05)  # too many open files, or the socket is about to close
            continue
        try:
            there = reach()
        except OSError:  # nothing listens there
            come.close()
            continue
        for ends in ((come, there), (there, come)):
            threading.Thread(target=_pass_on, args=ends, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)
