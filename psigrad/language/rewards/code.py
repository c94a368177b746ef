"""The reward `code`, which judges programs by tests. They run in a sandbox that never receives the expected values."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from psigrad.errors import UserError
from psigrad.language.rewards.code_asserts import Evaluated
from psigrad.language.rewards.code_rows import BESIDE, COLUMNS, Printed, RowTests, read_tests
from psigrad.language.rewards.code_values import same
from psigrad.language.rollout.scoring import FailedTest, SelfLimited, text_of
from psigrad.processes.sandbox import Executor, Limits, Program, ProgramOutcome, executor_for, tier_of_this_machine
from psigrad.processes.sandbox.executor import MissingValue

# A block without a closing fence extends to the end.
_FENCE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}(?!`)|~{3,}(?!~))[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)(?:^[ \t]*(?P=fence)[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_DECIMAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_GAP = re.compile(r"\s+")
_PYTHON = ("python", "python3", "py")
# Errors that judging a value of the wrong type may raise.
_WRONG = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Code(SelfLimited):
    """A reward of 1 if the completion's Python program passes every test of its row, otherwise 0.

    The 0 is a `FailedTest`, a number with a `reason`. The program is the completion's last fenced block (the last Python block,
    if there is one), or the whole completion if it has no block. One of the columns `code_rows.COLUMNS` holds the tests; that
    module lists their formats. The first failed test ends the run. With `partial`, the reward is the share of tests that pass.
    If the sandbox itself fails, the completion has no score.
    """

    partial: bool = False
    seconds: float = 2.0
    """CPU time of each test, rounded up to whole seconds. The wall-clock limit is five times as much."""
    memory_mb: int = 512
    """The memory limit of one run."""
    output_kb: int = 1024
    """The output limit of one run; higher if its test expects more."""
    tolerance: float = 1e-6
    """The largest difference of equal decimal numbers in the output, relative to the larger; absolute if both are below 1."""
    packages: bool = False
    """True if programs can import the packages of your own environment, such as numpy."""
    service: str = ""
    """URL of a sandbox service to use instead of this machine; see `psigrad_extras.connect.remote_sandbox`."""
    service_token_variable: str = ""
    """Environment variable with the service's token. List its name in `worker_env` too, so that reward workers receive it."""
    allow_unsafe_code: bool = False
    """True to run programs without a sandbox if the machine has none. They then have all your permissions."""

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.memory_mb > 0 or not self.output_kb > 0:
            raise UserError(
                f"code: seconds is {self.seconds}, memory_mb {self.memory_mb}, output_kb {self.output_kb}; they must be above 0."
            )

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return one reward per completion: a number, which is a `FailedTest` if the program fails."""
        token = os.environ[self.service_token_variable] if self.service_token_variable else ""
        executor = _executor(self.service, token, self.allow_unsafe_code)
        judged = []
        for i, completion in enumerate(completions):
            row = {name: columns[name][i] for name in (*COLUMNS, *BESIDE) if name in columns}
            prompt = columns["prompts"][i] if "prompts" in columns else ""
            source = whole_program(text_of(completion), prompt, str(row.get("entry_point") or ""))
            judged.append(_Judged(source, read_tests(row), self))
        # Start the next run of all remaining programs together; wrong programs have no further runs.
        while left := [one for one in judged if one.runs]:
            room = max(self.output_kb, *(2 * one.runs[0].expected >> 10 for one in left))
            limits = Limits(seconds=self.seconds, memory_mb=self.memory_mb, output_kb=room, packages=self.packages)
            for one, outcome in zip(left, executor.run([one.runs[0].program for one in left], limits), strict=True):
                one.hear(outcome)
        return [one.reward for one in judged]

    def check_machine(self) -> None:
        """Raise `SandboxError` if programs would run on this machine and it has no sandbox."""
        if not self.service:
            executor_for(allow_unsafe_code=self.allow_unsafe_code)

    @property
    def is_unsafe(self) -> bool:
        """True if the model's programs run without a sandbox."""
        return self.allow_unsafe_code and not self.service and tier_of_this_machine().name == "none"

    def check_row(self, row: dict[str, Any]) -> None:
        """Raise `UserError` for a row whose tests cannot be judged."""
        read_tests(row)


@cache
def _executor(service: str, token: str, allow_unsafe_code: bool) -> Executor:
    return executor_for(service, token=token, allow_unsafe_code=allow_unsafe_code)


def program_of(text: str) -> str:
    """Return the program in a completion: its last block of Python, otherwise its last fenced block, otherwise all of it."""
    blocks = list(_FENCE.finditer(text))
    python = [block for block in blocks if block["language"].lower() in _PYTHON]
    chosen = (python or blocks)[-1:]
    return chosen[0]["code"] if chosen else text


def whole_program(text: str, prompt: Any, entry: str) -> str:
    """Return the complete program of a completion.

    As in HumanEval, the prompt can begin the function `entry`. A completion that is only its body is appended to the prompt. A
    complete function follows the prompt too, if the prompt is valid Python, since it can use the prompt's other definitions.
    """
    program = program_of(text)
    if not entry or not isinstance(prompt, str) or f"def {entry}" not in prompt:
        return program
    begun = program_of(prompt)
    if program[:1] in (" ", "\t"):
        return begun + program
    # the program can use the prompt's other definitions
    return f"{begun}\n\n{program}" if _is_python(begun) else program


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


