"""Small faults planted in the mathematics one at a time, and whether a test notices.

    python tools/mutants.py                 a seeded sample of 1,000; goes on where it stopped
    python tools/mutants.py --count 50      fewer, of the same sequence
    python tools/mutants.py --only ratio.py those of one file
    python tools/mutants.py --minutes 20    what can be judged in that time, of the same sequence
    python tools/mutants.py --again         judge the survivors once more, after a change of the tests
    python tools/mutants.py --report        judge nothing, and write what was judged

`tools/planting.py` says what is changed. The faults in tests/mutants.yaml, which people planted, are judged first.

A mutant is killed when a test that runs its line fails, and passes at once with nothing changed; or when one takes ten times the
processor time that it takes then, which is counted apart. Each test runs alone, in a fork of a process that has collected them
all, whose functions get the changed code; what runs on import is judged in a fork that imports everything anew. First of all
every test is run in this way with nothing changed, which also says which lines it runs and how long it takes: if one fails,
nothing is judged. Then a fault is planted that no test may miss. A mutant without effect counts as a survivor like any other.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import forks
from forks import Cold, Collected, Functions, Request, Verdict
from planting import ROOT, WORK, Mutant, digest, mutant_of, named, places_of, sample, source_of, subjects

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
TESTS = (
    *(f"tests/{room}" for room in ("objective", "tabular", "language/training", "extras/experiments")),
    *(
        f"tests/control/test_{name}.py"
        for name in (
            "dqn",
            "networks",
            "on_policy",
            "other_libraries",
            "sb3_agreement",
            "spaces",
            "steps",
            "trust_region",
            "vector",
        )
    ),
    "tests/studies/test_groups.py",
    *(f"tests/surface/test_{name}.py" for name in ("docs", "immutable")),
    *(f"tests/language/recipes/test_{name}.py" for name in ("row_limits", "sampling_recipes")),
    "tests/language/data/test_mixing.py",
    *(
        f"tests/language/models/test_{name}.py"
        for name in ("logprob_bounds", "logprobs", "packed_forward", "gradients", "recomputed_gradients", "row_logprobs")
    ),
    *(f"tests/language/rollout/test_{name}.py" for name in ("distribution", "samplers", "episodes")),
)
# Seconds of tests that a mutant is worth, the quickest first: one that only a slower test would notice is a survivor.
PATIENCE = 40.0
# A test that takes longer than this is not used.
LONGEST = 12.0
# So many tests are tried first with what runs on import, and then four times as many: to collect their files takes long.
FIRST = 12
# Tests that fail in a fork with nothing changed, each with the reason.
UNFIT: dict[str, str] = {}
NO_EFFECT = "no effect"
"""How the reason begins of a survivor that no test could notice."""
BEGIN, END = "<!-- mutants -->", "<!-- end of mutants -->"
# Tests of what a file says when it is imported: the constants of the methods.
ABOUT = tuple(
    f"tests/{name}"
    for name in (
        "surface/test_docs.py",
        "surface/test_immutable.py",
        "objective/test_bounds.py",
        "objective/test_catalog.py",
        "objective/test_enumerated",
        "objective/test_presets.py",
    )
)


@dataclass(frozen=True)
class Coverage:
    """What every test runs, and the seconds that it takes."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[int]]]
    """Test -> file -> lines."""
    on_import: dict[str, list[int]]
    """File -> the lines that run before any test."""

    @cached_property
    def tests(self) -> dict[str, dict[int, set[str]]]:
        """File -> line -> tests."""
        found: dict[str, dict[int, set[str]]] = {}
        for test, files in self.lines.items():
            for file, lines in files.items():
                for line in lines:
                    found.setdefault(file, {}).setdefault(line, set()).add(test)
        return found

    def running(self, file: str, lines: Iterable[int]) -> set[str]:
        """The tests that run one of these lines."""
        held = self.tests.get(file, {})
        return set().union(*(held.get(line, ()) for line in lines))

    def cold(self, mutant: Mutant) -> bool:
        """Whether what the mutant changes runs before any test."""
        places = places_of(mutant.file)
        return places.runs_on_import(mutant.line) or not places.statement(mutant.line).isdisjoint(
            self.on_import.get(mutant.file, ())
        )

    def of(self, mutant: Mutant, patience: float = PATIENCE) -> list[str]:
        """The tests worth trying, the quickest first. For a line that runs on import: those that run a line that speaks of the
        same, then all others of its file, and those of what is written about the methods.
        """
        places = places_of(mutant.file)
        held = self.running(mutant.file, places.statement(mutant.line))
        ranks = [held]
        if self.cold(mutant):
            ranks[0] = held | self.running(mutant.file, places.mentions(mutant.line))
            about = {test for test in self.seconds if test.startswith(ABOUT)}
            ranks.append(about | self.running(mutant.file, self.tests.get(mutant.file, ())))
        chosen = dict[str, None]()
        for rank in ranks:
            total = 0.0
            for test in sorted(rank - chosen.keys(), key=lambda test: (self.seconds[test], test)):
                if total and total + self.seconds[test] > patience:
                    break
                total += self.seconds[test]
                chosen[test] = None
        return list(chosen)


