"""Readers of programming tests in the formats of common datasets. Each test becomes a check (`Printed` or `Evaluated`).

| format | used by |
|---|---|
| [{"input": TEXT, "output": TEXT}, …] | stdin and stdout; column `tests`, `test_cases` or `official_tests` (open-r1) |
| ["assert f(2) == 4", …] or one text of such lines | MBPP's `test_list` with `test_setup_code`; column `tests` |
| a text with `def check(candidate)` | HumanEval's `test` with `entry_point`; MBPP+'s `test` |
| {"inputs": […], "outputs": […], "fn_name": NAME} | APPS' and TACO's `input_output`, `ground_truth`, verl's `reward_model` |
| [{"input", "output", "testtype": "stdin" or "functional"}, …] | LiveCodeBench's `public_test_cases` and `private_test_cases` |
| {"test_cases": [{"type": "stdin_stdout" or "function_call", "input", "output", …}]} | open-r1's `verification_info`, TRL |

Each format can also be JSON text. `code_asserts` defines the supported Python tests. Expected values never enter the sandbox.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from psigrad.errors import UserError, kind_of
from psigrad.language.rewards.code_asserts import Evaluated, take_apart
from psigrad.language.rewards.code_values import same

COLUMNS = (
    *("tests", "test_cases", "verification_info", "test", "test_list", "ground_truth", "reward_model", "input_output"),
    *("public_test_cases", "private_test_cases", "official_tests"),
)
# Further columns that tests need.
BESIDE = ("entry_point", "test_setup_code", "test_imports", "metadata", "challenge_test_list")


@dataclass(frozen=True)
class Printed:
    """A check of a program's output: it reads `stdin` and must print `expected`."""

    stdin: str
    expected: str


Check = Printed | Evaluated


@dataclass(frozen=True)
class RowTests:
    """The checks of a row, and lines of Python that run after the program and before the checks."""

    checks: tuple[Check, ...]
    setup: str = ""


def read_tests(row: Mapping[str, Any]) -> RowTests:
    """Return the tests of a dataset row, from the first of `COLUMNS` with tests that can be judged outside the sandbox.

    Raise `UserError` for an unknown format, and for tests whose expected values would have to enter the sandbox.
    """
    first: UserError | None = None
    for column in COLUMNS:
        if row.get(column):
            try:
                found = _Reader(row).read(_together(row, column))
            except (KeyError, TypeError, ValueError, SyntaxError, RecursionError, zlib.error, pickle.UnpicklingError) as error:
                why = f"The tests in column {column!r} cannot be read ({type(error).__name__}: {error})."
                first = first or UserError(why)
                continue
            if found.checks and all(isinstance(check, Printed) and not check.expected.strip() for check in found.checks):
                why = f"The tests in column {column!r} expect no output, so a program that does nothing would pass."
                first = first or UserError(why)
            elif found.checks:
                return found
    raise first or UserError(f"The row has no tests; give them in one of the columns {', '.join(COLUMNS)}.")


def _together(row: Mapping[str, Any], column: str) -> Any:
    """Return the tests of a column. LiveCodeBench's public tests are joined with those of its column of private tests."""
    if column == "public_test_cases" and row.get("private_test_cases"):
        return [*_unpack(row[column]), *_unpack(row["private_test_cases"])]
    return _unpack(row[column])


def _unpack(value: Any) -> Any:
    """Decode JSON text, also in LiveCodeBench's compressed form. Return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    if isinstance(value, str) and value.startswith("eJ"):  # the beginning of zlib data in base 64
        return json.loads(_Texts(io.BytesIO(zlib.decompress(base64.b64decode(value)))).load())
    return value


class _Texts(pickle.Unpickler):
    """An unpickler that accepts only strings and containers of them: it imports and calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """Reject every class."""
        raise pickle.UnpicklingError(f"the pickle contains {module}.{name}, but only text is read")


