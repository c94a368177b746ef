"""The driver inside the sandbox: it runs the program, then writes the values of expressions to a pipe. It holds no secrets.

This file is read as text and passed to the Python in the sandbox, which cannot import psigrad.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import sys
import types
from typing import Any

# Type -> a function that returns the content of a value: a text, or a list of values. A subclass is sent as its plain base type.
AS_TEXT: dict[str, Any] = {"bytes": lambda v: v.hex(), "bytearray": lambda v: v.hex(), "complex": str, "Decimal": str}
AS_VALUES: dict[str, Any] = {
    "list": list.__iter__,
    "tuple": tuple.__iter__,
    "set": set.__iter__,
    "frozenset": frozenset.__iter__,
    "deque": iter,
    "Fraction": lambda v: (v.numerator, v.denominator),
    "range": lambda v: (v.start, v.stop, v.step),
    "datetime": lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond),
    "date": lambda v: (v.year, v.month, v.day),
    "time": lambda v: (v.hour, v.minute, v.second, v.microsecond),
    "timedelta": lambda v: (v.days, v.seconds, v.microseconds),
}
MODULES = ("builtins", "collections", "fractions", "decimal", "datetime")


def plain(value: object, depth: int = 0) -> object:
    """Return the value in a form that JSON can represent, with tags for types. Raise TypeError for any non-standard type."""
    if depth > 50:
        raise TypeError("nested too deeply")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": hex(int.__index__(value))}  # any size: decimal digits of large integers are limited
    if isinstance(value, float):
        return float.__float__(value) if math.isfinite(value) else {"float": float.__repr__(value)}
    if isinstance(value, dict):
        return {"dict": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in dict.items(value)]}
    for kind in type(value).__mro__:
        if kind.__module__ in MODULES and kind.__name__ in AS_TEXT:
            return {kind.__name__: AS_TEXT[kind.__name__](value)}
        if kind.__module__ in MODULES and kind.__name__ in AS_VALUES:
            return {kind.__name__: [plain(v, depth + 1) for v in AS_VALUES[kind.__name__](value)]}
    if hasattr(value, "tolist"):  # from numpy
        return plain(value.tolist(), depth + 1)
    if hasattr(value, "__next__") or type(value).__name__ in ("dict_keys", "dict_values", "dict_items"):
        return {"iterator": [plain(v, depth + 1) for v in itertools.islice(value, 100_000)]}  # type: ignore[call-overload]
    raise TypeError("a " + type(value).__name__ + " is not a plain value")


def main() -> None:
    """Run the program, then answer each expression with a line of JSON."""
    task_from, answers_to = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(task_from, "r", encoding="utf-8") as stream:
        task = json.load(stream)
    out = os.fdopen(answers_to, "w", encoding="utf-8")
    os.set_inheritable(answers_to, False)
    out.write("started\n")
    out.flush()
    if not task["expressions"]:
        out.close()
    sys.argv = ["program.py"]
    # A program that reads and prints is a script. If only functions are tested, its code under __main__ must not run.
    module = types.ModuleType("program" if task["expressions"] else "__main__")
    sys.modules[module.__name__] = module
    exec(compile(task["source"], "program.py", "exec", dont_inherit=True), module.__dict__)
    for expression in task["expressions"]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = math.ceil(used.ru_utime + used.ru_stime) + task["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (min(soft, most), most))
        try:
            answer = {"value": plain(eval(compile(expression, "test", "eval", dont_inherit=True), module.__dict__))}
        except Exception as error:
            answer = {"error": type(error).__name__ + ": " + str(error)[:300]}
        out.write(json.dumps(answer) + "\n")
        out.flush()


main()