class Log:
    """Rows of JSON that several processes add to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, row: Mapping[str, Any]) -> None:
        """One row, whole or not at all."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (json.dumps(row) + "\n").encode())
        os.close(descriptor)

    def rows(self) -> Iterator[dict[str, Any]]:
        """What is there; a row that was cut short is left out."""
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                yield json.loads(line)
            except ValueError:
                continue


MEASURED, VERDICTS = Log(WORK / "measured.jsonl"), Log(WORK / "verdicts.jsonl")


def measured() -> dict[str, dict[str, Any]]:
    """What is known of each test with nothing changed, as long as its file and those that it runs are what they were."""
    return {row["test"]: row for row in MEASURED.rows() if all(digest(file) == was for file, was in row["files"].items())}


def measure(collected: Collected, tests: list[str], traced: tuple[str, ...]) -> None:
    """Run these tests with nothing changed."""
    for test in tests:
        outcome = collected.attempt(test, LONGEST, traced=traced)
        if outcome.kind == "failed":  # a busy machine is given another chance
            outcome = collected.attempt(test, LONGEST, traced=traced)
        files = {file: digest(file) for file in (test.partition("::")[0], *outcome.lines)}
        MEASURED.add({"test": test, **asdict(outcome), "files": files})


def in_processes(work: list[Callable[[], None]]) -> None:
    """Each in a fork of this process; waits for all."""
    children = []
    for one in work:
        pid = os.fork()
        if pid == 0:
            try:
                one()
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        children.append(pid)
    if any(os.waitpid(pid, 0)[1] for pid in children):
        raise SystemExit("A process that judged has ended early; what it had judged is kept.")


