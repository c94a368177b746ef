"""When a worker must end: where it shares more memory than it may have."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

# Seconds between two looks.
_OFTEN = 0.1
_STATUS = Path("/proc/self/status")


def limit_shared_memory(most: int) -> None:
    """Kill this process once it holds more than `most` bytes with what it shares: RLIMIT_DATA counts private mappings alone."""
    if _STATUS.exists():
        threading.Thread(target=_watch, args=(most,), name="shared memory", daemon=True).start()


def _watch(most: int) -> None:
    while True:
        held = 1024 * sum(map(int, re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+)", _STATUS.read_text(), re.MULTILINE)))
        if held > most:
            os.write(2, f"psigrad: a worker holds {held / 1e9:.1f} GB, more than worker_memory_gb, and is killed\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_OFTEN)
