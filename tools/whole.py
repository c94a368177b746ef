"""Runs targets of make one after the other and says at the end how long each took: `make test`.

python tools/whole.py lint types docs suite
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

NAMES = {"suite": "tests"}
MEANT = 600
"""Seconds that `make test` is at most meant to take on two cores with nothing else to do."""


def shown(seconds: float) -> str:
    """As 48 s, or 9 min 5 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main(targets: list[str]) -> int:
    """Stop at the first that fails, and return its status."""
    took: dict[str, float] = {}
    for target in targets:
        start = time.monotonic()
        status = subprocess.run([os.environ.get("MAKE", "make"), "--no-print-directory", target], check=False).returncode
        took[target] = time.monotonic() - start
        if status:
            break
    parts = ", ".join(f"{NAMES.get(target, target)} {shown(seconds)}" for target, seconds in took.items())
    print(f"make test {'failed' if status else 'passed'} in {shown(sum(took.values()))}: {parts}")
    if sum(took.values()) > MEANT:
        print(f"It is meant to take at most {shown(MEANT)} on two cores with nothing else to do.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