class Judge:
    """Says of mutants whether a test notices: in forks of this process, or of `cold` for what runs on import."""

    def __init__(self, collected: Collected, cold: Cold, coverage: Coverage, functions: Functions) -> None:
        self.collected, self.cold, self.coverage, self.functions = collected, cold, coverage, functions
        self.kills, self.sound, self.parent = Counter[str](), dict[str, bool](), os.getpid()

    def judge(self, mutant: Mutant, patience: float = PATIENCE, but: Iterable[str] = ()) -> tuple[Verdict, list[str]]:
        """The verdict and the tests that were tried. What failed must pass at once with nothing changed, or it is none."""
        before, after = mutant.sources()
        swaps = forks.swaps_of(before, after, ROOT / mutant.file, self.functions)
        if swaps == []:
            return Verdict(False, how="the same code"), []
        chosen = [test for test in self.coverage.of(mutant, patience) if test not in set(but)]
        tests = sorted(chosen, key=lambda test: (self.coverage.seconds[test] + 0.05) / (1 + self.kills[test]))
        cold = swaps is None or self.coverage.cold(mutant) or not any(forks.place(old) in self.functions for old, _ in swaps)
        size = FIRST if cold else len(tests)
        while tests:
            part = tests[:size]
            timed = [(test, self.coverage.seconds[test]) for test in part]
            if cold:
                verdict = self.cold.noticed(Request(timed, mutant.file, after))
            else:
                verdict = self.collected.noticed(timed, swaps or [], self.functions)
            if verdict.killed and self._passes(verdict, cold):
                self.kills[verdict.by] += 1
                return verdict, chosen
            if verdict.how == "waits":
                return verdict, chosen
            tests, size = ([t for t in tests if t != verdict.by], size) if verdict.killed else (tests[len(part) :], 4 * size)
        return Verdict(False), chosen

    def _passes(self, verdict: Verdict, cold: bool) -> bool:
        """Whether the test that noticed passes, in the same way, with nothing changed."""
        test = verdict.by
        if test not in self.coverage.seconds:  # the changed source itself could not be imported
            return True
        if not cold:
            return self.collected.attempt(test, forks.LEAST + forks.TIMES * self.coverage.seconds[test]).kind == "passed"
        if test not in self.sound:
            self.sound[test] = not self.cold.noticed(Request([(test, self.coverage.seconds[test])])).killed
        return self.sound[test]

    def run(self, mutants: list[Mutant], known: Mapping[str, dict[str, Any]], end: float, patience: float) -> None:
        """Judge these until the time `end`; survivors only by the tests that are new to them."""
        for mutant in mutants:
            if time.time() > end or os.getppid() != self.parent:
                return
            tried = known.get(mutant.key, {}).get("tried", [])
            verdict, tests = self.judge(mutant, patience, tried)
            row = {"key": mutant.key, **verdict._asdict()}
            VERDICTS.add(row if verdict.killed else {**row, "tried": [*tried, *tests]})
            if not verdict.killed:
                print(f"survived  {mutant.file}:{mutant.line}  {mutant.before}  ->  {mutant.after}", flush=True)


def verdicts() -> dict[str, dict[str, Any]]:
    """The last verdict on each mutant; a kill by a test that is gone is none."""

    def is_there(test: str) -> bool:
        return f"def {test.rpartition('::')[2].partition('[')[0]}(" in source_of(test.partition("::")[0])

    found = {row["key"]: row for row in VERDICTS.rows()}
    return {key: row for key, row in found.items() if not row["killed"] or row["how"] == "import" or is_there(row["by"])}


def room_of(mutant: Mutant) -> str:
    """The part of psigrad that it is planted in."""
    return mutant.file.split("/")[1]


def in_turn(mutants: list[Mutant]) -> list[Mutant]:
    """The rooms in proportion, each in its own order: wherever the judging stops, as large a part of each is judged."""
    people = [mutant for mutant in mutants if mutant.operator == "named"]
    drawn = [mutant for mutant in mutants if mutant.operator != "named"]
    sizes, met = Counter(map(room_of, drawn)), Counter[str]()
    placed = []
    for at, mutant in enumerate(drawn):
        room = room_of(mutant)
        met[room] += 1
        placed.append((met[room] / sizes[room], at, mutant))
    return people + [mutant for *_, mutant in sorted(placed, key=lambda row: row[:2])]


def judge_all(asked: argparse.Namespace, mutants: list[Mutant], cold: list[Cold], tracer: Any, collected: Collected) -> None:
    """All that follows the collection of the tests."""
    on_import = forks.traced_lines(tracer)
    if collected.broken:
        raise SystemExit(f"Could not be collected: {', '.join(collected.broken)}")
    functions = forks.living(str(ROOT / file) for file in {mutant.file for mutant in mutants} | set(subjects()))
    gc.collect()
    gc.freeze()
    traced = tuple({*subjects(), *(mutant.file for mutant in mutants)})
    held = measured()
    missing = [test for test in collected.items if test not in held]
    print(f"{len(collected.items):,} tests, {len(missing):,} to be run with nothing changed", flush=True)
    in_processes([partial(measure, collected, missing[i :: asked.jobs], traced) for i in range(asked.jobs)])
    held = {test: row for test, row in measured().items() if test in collected.items}
    if failing := [test for test, row in held.items() if row["kind"] in ("failed", "died", "waits") and test not in UNFIT]:
        raise SystemExit("Fail with nothing changed, so that nothing can be judged:\n" + "\n".join(failing))
    passing = {test: row for test, row in held.items() if row["kind"] == "passed"}
    coverage = Coverage(
        {test: row["seconds"] for test, row in passing.items()}, {test: row["lines"] for test, row in passing.items()}, on_import
    )
    judges = [Judge(collected, one, coverage, functions) for one in cold]
    check(judges[0])
    known = verdicts()
    if asked.again:
        known = {key: row for key, row in known.items() if row["killed"]}

    def untried(mutant: Mutant) -> bool:
        row = known.get(mutant.key)
        if row is None or row["killed"]:
            return row is None
        return not set(coverage.of(mutant, asked.patience)) <= set(row["tried"])

    open_ones = [mutant for mutant in in_turn(mutants) if untried(mutant)]
    print(f"{len(open_ones):,} of {len(mutants):,} mutants to be judged", flush=True)
    end = time.time() + 60 * asked.minutes
    shares = [(judge, open_ones[i :: asked.jobs]) for i, judge in enumerate(judges)]
    in_processes([partial(judge.run, share, known, end, asked.patience) for judge, share in shares])


