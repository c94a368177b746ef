"""Programs whose verdict is known, right and wrong, in every form of tests: the reward makes no mistake."""

from __future__ import annotations

import json

import pytest

from psigrad.language.rewards.code import Code

pytestmark = pytest.mark.needs("bubblewrap")

# name, parameters, right expression, wrong ones, inputs
TASKS = [
    ("add", "a, b", "a + b", ["a - b", "a * b", "a"], [(1, 2), (-3, 7), (10**30, 1)]),
    ("square", "a", "a * a", ["a + a", "a ** 3", "a * abs(a)"], [(3,), (-4,), (0,)]),
    ("is_even", "a", "a % 2 == 0", ["a % 2 == 1", "True", "a % 2"], [(4,), (7,), (-2,)]),
    ("last", "xs", "xs[-1]", ["xs[0]", "xs[-2]", "len(xs)"], [([1, 2, 3],), ([5, 4],)]),
    ("backward", "s", "s[::-1]", ["s", "s.upper()", "s[::-1][1:]"], [("abc",), ("für ✓",)]),
    ("vowels", "s", "sum(c in 'aeiou' for c in s)", ["len(s)", "sum(c in 'aei' for c in s)", "0"], [("education",), ("sky ou",)]),
    ("unique", "xs", "sorted(set(xs))", ["sorted(xs)", "list(xs)", "sorted(set(xs))[1:]"], [([3, 1, 3],), ([2, 2],)]),
    ("half", "a", "a / 2", ["a // 2", "a * 2", "a"], [(3,), (5,)]),
    ("pair", "a, b", "(b, a)", ["(a, b)", "[b, a]", "b"], [(1, 2), (3, 4)]),
    ("count", "xs", "{x: xs.count(x) for x in xs}", ["{x: 1 for x in xs}", "len(xs)", "{}"], [([1, 1, 2],), ([3, 3],)]),
    ("joined", "xs", "'-'.join(xs)", ["''.join(xs)", "xs", "'-'.join(xs) + '-'"], [(["a", "b"],), (["x", "y", "z"],)]),
    ("gcd", "a, b", "__import__('math').gcd(a, b)", ["min(a, b)", "1", "a * b"], [(12, 18), (7, 21)]),
]
RIGHT_STYLES = (
    "def {name}({parameters}):\n    return {right}\n",
    "import math\n{name} = lambda {parameters}: {right}\nprint('loaded')\n",
    "class Solver:\n    @staticmethod\n    def solve({parameters}):\n        return {right}\n\n{name} = Solver.solve\n",
)
BROKEN = (
    "def {name}({parameters}):\n    raise ValueError('no')\n",
    "def {name}({parameters})\n    return {right}\n",
    "def another_{name}({parameters}):\n    return {right}\n",
    "def {name}({parameters}):\n    return None\n",
    "def {name}({parameters}):\n    return {right}\nraise SystemExit(0)\n",
)


def functions():
    """(task, program, whether it is right)."""
    for name, parameters, right, wrong, _ in TASKS:
        given = {"name": name, "parameters": parameters, "right": right}
        for style in RIGHT_STYLES:
            yield name, style.format(**given), True
        for other in wrong:
            yield name, RIGHT_STYLES[0].format(**{**given, "right": other}), False
        for style in BROKEN:
            yield name, style.format(**given), False


def expected(name, arguments):
    _, parameters, right, _, _ = next(task for task in TASKS if task[0] == name)
    return eval(f"lambda {parameters}: {right}")(*arguments)


def asserts(name, inputs):
    return [f"assert {name}({', '.join(map(repr, given))}) == {expected(name, given)!r}" for given in inputs]


def calls(name, inputs):
    return {"inputs": [list(given) for given in inputs], "outputs": [expected(name, given) for given in inputs], "fn_name": name}


def judged(programs, **columns):
    """Whether each program passed. All of them end, if not at once."""
    found = Code(seconds=60.0)(programs, **columns)
    assert set(found) <= {0.0, 1.0}
    return [value == 1.0 for value in found]


FORMS = ["asserts", "one text", "calls", "json"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_functions_are_judged_without_a_mistake(form, share):
    """A fourth of the tasks in each form, each in one of them; all of them in every form with `make test-slow`."""
    inputs = {task[0]: task[4] for task in TASKS}
    # JSON has no tuples, no sets and no numbers as keys
    skip = ("pair", "count") if form in ("calls", "json") else ()
    chosen = [task[0] for task in TASKS if task[0] not in skip][FORMS.index(form) % share :: share]
    cases = [case for case in functions() if case[0] in chosen]
    tests = {
        "asserts": lambda name: asserts(name, inputs[name]),
        "one text": lambda name: "\n".join(asserts(name, inputs[name])),
        "calls": lambda name: calls(name, inputs[name]),
        "json": lambda name: json.dumps(calls(name, inputs[name])),
    }[form]
    fenced = [f"I think so:\n```python\n{program}```\nDone." if i % 2 else program for i, (_, program, _) in enumerate(cases)]
    found = judged(fenced, tests=[tests(name) for name, _, _ in cases])
    mistakes = [(name, program) for (name, program, right), passed in zip(cases, found, strict=True) if passed != right]
    assert not mistakes and len(cases) >= 110 // share - 10


def test_programs_that_read_and_print_are_judged_without_a_mistake():
    tests = [{"input": f"{a} {b}\n", "output": f"{a + b}\n{a / b}\n"} for a, b in ((3, 4), (-8, 2), (10, 5))]
    body = "a, b = map(int, input().split())\n"
    cases = {
        body + "print(a + b)\nprint(a / b)": True,
        body + "import sys\nsys.stdout.write(f'{a + b}\\n{a / b:.2f}  \\n\\n')": True,
        "import sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b, a / b, sep='\\n')": True,
        body + "print(a + b)": False,
        body + "print(a / b)\nprint(a + b)": False,
        body + "print(a + b, a / b)": False,
        body + "print(a - b)\nprint(a / b)": False,
        body + "print(a + b)\nprint(a / b)\nprint('more')": False,
        body + "print(a + b)\nprint(a // b)": False,
        body + "print(a + b)\nprint(a / b)\nraise ValueError": False,
        body + "print(a + b)\nprint(a / b)\nimport os; os._exit(3)": False,
        "print(7)\nprint(0.75)": False,
        "a, b = 1": False,
        "": False,
    }
    assert judged(list(cases), tests=[tests] * len(cases)) == list(cases.values())
    (endless,) = Code(seconds=1.0)(["while True: pass"], tests=[tests])
    assert endless == 0.0 and "ran out of time" in endless.reason


def test_partial_credit_is_the_share_of_tests_that_pass():
    tests = ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9", "assert f(0) == 0"]
    programs = ["def f(x): return x", "def f(x): return x * x", "def f(x): return -1"]
    found = Code(partial=True, seconds=60.0)(programs, tests=[tests] * 3)
    assert found == [0.5, 1.0, 0.0]
