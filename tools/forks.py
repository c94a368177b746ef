"""Each test alone, in a fork of a process that has collected it: how `tools/mutants.py` judges.

`collect` is pytest's own collection with a function in the place of its loop. In there `attempt` runs one of the tests that were
found, with the code of some functions exchanged (`swaps_of`) or nothing changed. `Cold` does the same after importing everything
anew, one file's source changed, for what runs on import.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.machinery
import inspect
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
OPTIONS = ("-q", "--disable-warnings", "--capture=sys", "--timeout=0", "-p", "no:faulthandler", "-p", "no:cacheprovider")
# What a test may take is processor time, since a busy machine is no verdict: so many times its own, and LEAST seconds more.
TIMES, LEAST = 10, 10
# What waits and computes nothing is given up after so many times that on the clock, and is no verdict either.
CLOCK = 10
IMPORT = 120  # seconds of processor time for imports and collection, which take some five


@dataclass(frozen=True)
class Outcome:
    """How one test ended."""

    kind: str
    """`passed`, `skipped`, `failed`, `time` (its processor time ended), `waits` (its time on the clock did) or `died`."""
    seconds: float
    """Processor time."""
    lines: dict[str, list[int]] = field(default_factory=dict)
    """The lines that ran, of the files that were asked for."""


class Verdict(NamedTuple):
    """Whether a mutant was noticed, by which test, and how: the kind of its outcome, or `import`."""

    killed: bool
    by: str = ""
    how: str = ""


Pairs = Sequence[tuple[CodeType, CodeType]]
Swaps = list[tuple[CodeType, CodeType]]
Functions = Mapping[tuple[str, str, int], list[FunctionType]]
NONE: Functions = {}


def swaps_of(before: str, after: str, file: Path, functions: Functions = NONE) -> Swaps | None:
    """The functions whose code differs, each before and after; None where that cannot be exchanged: what runs on import differs
    too, or a living function's place in another.
    """
    try:
        old, new = (compile(source, str(file), "exec", dont_inherit=True) for source in (before, after))
    except SyntaxError:
        return None
    found: Swaps = []
    return found if _compare(old, new, found, functions) else None


def _compare(old: CodeType, new: CodeType, found: Swaps, functions: Functions) -> bool:
    """Collect the functions of a module or class that differ; whether nothing else does."""
    if (old.co_code, old.co_names, len(old.co_consts)) != (new.co_code, new.co_names, len(new.co_consts)):
        return False
    for a, b in zip(old.co_consts, new.co_consts, strict=True):
        if not isinstance(a, CodeType) or not isinstance(b, CodeType):
            if (type(a), repr(a)) != (type(b), repr(b)):
                return False
        elif a.co_flags & inspect.CO_OPTIMIZED:
            if not _pair(a, b, found, functions):
                return False
        elif not _compare(a, b, found, functions):
            return False
    return True


def _pair(old: CodeType, new: CodeType, found: Swaps, functions: Functions) -> bool:
    """A function and those within it. Those are made anew when it is called, unless a decorator has made them already."""
    if old == new:
        return True
    if old.co_freevars != new.co_freevars:
        return place(old) not in functions and ".<locals>." in old.co_qualname
    found.append((old, new))
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    if [c.co_qualname for c in inner[0]] != [c.co_qualname for c in inner[1]]:
        within = f"{old.co_qualname}.<locals>."
        return not any(file == old.co_filename and name.startswith(within) for file, name, _ in functions)
    return all(_pair(a, b, found, functions) for a, b in zip(*inner, strict=True))


def place(code: CodeType) -> tuple[str, str, int]:
    """What tells a function from all others."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def living(files: Iterable[str]) -> Functions:
    """Every function of these files that there is. To be asked before `gc.freeze`, which hides them."""
    wanted = set(files)
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename in wanted:
            found.setdefault(place(thing.__code__), []).append(thing)
    return found


def swap(swaps: Pairs, functions: Functions) -> None:
    """Give the functions their changed code."""
    for old, new in swaps:
        for function in functions.get(place(old), ()):
            function.__code__ = new


