"""Where tests put databases: in memory where the system has a folder there. On a disk each would wait for it hundreds of times.

What a killed process wrote is there afterwards in either place, so tests that kill processes lose nothing by it.
"""

from __future__ import annotations

import os

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""The `dir` for `tempfile`; None: its default."""
