"""What happens when things go wrong: the faults that psigrad is tried with, one row each, and what came of it.

    python tools/faults.py                    run all rows and print the table
    python tools/faults.py 6 12               these rows alone
    python tools/faults.py --long             with the tests that take longer
    python tools/faults.py --reports A B      run nothing: count what --junitxml wrote of tests that ran apart
    python tools/faults.py --page FILE        write the table into a page, between its markers

Each row is a set of tests; a row holds if all of them pass. `count` is how many faults they inject: kills, damaged files, hostile
inputs. The exit status is 1 if a row fell short.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
# pytest in the environment of `make test-cluster`, on a network of its own
CLUSTER = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec .venv-cluster/bin/python -m pytest "$@"', "pytest"]
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"


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


@dataclass
class Outcome:
    """What came of a row's tests."""

    tests: int = 0
    faults: int = 0
    failed: int = 0
    seconds: float = 0.0


def outcomes(rows: tuple[Row, ...], long: bool) -> dict[int, Outcome]:
    """Run the tests of all rows once, and count for each row."""
    alone = [tuple(r for r in rows if r.cluster == cluster) for cluster in (False, True)]
    if all(alone):
        return outcomes(alone[0], long) | outcomes(alone[1], long)
    files = sorted({file for r in rows for file, _ in r.tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        limit = "3600" if long else "300"  # of one test, in seconds, as `make test-long` and `make test` have it
        start = [sys.executable, "-m", "pytest", "-q", "--workers", "2", "--timeout", limit]
        command = [*CLUSTER, "-q", "-m", "cluster", "--timeout", "900"] if alone[1] else start
        command += ["-o", "faulthandler_timeout=3700"]  # a hang that no signal ends: after the longest of these limits
        command += [f"--junitxml={report}", *files]
        # a file's tests are all run where one row wants all of them; else those that a row names
        names = sorted({part for r in rows for file, part in r.tests})
        command += [] if "" in names else ["-k", " or ".join(names)]
        command += ["-m", "long or not long"] if long and not alone[1] else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT)} if alone[1] else None
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        return counted(rows, [report])


def counted(rows: tuple[Row, ...], reports: list[Path]) -> dict[int, Outcome]:
    """What came of each row's tests, by what pytest reported; of a test that ran more than once the last time."""
    cases = {(c.get("classname", ""), c.get("name")): c for report in reports for c in ET.parse(report).iter("testcase")}
    found = {r.number: Outcome() for r in rows}
    for (place, _), case in cases.items():
        file = place.replace(".", "/") + ".py"
        failed = case.find("failure") is not None or case.find("error") is not None
        if case.find("skipped") is not None:
            continue
        count = next((int(p.get("value", "1")) for p in case.iter("property") if p.get("name") == "count"), 1)
        for r in rows:
            if any(file == wanted and part in case.get("name", "") for wanted, part in r.tests):
                outcome = found[r.number]
                outcome.tests, outcome.failed = outcome.tests + 1, outcome.failed + failed
                outcome.faults += count
                outcome.seconds += float(case.get("time", 0))
    return found


def table(rows: tuple[Row, ...], found: dict[int, Outcome]) -> str:
    """The rows as Markdown."""
    lines = ["| | fault | what must be so | tests | faults | lost |", "|---|---|---|---|---|---|"]
    for r in rows:
        outcome = found[r.number]
        verdict = "0" if outcome.tests and not outcome.failed else f"**fell short** ({outcome.failed} of {outcome.tests})"
        lines.append(f"| {r.number} | {r.fault} | {r.holds} | {outcome.tests} | {outcome.faults:,} | {verdict} |")
    total = [sum(getattr(found[r.number], name) for r in rows) for name in ("tests", "faults", "failed")]
    lines.append(f"| | **all** | | {total[0]:,} | {total[1]:,} | {total[2]} |")
    return "\n".join(lines)


def main() -> int:
    """Run, print, and write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--reports", type=Path, nargs="+", help="count what these say, and run nothing")
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    rows = tuple(r for r in ROWS if not given.rows or r.number in given.rows)
    found = counted(rows, given.reports) if given.reports else outcomes(rows, given.long)
    made = table(rows, found)
    print(made)
    if given.page:
        text = given.page.read_text()
        before, _, rest = text.partition(BEGIN)
        given.page.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")
    return int(any(o.failed or not o.tests for o in found.values()))


if __name__ == "__main__":
    sys.exit(main())
