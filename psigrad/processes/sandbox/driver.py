"""Runs inside the sandbox: the program, then each expression, whose values go out on a pipe. Nothing here is a secret.

Read as text and given to the sandbox's own Python, which knows nothing of psigrad.
"""

from __future__ import annotations

import json
import math
import os
import sys


def plain(value: object, depth: int = 0) -> object:
    """The value as tagged JSON; raises TypeError for what is no plain value."""
    kind = type(value)
    if depth > 50:
        raise TypeError("nested too deeply")
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int) and kind is int:
        return {"int": hex(value)}  # any size: decimal digits of large integers are limited
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list | tuple | set | frozenset) and kind in (list, tuple, set, frozenset):
        name = "set" if kind in (set, frozenset) else kind.__name__
        return {name: [plain(v, depth + 1) for v in value]}
    if isinstance(value, dict) and kind is dict:
        return {"dict": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in value.items()]}
    raise TypeError("a " + kind.__name__ + " is no plain value")


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
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(task["source"], "program.py", "exec"), space)
    for expression in task["expressions"]:
        try:
            answer = {"value": plain(eval(compile(expression, "test", "eval"), space))}
        except Exception as error:
            answer = {"error": type(error).__name__ + ": " + str(error)[:300]}
        out.write(json.dumps(answer) + "\n")
        out.flush()


main()