@lru_cache(512)
def _apart(source: str, entry: str) -> tuple[tuple[Evaluated, ...], str]:
    checks, imports = take_apart(source, entry)
    return tuple(checks), imports


class _Reader:
    """A reader of the tests of one row."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        metadata = _unpack(row.get("metadata"))
        self._name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
        given = [row.get("test_imports"), row.get("test_setup_code")]
        self._setup = [line for lines in given if lines for line in ([lines] if isinstance(lines, str) else list(lines))]

    def read(self, tests: Any) -> RowTests:
        """Return the checks of `tests` and the setup that they need."""
        checks = tuple(self._checks(tests))
        return RowTests(checks, "\n".join(self._setup) if any(isinstance(check, Evaluated) for check in checks) else "")

    def _checks(self, tests: Any) -> Iterable[Check]:
        match tests:
            case str():
                checks, imports = _apart(tests, str(self._row.get("entry_point") or ""))
                self._setup += [imports] if imports else []
                return checks
            case {"ground_truth": inner} | {"test_cases": inner} | {"functional": inner} | {"assert_case": inner}:
                return self._checks(_unpack(inner))
            case {"inputs": given, "outputs": expected}:
                name = tests.get("fn_name")
                pairs = zip(given, expected, strict=True)
                return [_read_printed(i, o) if name is None else _read_call(name, i, o) for i, o in pairs]
            case Mapping():
                return [self._one(tests)]
            case Sequence() if all(isinstance(test, str) for test in tests):
                return self._checks("\n".join(tests))
            case Sequence():
                return [check for test in tests for check in self._checks(test)]
        raise TypeError(f"the tests are {kind_of(tests)}; expected a list, a mapping or text")

    def _one(self, test: Mapping[str, Any]) -> Check:
        """Return the check of one test case, which is given as a mapping."""
        name = test.get("fn_name") or (self._name if test.get("testtype") == "functional" else None)
        if test.get("testtype") == "functional" and not name:
            raise ValueError("a functional test needs the name of its function as func_name in the column metadata")
        if name is not None and test.get("type", "function_call") == "function_call":
            arguments = test["input"] if test.get("testtype") else _unpack(test["input"])
            if not isinstance(arguments, list | str):
                arguments = [arguments]
            return _read_call(name, arguments, _value(test["output"]))
        return _read_printed(test["input"], test["output"])


def _value(text: Any) -> Any:
    """Return the value of JSON text, or the text itself."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _read_printed(given: Any, expected: Any) -> Printed:
    """Return the check of a program's output. A list of strings is a text of that many lines, as in LiveCodeBench and TACO."""
    if expected is None:
        raise ValueError("the expected output is null, which no program prints")
    given = "" if given is None else given
    stdin, wanted = ("\n".join(map(str, x)) if isinstance(x, list) else str(x) for x in (given, expected))
    return Printed(stdin, wanted)


def _read_call(name: str, arguments: Any, expected: Any) -> Evaluated:
    """Return the check of a call of a function, or of a method of LeetCode's class Solution."""
    if not name.isidentifier():
        raise ValueError(f"fn_name {name!r} is not the name of a function")
    if isinstance(arguments, str):  # APPS and LiveCodeBench: one JSON value a line
        arguments = [json.loads(line) for line in arguments.split("\n") if line.strip()]
    values = ", ".join(map(repr, arguments))
    found = f"(Solution().{name} if {name!r} not in globals() else {name})({values})"
    return Evaluated((found,), partial(_called_equal, expected))


def _called_equal(expected: Any, value: Any) -> bool:
    """Return True if the values are equal as JSON, in which tuples are lists and keys are strings.

    The expected value can also be wrapped in a list of one item, as some outputs of APPS are.
    """
    value, expected = _as_json(value), _as_json(expected)
    return same(value, expected) or (isinstance(expected, list) and len(expected) == 1 and same(value, expected[0]))


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(v) for v in value]
    return {str(k): _as_json(v) for k, v in value.items()} if isinstance(value, dict) else value
