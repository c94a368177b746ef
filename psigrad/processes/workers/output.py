"""What workers print: passed on to stderr up to a limit, and then read and dropped, so that nobody waits for a full pipe."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

# Bytes of one worker's output that are shown.
SHOWN = 1 << 18


def pass_on(descriptor: int, name: str) -> None:
    """Read a pipe in a thread of its own until its other end is closed."""
    threading.Thread(target=_pass_on, args=(descriptor, name), name=f"output of {name}", daemon=True).start()


def _pass_on(descriptor: int, name: str) -> None:
    left = SHOWN
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        while data := stream.read(1 << 16):
            if left <= 0:
                continue
            with contextlib.suppress(OSError, ValueError):
                os.write(2, data[:left])
                left -= len(data)
                if left <= 0:
                    print(
                        f"\npsigrad: {name} prints more than {SHOWN >> 10} KiB; the rest is dropped", file=sys.stderr, flush=True
                    )
