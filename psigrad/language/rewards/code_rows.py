"""Tests of programs in the forms that datasets have them, as checks whose expected side never enters the sandbox.

| form | where |
|---|---|
| [{"input": TEXT, "output": TEXT}, …] | stdin and stdout; column `tests` or `test_cases` |
| ["assert f(2) == 4", …] or one text of such lines | MBPP's `test_list`; column `tests` |
| {"inputs": […], "outputs": […], "fn_name": NAME} | APPS, PRIME and verl, in `tests`, `ground_truth` or verl's `reward_model` |
| {"test_cases": [{"type": "stdin_stdout" or "function_call", "input", "output", …}]} | open-r1's `verification_info`, TRL |

Each may also be JSON text.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psigrad.errors import UserError, kind_of

COLUMNS = ("tests", "test_cases", "verification_info", "test_list", "ground_truth", "reward_model")
_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_TURNED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


@dataclass(frozen=True)
class Printed:
    """What the program must print when it reads `stdin`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class Evaluated:
    """An expression over what the program defines, and how its value is judged outside the sandbox."""

    expression: str
    expected: Any
    compare: Callable[[Any, Any], Any] = operator.eq


Check = Printed | Evaluated


def checks_of(row: Mapping[str, Any]) -> list[Check]:
    """The checks of a dataset row, from the first of `COLUMNS` that has any. Raises `UserError` for a form that is not known."""
    for column in COLUMNS:
        if row.get(column):
            try:
                found = _checks(_unpack(row[column]))
            except (KeyError, TypeError, ValueError, SyntaxError, RecursionError) as error:
                raise UserError(f"The tests in column {column!r} cannot be read ({type(error).__name__}: {error}).") from error
            if found:
                return found
    raise UserError(f"The row has no tests; give them in a column {', '.join(COLUMNS[:-1])} or verl's reward_model.")


def _unpack(value: Any) -> Any:
    """JSON text as what it holds."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _checks(tests: Any) -> list[Check]:
    if isinstance(tests, str):
        return [_read_assert(node) for node in ast.parse(tests).body]
    if isinstance(tests, Mapping):
        if "ground_truth" in tests:
            return _checks(_unpack(tests["ground_truth"]))
        if "test_cases" in tests:
            return _checks(_unpack(tests["test_cases"]))
        if "inputs" in tests:
            name = tests.get("fn_name")
            pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
            return [_read_printed(i, o) if name is None else _read_call(name, i, o) for i, o in pairs]
        return [_one(tests)]
    if not isinstance(tests, Sequence):
        raise TypeError(f"{kind_of(tests)}; expected a list, a mapping or text")
    return [check for test in tests for check in (_checks(test) if isinstance(test, str) else [_one(test)])]


def _one(test: Mapping[str, Any]) -> Check:
    """One test case as a mapping."""
    name = test.get("fn_name")
    if name is not None and test.get("type", "function_call") == "function_call":
        arguments = _unpack(test["input"])
        return _read_call(name, arguments if isinstance(arguments, list) else [arguments], _unpack(test["output"]))
    return _read_printed(test["input"], test["output"])


def _read_printed(given: Any, expected: Any) -> Printed:
    """Lists are lines, as in LiveCodeBench and TACO."""
    stdin, wanted = ("\n".join(map(str, x)) if isinstance(x, list) else str(x) for x in (given, expected))
    return Printed(stdin, wanted)


def _read_call(name: str, arguments: Any, expected: Any) -> Evaluated:
    """A call of a function, or of a method of LeetCode's class Solution."""
    if not name.isidentifier():
        raise ValueError(f"fn_name {name!r} is no name of a function")
    if isinstance(arguments, str):  # APPS: one JSON value a line
        arguments = [json.loads(line) for line in arguments.splitlines()]
    values = ", ".join(map(repr, arguments))
    found = f"(Solution().{name} if {name!r} not in globals() else {name})({values})"
    return Evaluated(found, expected, _called_equal)


def _called_equal(value: Any, expected: Any) -> bool:
    """JSON has no tuples, and APPS wraps some outputs in a list of one."""
    value = _as_lists(value)
    return bool(value == expected or (isinstance(expected, list) and len(expected) == 1 and value == expected[0]))


def _as_lists(value: Any) -> Any:
    return [_as_lists(v) for v in value] if isinstance(value, list | tuple) else value


def _read_assert(node: ast.stmt) -> Evaluated:
    """`assert EXPR == LITERAL`, or another comparison with a literal, or a plain `assert EXPR` or `assert not EXPR`.

    Raises ValueError for any other test: its expected side would have to enter the sandbox with the program.
    """
    if not isinstance(node, ast.Assert):
        raise ValueError(f"line {node.lineno} is no assert; only `assert EXPR == LITERAL` and its like can be judged outside")
    test = node.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, kind, right = test.left, type(test.ops[0]), test.comparators[0]
        if kind in _OPERATORS and _is_literal(right) and not _is_literal(left):
            return Evaluated(ast.unparse(left), ast.literal_eval(right), _OPERATORS[kind])
        if kind in _OPERATORS and _is_literal(left) and not _is_literal(right):
            return Evaluated(ast.unparse(right), ast.literal_eval(left), _OPERATORS[_TURNED.get(kind, kind)])
        raise ValueError(f"line {node.lineno} compares with what is no literal: {ast.unparse(test)}")
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and isinstance(test.operand, ast.Call):
        return Evaluated(f"bool({ast.unparse(test.operand)})", False)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id not in ("all", "any", "isclose"):
        return Evaluated(f"bool({ast.unparse(test)})", True)
    raise ValueError(f"line {node.lineno} is no comparison with a literal: {ast.unparse(test)}")


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