class Collected:
    """A plugin of pytest's: the tests that it found, handed to a function in the place of pytest's loop."""

    def __init__(self, then: Callable[[Collected], None]) -> None:
        self.then = then
        self.items: dict[str, Any] = {}
        self.broken: list[str] = []
        self.reports: list[Any] = []
        self.error: BaseException | None = SystemExit("pytest stopped before it had collected the tests.")

    def pytest_collection(self) -> None:
        """Before any test of hypothesis's is made: the same examples each time, none kept for the next, and none made smaller."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("judged", settings(), derandomize=True, database=None, phases=phases)
        settings.load_profile("judged")

    def pytest_collectreport(self, report: Any) -> None:
        """What could not be collected."""
        if report.failed:
            self.broken.append(report.nodeid)

    def pytest_runtestloop(self, session: Any) -> bool:
        """Instead of pytest's own."""
        self.items = {item.nodeid: item for item in session.items}
        self.error = None
        try:
            self.then(self)
        except BaseException as error:  # which pytest would swallow
            self.error = error
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A phase of a test, in a fork."""
        self.reports.append(report)

    def attempt(
        self, name: str, allowed: float, swaps: Pairs = (), functions: Functions = NONE, traced: tuple[str, ...] = ()
    ) -> Outcome:
        """One test in a fork of its own, for so many seconds of processor time. What it leaves behind is removed."""
        folder = tempfile.mkdtemp(prefix="m")
        pid = os.fork()
        if pid == 0:
            self._run(name, folder, allowed, swaps, functions, traced)
        try:
            code, seconds = ended(pid, CLOCK * allowed + 60)
            if code == 0:
                told = json.loads(Path(folder, "outcome.json").read_text())
                return Outcome(told["kind"], seconds, told["lines"])
            return Outcome({-signal.SIGXCPU: "time", -signal.SIGKILL: "waits"}.get(code, "died"), seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, name: str, folder: str, allowed: float, swaps: Pairs, functions: Functions, traced: tuple[str, ...]) -> None:
        code = 1
        try:
            os.setpgid(0, 0)  # not a session of its own, which would lose the priority
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(allowed), math.ceil(allowed) + 5))
            silence()
            os.environ.update(TMPDIR=folder, PYTEST_DEBUG_TEMPROOT=folder)
            tempfile.tempdir = folder
            swap(swaps, functions)
            tracer = trace(traced) if traced else None
            item, self.reports = self.items[name], []
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            outcomes = {report.outcome for report in self.reports}
            kind = next((kind for kind in ("failed", "skipped") if kind in outcomes), "passed")
            lines = traced_lines(tracer) if tracer else {}
            Path(folder, "outcome.json").write_text(json.dumps({"kind": kind, "lines": lines}))
            code = 0
        finally:
            os._exit(code)

    def noticed(self, tests: Iterable[tuple[str, float]], swaps: Pairs = (), functions: Functions = NONE) -> Verdict:
        """The first of these tests that does not pass; with each the seconds that it takes when nothing is changed."""
        for name, seconds in tests:
            if name in self.items:
                kind = self.attempt(name, LEAST + TIMES * seconds, swaps, functions).kind
                if kind not in ("passed", "skipped"):
                    return Verdict(kind != "waits", name, kind)
        return Verdict(False)


def collect(names: Iterable[str], then: Callable[[Collected], None]) -> None:
    """pytest's collection of these files, and then this function."""
    import pytest

    collected = Collected(then)
    pytest.main([*OPTIONS, *names], plugins=[collected])
    if collected.error is not None:
        raise collected.error


def silence() -> None:
    """Nothing is read or said from here on."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)


def ended(pid: int, clock: float) -> tuple[int, float]:
    """Exit status and processor time of a child, which is killed after so many seconds on the clock."""
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], clock)[0]:
            os.kill(pid, signal.SIGKILL)
        _, status, used = os.wait4(pid, 0)
        return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
    finally:
        os.close(handle)


def trace(files: Iterable[str]) -> Any:
    """Coverage of these files from now on."""
    import coverage

    tracer = coverage.Coverage(data_file=None, include=[str(ROOT / file) for file in files], config_file=False)
    tracer.start()
    return tracer


def traced_lines(tracer: Any) -> dict[str, list[int]]:
    """What has run of each file; ends the tracing."""
    tracer.stop()
    held = tracer.get_data()
    return {str(Path(file).relative_to(ROOT)): sorted(held.lines(file) or ()) for file in held.measured_files()}


def warm() -> None:
    """Import what every test needs, but for psigrad."""
    import coverage  # noqa: F401
    import gymnasium  # noqa: F401
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    torch.set_num_threads(1)
    assert not any(name.partition(".")[0] == "psigrad" for name in sys.modules)


@dataclass(frozen=True)
class Request:
    """What `Cold` is asked: these tests with the seconds that they take, and the changed source of one file, if any."""

    tests: list[tuple[str, float]]
    file: str = ""
    source: str = ""


class Cold:
    """A fork that has imported all but psigrad; for each request a fork of it imports psigrad and collects the tests' files.

    To be made before psigrad is imported.
    """

    def __init__(self) -> None:
        (asked, asking), (answering, answer) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(asking)
            try:
                with os.fdopen(asked) as requests:
                    for line in requests:
                        row = json.loads(line)
                        os.write(answer, (json.dumps(_fresh(Request(**row))) + "\n").encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(asked)
        os.close(answer)
        self._in, self._out = os.fdopen(asking, "w"), os.fdopen(answering)

    def noticed(self, request: Request) -> Verdict:
        """As `Collected.noticed`."""
        if not request.tests:
            return Verdict(False)
        print(json.dumps(asdict(request)), file=self._in, flush=True)
        return Verdict(*json.loads(self._out.readline()))


def _fresh(request: Request) -> Verdict:
    folder = tempfile.mkdtemp(prefix="m")
    told = Path(folder, "verdict.json")
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (IMPORT, IMPORT + 5))
            silence()
            told.write_text(json.dumps(_imported(request)))
        finally:
            os._exit(0)
    try:
        code, _ = ended(pid, CLOCK * IMPORT + 3600)
        if told.exists():
            return Verdict(*json.loads(told.read_text()))
        return Verdict(code == -signal.SIGXCPU, request.file, "time" if code == -signal.SIGXCPU else f"ended with {code}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _imported(request: Request) -> Verdict:
    """Import the changed source, collect, and try the tests."""
    if request.file:
        _import_changed(ROOT / request.file, request.source)
        try:
            importlib.import_module(request.file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        except BaseException as error:  # what a changed source raises can be anything
            told = f"{request.tests[0][0].partition('::')[0]}: {type(error).__name__}: {error}"
            return Verdict(True, told[:200], "import")
    found: list[Verdict] = []

    def judge(collected: Collected) -> None:
        broken = collected.broken
        found.append(Verdict(True, broken[0], "import") if broken else collected.noticed(request.tests))

    collect(dict.fromkeys(name.partition("::")[0] for name, _ in request.tests), judge)
    return found[0]


def _import_changed(file: Path, source: str) -> None:
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code

    @functools.wraps(original)
    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if Path(self.path) == file:
            return compile(source, str(file), "exec", dont_inherit=True)
        return original(self, name)

    loader.get_code = get_code  # type: ignore[method-assign]
