"""Tests on several processes, each of which takes the next file: `pytest --workers auto`.

They are forked from the process that collected: starting Python, loading torch and collecting take longer than most files.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import struct
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

FORK = multiprocessing.get_context("fork")
NUMBER = struct.Struct("i")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", default="0", type=count, help="processes that run the tests: a number, or auto (default: this one alone)"
    )


def count(asked: str) -> int:
    """Return the number of workers; auto: two more than processors, as some tests wait for a program, a deadline or a disk."""
    return min(len(os.sched_getaffinity(0)) + 2, 8) if asked == "auto" else int(asked)


class Files:
    """The tests by file, and a pipe with the numbers of the files that no worker has taken."""

    def __init__(self, items: list[pytest.Item]) -> None:
        files: dict[object, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        self._files = list(files.values())
        self._numbers, write = os.pipe()
        os.write(write, b"".join(NUMBER.pack(number) for number in range(len(files))))
        os.close(write)

    def __iter__(self) -> Iterator[pytest.Item]:
        """Yield the tests of this process. A file that it takes is gone for the others."""
        while number := os.read(self._numbers, NUMBER.size):
            yield from self._files[NUMBER.unpack(number)[0]]


class Sender:
    """The plugin of a worker that sends its reports to the main process."""

    def __init__(self, config: pytest.Config, out: Connection) -> None:
        self._config, self._out = config, out

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._out.send(("begins", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._out.send(("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report)))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any) -> None:
        if when == "runtest":  # those of the collection are known
            said = warning_message
            seen = (str(said.message), said.category.__name__, said.filename, said.lineno)
            self._out.send(("warning", seen, when, nodeid, location))


def _work(session: pytest.Session, number: int, files: Files, out: Connection) -> None:
    """Run the tests that this worker takes."""
    config = session.config
    try:
        config.pluginmanager.unregister(name="terminalreporter")
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # whose files all workers would share
        capture.start_global_capturing()
        temporary = config._tmp_path_factory  # type: ignore[attr-defined]
        temporary._basetemp = temporary.getbasetemp() / f"worker-{number}"
        temporary._basetemp.mkdir()
        config.pluginmanager.register(Sender(config, out))
        for item, following in itertools.pairwise(itertools.chain(files, [None])):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        session._setupstate.teardown_exact(None)  # where it was broken off
        out.send(("done",))
    except BaseException:
        out.send(("broken", traceback.format_exc()))


def _receive(session: pytest.Session, message: tuple[Any, ...]) -> None:
    """Pass a worker's message to the plugins of the main process."""
    hook, (kind, *what) = session.config.hook, message
    if kind == "report":
        hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=session.config, data=what[0]))
    elif kind == "warning":
        (text, category, filename, line), when, nodeid, location = what
        category = type(category, (Warning,), {})
        shown = warnings.WarningMessage(message=category(text), category=category, filename=filename, lineno=line)
        hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": shown, "when": when, "nodeid": nodeid, "location": location}
        )


def _crashed(session: pytest.Session, running: tuple[str, Any], why: str) -> None:
    nodeid, location = running
    said = f"A worker ended while this test ran ({why})."
    report = pytest.TestReport(nodeid, location, {}, "failed", said, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    asked: int = session.config.option.workers
    if not asked or session.testsfailed or session.config.option.collectonly:
        return None
    files = Files(session.items)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    workers: dict[Connection, Any] = {}
    for number in range(asked):
        receiving, sending = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_work, args=(session, number, files, sending))
        process.start()
        sending.close()
        workers[receiving] = process
    everyone, running = list(workers.values()), {}
    try:
        while workers:
            # a process that a killed worker had started may keep the pipe open
            ended = [ready for ready, process in workers.items() if process.exitcode is not None]
            for ready in wait(list(workers), 1.0) or ended:
                try:
                    message = ready.recv() if ready.poll() else ("broken", f"exit status {workers[ready].exitcode}")
                except EOFError:
                    message = ("broken", "it was killed")
                if message[0] == "begins":
                    running[ready] = message[1:]
                elif message[0] in ("done", "broken"):
                    process = workers.pop(ready)
                    if message[0] == "broken":
                        _crashed(session, running.get(ready, ("a worker", ("", 0, ""))), message[1])
                else:
                    _receive(session, message)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for process in everyone:
            if workers:
                process.kill()
            process.join()
    return True
