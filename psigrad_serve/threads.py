"""Waiting for threads to end."""

from __future__ import annotations

import sys
import threading
import traceback

PATIENCE = 60
"""The seconds that a thread has to end."""


def await_end(thread: threading.Thread) -> None:
    """Wait for a thread to end. Raises `RuntimeError` with its stack after `PATIENCE` seconds, so no run waits forever."""
    thread.join(PATIENCE)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        at = "".join(traceback.format_stack(frame)) if frame else "It cannot be seen.\n"
        raise RuntimeError(f"The thread {thread.name!r} did not end within {PATIENCE} s. It is at\n{at}")
