"""Programs judged by tests, in a sandbox that never sees what the tests expect."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from psigrad.errors import UserError
from psigrad.language.rewards.code_rows import COLUMNS, Check, Evaluated, Printed, checks_of
from psigrad.language.rewards.outcomes import Failure, text_of
from psigrad.processes.sandbox import Executor, Limits, Program, ProgramOutcome, executor_for
from psigrad.processes.sandbox.executor import MissingValue

_FENCE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^[ \t]*(?P=fence)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class Code:
    """1 where the completion's Python program passes every test of its row; else it has failed, and the reason says how.

    The program is the last fenced block (of Python, where one says so), or the whole completion without one. Tests stand in a
    column `tests`, `test_cases`, `verification_info`, `test_list`, `ground_truth` or `reward_model`; see `rewards.code_rows`
    for their forms. With `partial` the reward is the share of tests that pass. Trouble of the sandbox itself leaves a completion
    unscored.
    """

    partial: bool = False
    seconds: float = 2.0
    """Wall-clock time of one run of the program."""
    memory_mb: int = 512
    """Memory of one run."""
    service: str = ""
    """URL of a sandbox service to ask instead of this machine; see `psigrad.processes.sandbox.remote`."""
    service_token_variable: str = ""
    """Environment variable with the service's token, which `worker_env` must name too."""
    allow_unsafe_code: bool = False
    """Run programs without a sandbox where the machine has none: they can then do whatever you can."""

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.memory_mb > 0:
            raise UserError(f"code: seconds is {self.seconds} and memory_mb {self.memory_mb}; both must be above 0.")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | Failure]:
        """One reward per completion; `Failure` says what a wrong program did."""
        token = os.environ[self.service_token_variable] if self.service_token_variable else ""
        executor = _executor(self.service, token, self.allow_unsafe_code)
        limits = Limits(seconds=self.seconds, memory_mb=self.memory_mb)
        known = [name for name in COLUMNS if name in columns]
        tasks = []
        for i, completion in enumerate(completions):
            checks = checks_of({name: columns[name][i] for name in known})
            tasks.append((checks, _programs(program_of(text_of(completion)), checks)))
        outcomes = iter(executor.run([program for _, programs in tasks for program in programs], limits))
        return [self._judge(checks, [next(outcomes) for _ in programs]) for checks, programs in tasks]

    def _judge(self, checks: Sequence[Check], outcomes: Sequence[ProgramOutcome]) -> float | Failure:
        faults = _faults(checks, outcomes)
        wrong = [(i, fault) for i, fault in enumerate(faults) if fault]
        if self.partial:
            return 1 - len(wrong) / len(faults)
        if not wrong:
            return 1.0
        i, fault = wrong[0]
        return Failure(f"test {i + 1} of {len(faults)}: {fault}")


@cache
def _executor(service: str, token: str, allow_unsafe_code: bool) -> Executor:
    return executor_for(service, token=token, allow_unsafe_code=allow_unsafe_code)


def program_of(text: str) -> str:
    """The program in a completion: its last fenced block of Python, else its last fenced block, else all of it."""
    blocks = list(_FENCE.finditer(text))
    python = [block for block in blocks if block["language"].lower() in _PYTHON]
    chosen = (python or blocks)[-1:]
    return chosen[0]["code"] if chosen else text


def _programs(source: str, checks: Sequence[Check]) -> list[Program]:
    """One run for each stdin, and one for all expressions together."""
    expressions = tuple(check.expression for check in checks if isinstance(check, Evaluated))
    runs = [Program(source, check.stdin) for check in checks if isinstance(check, Printed)]
    return [*runs, *([Program(source, expressions=expressions)] if expressions else [])]


def _faults(checks: Sequence[Check], outcomes: Sequence[ProgramOutcome]) -> list[str]:
    """What is wrong with each check, or an empty text. The last outcome is that of all expressions together."""
    printed, values = iter(outcomes), iter(outcomes[-1].values)
    found = []
    for check in checks:
        if isinstance(check, Evaluated):
            found.append(_value_fault(next(values), check, outcomes[-1]))
        else:
            outcome = next(printed)
            wrong = "" if same_output(outcome.stdout, check.expected) else "it printed something else"
            found.append(_trouble(outcome) or wrong)
    return found


def _value_fault(value: Any, check: Evaluated, outcome: ProgramOutcome) -> str:
    if isinstance(value, MissingValue):
        return _trouble(outcome) or value.reason
    try:
        return "" if check.compare(value, check.expected) else "another value"
    except TypeError:
        return "a value of another kind"


def _trouble(outcome: ProgramOutcome) -> str:
    """How a program ended, where that is no good end."""
    if outcome.status != "exited":
        return {"timeout": "it ran out of time", "memory": "it ran out of memory", "output": "it printed too much"}[
            outcome.status
        ]
    if outcome.code:
        last = outcome.stderr.strip().splitlines()[-1:] or [f"exit status {outcome.code}"]
        return f"it crashed ({last[0][:200]})"
    return ""


def same_output(found: str, expected: str) -> bool:
    """Equal but for white space at the ends of lines and of the text; numbers may be written differently (1.0, 1.00)."""
    ours, theirs = ([line.rstrip() for line in text.strip().splitlines()] for text in (found, expected))
    if ours == theirs:
        return True
    words, wanted = found.split(), expected.split()
    return len(ours) == len(theirs) and len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    try:
        return ("." in a or "." in b) and Decimal(a) == Decimal(b)
    except InvalidOperation:
        return False
