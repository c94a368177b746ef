"""Run the tests of the faults that psigrad is tried with: kills, damaged files, hostile inputs (tests/faults.yaml).

python tools/faults.py                    all rows of the table in docs/reliability.md
python tools/faults.py 6 12               these rows alone
python tools/faults.py --long             with the tests that take longer
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
# pytest in the environment of `make test-cluster`, on a network of its own
CLUSTER = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec .venv-cluster/bin/python -m pytest "$@"', "pytest"]


@dataclass(frozen=True)
class Row:
    """One kind of fault: what is done, what must be so afterwards, and the tests that see to it (file, part of the name)."""

    number: int
    fault: str
    holds: str
    tests: tuple[tuple[str, str], ...]
    cluster: bool = False
    """Whether the tests need Ray, and so the environment of `make test-cluster`."""


def rows_of(file: Path) -> tuple[Row, ...]:
    """The rows in tests/faults.yaml."""

    def selector(text: str) -> tuple[str, str]:
        name, _, part = text.partition("::")
        return name, part

    made = yaml.safe_load(file.read_text())
    return tuple(
        Row(r["number"], r["fault"], r["holds"], tuple(map(selector, r["tests"])), r.get("cluster", False)) for r in made
    )


ROWS = rows_of(ROOT / "tests" / "faults.yaml")


def run(rows: tuple[Row, ...], long: bool) -> int:
    """Run the tests of these rows once, and return pytest's exit status. Those on a cluster run apart."""
    alone = [tuple(r for r in rows if r.cluster == cluster) for cluster in (False, True)]
    if all(alone):
        return max(run(part, long) for part in alone)
    limit = "3600" if long else "300"  # of one test, in seconds, as `make test-long` and `make test` have it
    start = [sys.executable, "-m", "pytest", "-q", "--workers", "2", "--timeout", limit]
    command = [*CLUSTER, "-q", "-m", "cluster", "--timeout", "900"] if alone[1] else start
    command += ["-o", "faulthandler_timeout=3700"]  # a hang that no signal ends: after the longest of these limits
    command += sorted({file for r in rows for file, _ in r.tests})
    # a file's tests are all run if one row names all of them
    names = sorted({part for r in rows for _, part in r.tests})
    command += [] if "" in names else ["-k", " or ".join(names)]
    command += ["-m", "long or not long"] if long and not alone[1] else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} if alone[1] else None
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """Run the tests of the given rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int)
    parser.add_argument("--long", action="store_true")
    given = parser.parse_args()
    return run(tuple(r for r in ROWS if not given.rows or r.number in given.rows), given.long)


if __name__ == "__main__":
    sys.exit(main())
