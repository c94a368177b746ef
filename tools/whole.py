"""Runs targets of make and says at the end how long each took: `make test`. Those joined by + run at once.

python tools/whole.py lint suite+types+docs
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

NAMES = {"suite": "tests"}
MEANT = 600
"""Seconds that `make test` is at most meant to take on two cores with nothing else to do."""


def shown(seconds: float) -> str:
    """As 48 s, or 9 min 5 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def run(target: str, aside: bool) -> tuple[int, float, str]:
    """Its status, seconds, and, where it runs aside, what it printed."""
    start = time.monotonic()
    command = [os.environ.get("MAKE", "make"), "--no-print-directory", target]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if aside else {}
    done = subprocess.run(command, check=False, text=True, **pipe)
    return done.returncode, time.monotonic() - start, done.stdout or ""


def main(steps: list[str]) -> int:
    """Stop after the first step that fails, and return a status that is not 0."""
    took, failed, start = {}, {}, time.monotonic()
    for step in steps:
        targets = step.split("+")
        with ThreadPoolExecutor(len(targets)) as pool:
            done = list(pool.map(run, targets, [number > 0 for number in range(len(targets))]))
        for target, (status, seconds, said) in zip(targets, done, strict=True):
            print(said, end="")
            took[target] = seconds
            failed |= {target: status} if status else {}
        if failed:
            break
    whole = time.monotonic() - start
    parts = ", ".join(
        f"{NAMES.get(target, target)} {shown(seconds)}{' FAILED' if target in failed else ''}" for target, seconds in took.items()
    )
    print(f"make test {'failed' if failed else 'passed'} in {shown(whole)}: {parts}")
    if whole > MEANT:
        print(f"It is meant to take at most {shown(MEANT)} on two cores with nothing else to do.")
    return max(failed.values(), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