@dataclass(frozen=True)
class _Run:
    """One execution of a program, and the tests that it decides: one test of printed output, or all tests of calls."""

    program: Program
    printed: Printed | None = None
    evaluated: tuple[Evaluated, ...] = ()

    @property
    def expected(self) -> int:
        """The number of characters that the program must print in this run."""
        return len(self.printed.expected) if self.printed else 0


class _Judged:
    """A program with its remaining runs, and the result of each test so far."""

    def __init__(self, source: str, tests: RowTests, settings: Code) -> None:
        self._settings, self._count = settings, len(tests.checks)
        self._faults = list[str]()  # of each test, in the order of the runs; empty: it passed
        printed = [check for check in tests.checks if isinstance(check, Printed)]
        evaluated = tuple(check for check in tests.checks if isinstance(check, Evaluated))
        self.runs = [_Run(Program(source, check.stdin), check) for check in printed]
        if evaluated:
            expressions = tuple(one for check in evaluated for one in check.expressions)
            until = None if settings.partial else _fails_at(evaluated)
            self.runs.append(_Run(Program(f"{source}\n{tests.setup}\n", "", expressions, until), None, evaluated))

    def hear(self, outcome: ProgramOutcome) -> None:
        """Record the outcome of the first of the program's remaining runs."""
        run = self.runs.pop(0)
        if run.printed:
            wrong = same_output(outcome.stdout, run.printed.expected, self._settings.tolerance)
            self._faults.append(_trouble(outcome) or ("" if wrong else "the output differs from the expected one"))
        values = iter(outcome.values)
        for check in run.evaluated:
            self._faults.append(_value_fault(check, [next(values) for _ in check.expressions], outcome))
        if any(self._faults) and not self._settings.partial:
            self.runs.clear()

    @property
    def reward(self) -> float:
        """The reward: 1, a share of passed tests, or a `FailedTest`."""
        number, fault = next(((i, fault) for i, fault in enumerate(self._faults) if fault), (0, ""))
        if not fault:
            return 1.0
        right = self._faults.count("") / self._count if self._settings.partial else 0.0
        return right or FailedTest(f"test {number + 1} of {self._count}: {fault}")


def _fails_at(checks: Sequence[Evaluated]) -> Callable[[int, Any], bool]:
    """Return a function that is called with each value in order, and returns True once a test has failed."""
    ends = dict(enumerate(check for check in checks for _ in check.expressions))
    heard: list[Any] = []

    def fails(number: int, value: Any) -> bool:
        check = ends[number]
        heard.append(value)
        if ends.get(number + 1) is check:
            return isinstance(value, MissingValue)
        parts = heard[-len(check.expressions) :]
        return bool(_value_fault(check, parts, None))

    return fails


def _value_fault(check: Evaluated, values: Sequence[Any], outcome: ProgramOutcome | None) -> str:
    for value in values:
        if isinstance(value, MissingValue):
            return (_trouble(outcome) if outcome else "") or value.reason
    try:
        return "" if check.judge(*values) else "the value differs from the expected one"
    except _WRONG:
        return "the value cannot be compared with the expected one"


def _trouble(outcome: ProgramOutcome) -> str:
    """Return the reason why a program failed to run to its end; empty if it ran to its end."""
    if outcome.status not in ("exited", "stopped"):
        return {
            "timeout": "the program ran out of time",
            "memory": "the program ran out of memory",
            "output": "the program printed too much",
        }[outcome.status]
    if outcome.code and outcome.status == "exited":
        last = outcome.stderr.strip().splitlines()[-1:] or [f"exit status {outcome.code}"]
        return f"the program crashed ({last[0][:200]})"
    return ""


def same_output(found: str, expected: str, tolerance: float = 1e-6) -> bool:
    """Return True if the outputs are equal.

    White space at the ends of lines and of the text is ignored. Numbers with a decimal point can differ by the tolerance. Spaces
    between words must be equal, except in a line that has only numbers.
    """
    ours, theirs = ([line.rstrip() for line in text.strip().splitlines()] for text in (found, expected))
    return len(ours) == len(theirs) and all(_same_line(*pair, tolerance) for pair in zip(ours, theirs, strict=True))


def _same_line(a: str, b: str, tolerance: float) -> bool:
    if a == b:
        return True
    words, wanted = a.split(), b.split()
    numbers = all(map(_DECIMAL.fullmatch, wanted))
    if len(words) != len(wanted) or not (numbers or _GAP.findall(a) == _GAP.findall(b)):
        return False
    return all(_same_word(*pair, tolerance) for pair in zip(words, wanted, strict=True))


def _same_word(a: str, b: str, tolerance: float) -> bool:
    if a == b:
        return True
    try:
        # whole numbers are exact
        return bool(_DECIMAL.fullmatch(a) and _DECIMAL.fullmatch(b) and "." in a + b and same(float(a), float(b), tolerance))
    except ValueError:
        return False