def check(judge: Judge) -> None:
    """That a planted fault is noticed in both ways, and nothing where nothing is changed. What raises in the place of the line
    that most tests run cannot be missed.
    """
    coverage, found = judge.coverage, list[tuple[int, str, int]]()
    for file, held in coverage.tests.items():
        lines = held.keys() - set(coverage.on_import.get(file, ()))
        found += [(len(held[line]), file, line) for line in lines if places_of(file).is_plain(line)]
    if not found:
        raise SystemExit("None of these tests runs a line of the mathematics.")
    _, file, line = max(found)
    rows = source_of(file).splitlines(keepends=True)
    row = rows[line - 1]
    rows[line - 1] = f"{row[: len(row) - len(row.lstrip())]}raise SystemError('planted')\n"
    planted = mutant_of(file, "planted", "".join(rows))
    assert planted is not None
    verdict, tests = judge.judge(planted)
    timed = [(test, judge.coverage.seconds[test]) for test in tests[:FIRST]]
    fresh = judge.cold.noticed(Request(timed, file, planted.sources()[1]))
    nothing = judge.cold.noticed(Request(timed, file, source_of(file)))
    print(f"the planted fault: {verdict.by}, {fresh.by}", flush=True)
    if (verdict.how, fresh.how, nothing.killed) != ("failed", "failed", False):
        raise SystemExit(f"The judging is not sound: {file}:{line} {verdict}, {fresh}, {nothing}")


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927)."""
    z, p = 1.959964, successes / max(n, 1)
    centre, scale = p + z * z / (2 * max(n, 1)), 1 + z * z / max(n, 1)
    spread = z * math.sqrt(p * (1 - p) / max(n, 1) + z * z / (4 * max(n, 1) ** 2))
    return (centre - spread) / scale, (centre + spread) / scale


def results(asked: argparse.Namespace, drawn: list[Mutant], people: Mapping[str, Mutant]) -> dict[str, Any]:
    """What is known of the sample and of the faults that people planted. The `reasons` of survivors, written by hand, stay."""
    held = json.loads(RESULTS.read_text())["reasons"] if RESULTS.exists() else {}
    reasons = {mutant.key: held[mutant.key] for mutant in drawn if mutant.key in held}
    known = verdicts()
    judged = [mutant for mutant in drawn if mutant.key in known]
    killed = [mutant for mutant in judged if known[mutant.key]["killed"]]
    idle = [m for m in judged if m not in killed and reasons.get(m.key, "").startswith(NO_EFFECT)]
    rooms = {}
    for room in sorted(set(map(room_of, drawn))):
        own = [mutant for mutant in drawn if room_of(mutant) == room]
        first = list(itertools.takewhile(lambda mutant: mutant.key in known, own))
        rooms[room] = [
            len(own),
            *(sum(m in some for m in own) for some in (judged, killed, idle)),
            *(sum(m in some for m in first) for some in (first, killed)),
        ]
    tests = Counter(row["kind"] for row in measured().values())
    lost = sorted((m for m in judged if not known[m.key]["killed"]), key=lambda mutant: (mutant.file, mutant.line))
    return {
        "seed": asked.seed,
        "drawn": len(drawn),
        "judged": len(judged),
        "killed": len(killed),
        "how": dict(Counter(known[mutant.key]["how"] for mutant in killed)),
        "rooms": rooms,
        "tests": dict(tests),
        "named": {about: known[m.key]["by"] for about, m in people.items() if m.key in known},
        "survivors": [{"file": m.file, "line": m.line, "before": m.before, "after": m.after, "key": m.key} for m in lost],
        "reasons": reasons,
    }


def page(found: Mapping[str, Any]) -> str:
    """The results as Markdown."""

    def row(name: str, drawn: int, judged: int, killed: int, idle: int, first: int, of_first: int) -> str:
        low, high = wilson(of_first, first)
        share = f"{of_first:,} of {first:,}: {of_first / first:.1%} ({low:.1%} to {high:.1%})" if first else ""
        return f"| {name} | {drawn:,} | {judged:,} | {killed:,} | {idle:,} | {judged - killed - idle:,} | {share} |"

    lines = [
        "| room | drawn | judged | noticed | without effect | neither | noticed of the first in the sample's order (95 %) |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [row(room, *counts) for room, counts in found["rooms"].items()]
    whole = found["judged"] == found["drawn"]
    sums = [sum(counts) for counts in zip(*found["rooms"].values(), strict=True)]
    lines += [row("**all**", *sums[:4], *(sums[4:] if whole else (0, 0))), ""]
    if not whole:
        lines += [
            "Not all is judged yet. Of each room those before the first that is not are a random part of it.",
            "",
        ]
    words = {"failed": "a test failed", "time": "ten times its processor time"}
    words |= {"died": "its process died", "import": "on import"}
    lines += ["Noticed by: " + ", ".join(f"{words[how]} {count}" for how, count in sorted(found["how"].items())) + ".", ""]
    lines += ["| not noticed | change | why |", "|---|---|---|"]
    for lost in found["survivors"]:
        before, after = (lost[end].replace("|", "\\|").replace("`", "'") for end in ("before", "after"))
        why = found["reasons"].get(lost["key"], "")
        lines.append(f"| `{lost['file'].removeprefix('psigrad/')}:{lost['line']}` | `{before}` → `{after}` | {why} |")
    lines += ["", "| planted by hand in reviews | noticed by |", "|---|---|"]
    lines += [f"| {about} | {f'`{by}`' if by else '**nothing**'} |" for about, by in found["named"].items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Judge, print, and keep what was found. The exit status is 1 below 98 %, and where one of tests/mutants.yaml survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a file's name")
    parser.add_argument("--tests", nargs="*", help="files or folders of tests, in the place of all; a later run tries the others")
    parser.add_argument("--named", action="store_true", help="those of tests/mutants.yaml alone")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes that judge")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; what is judged is a sample of all")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds of tests for a mutant")
    parser.add_argument("--page", type=Path, help="write the tables into this page, between its markers")
    asked = parser.parse_args(arguments)
    os.chdir(ROOT)
    os.environ.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    sys.path.insert(0, str(ROOT))
    WORK.mkdir(parents=True, exist_ok=True)
    people = named()
    drawn = sample(asked.seed, asked.count)
    asked_for = people.values() if asked.named else [*people.values(), *drawn]
    mutants = [mutant for mutant in asked_for if asked.only in mutant.file]
    if not asked.report:
        forks.warm()
        cold = [Cold() for _ in range(asked.jobs)]
        tracer = forks.trace({mutant.file for mutant in mutants} | set(subjects()))
        forks.collect(asked.tests or TESTS, partial(judge_all, asked, mutants, cold, tracer))
    found = results(asked, drawn, people)
    print(page(found))
    if not (asked.only or asked.named):
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if asked.page:
        text = asked.page.read_text()
        before, _, rest = text.partition(BEGIN)
        asked.page.write_text(f"{before}{BEGIN}\n{page(found)}\n{END}{rest.partition(END)[2]}")
    return int(found["killed"] < 0.98 * found["judged"] or not all(found["named"].values()))


if __name__ == "__main__":
    sys.exit(main())
