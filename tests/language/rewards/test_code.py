"""The reward `code`: what goes into the sandbox and what never does, the forms of rows, right programs, and cheats."""

from __future__ import annotations

import base64
import json
import sys
import time
import zlib

import pytest
from cases import repeat_for
from judged_programs import FAKED, FAKES, FORMS, LCB, REFUSED, ROWS, TASKS

from psigrad.errors import UserError
from psigrad.language.rewards import Failed, RewardPool, RewardSpec, Samples, Scored
from psigrad.language.rewards.code import Code, program_of, same_output, whole_program
from psigrad.language.rewards.code_asserts import take_apart
from psigrad.language.rewards.code_rows import Printed, read_tests
from psigrad.language.rewards.code_values import allclose, arithmetic, same, short_range


@repeat_for(("source", "inside", "right", "wrong"), FORMS)
def test_only_calls_go_into_the_sandbox(source, inside, right, wrong):
    checks, _ = take_apart(source)
    sent = [one for check in checks for one in check.expressions]
    if "randint" not in source:
        assert sent == inside
        assert not any("77" in one or "78" in one for one in sent)
    for values in right or ():
        assert checks[0].judge(*(values if len(sent) > 1 else [values]))
    for values in wrong or ():
        try:
            passed = checks[0].judge(*(values if len(sent) > 1 else [values]))
        except (TypeError, ValueError, LookupError):
            passed = False
        assert not passed, values


@repeat_for("source", REFUSED)
def test_what_cannot_be_taken_apart_is_refused_by_row(source):
    if source == "from os import system":  # a test without tests
        with pytest.raises(UserError, match="no tests"):
            read_tests({"tests": source})
        return
    with pytest.raises(UserError, match="cannot be read"):
        read_tests({"tests": source})


def test_values_are_judged_with_bounds_and_tolerance():
    assert same(0.1 + 0.2, 0.3) and not same(1000000.5, 1000000.0) and same([(1, {"a": 0.1 + 0.2})], [(1, {"a": 0.3})])
    assert not same([1], (1,)) and not same("1", 1) and same(1, 1.0) and same({1, 2}, {2, 1}) and not same(2.9999999999999996, 3)
    assert not allclose([], 5.0) and not allclose([], [1.0]) and not allclose(1.0, [1.0, 1.0]) and allclose([1.0], [1.0 + 1e-6])
    with pytest.raises(TypeError):
        take_apart("assert f(1) * 'ab' == 'ab'")[0][0].judge(10**9)
    with pytest.raises(TypeError):
        take_apart("assert f(1) % 5 == 1")[0][0].judge("%1000000000d")
    with pytest.raises(TypeError):
        take_apart("assert 2 ** f(1) == 1")[0][0].judge(10**9)


def test_a_product_a_power_and_a_range_are_computed_up_to_their_bounds():
    """A million items, an exponent of a thousand and a base of a googol."""
    assert arithmetic("*", 3, "ab") == "ababab" and arithmetic("*", (1, 2), -1) == () and arithmetic("*", "a", True) == "a"
    assert len(arithmetic("*", [0, 1], 500_000)) == len(arithmetic("*", 500_000, "ab")) == len(short_range(10**6)) == 10**6
    assert arithmetic("**", 2, 1000) == 1 << 1000 and arithmetic("**", 10**100, 1) == 10**100
    for sign, a, b in [("*", [0, 1], 500_001), ("*", 500_001, "ab"), ("**", 2, 1001), ("**", 2, -1001), ("**", -2 * 10**100, 1)]:
        with pytest.raises(TypeError, match="could take too long"):
            arithmetic(sign, a, b)
    with pytest.raises(TypeError, match="1000001 numbers"):
        short_range(10**6 + 1)


def test_a_layout_that_is_another_is_another_output():
    """A drawing, words, and lines that end elsewhere; numbers alone may be spaced as they are."""
    assert not same_output("*\n***", "*\n  ***") and not same_output("a b", "a  b") and not same_output("1\n2 3", "1 2\n3")
    assert same_output("1   2.0 \n", "1 2.000") and same_output("  *\n ***", "*\n ***"), "white space at the ends of the text"
    assert same_output("Case 1: 0.3333333", "Case 1: 0.333333333") and not same_output("Case  1: 0.5", "Case 1: 0.5")


@pytest.mark.parametrize(
    ("tests", "said"),
    [([{"input": "1", "output": None}], "expected output is null"), ([{"input": "1", "output": " \n"}], "expect no output"),
     ({"inputs": ["1", "2"], "outputs": ["", ""]}, "expect no output")],
)  # fmt: skip
def test_tests_that_every_idle_program_passes_or_none_are_refused(tests, said):
    with pytest.raises(UserError, match=said):
        read_tests({"tests": tests})
    assert read_tests({"tests": [{"input": None, "output": "1"}]}).checks == (Printed("", "1"),)


def test_output_is_compared_by_words_and_decimals_by_tolerance():
    assert (
        same_output("1.0\n", "1.00") and same_output("0.3333333", "0.333333333333") and not same_output("0.333", "0.333333333333")
    )
    assert same_output("a  \nb\n\n", "a\nb") and not same_output("a b", "a\nb") and not same_output("1000001", "1000000")
    assert not same_output("nan", "1.0") and not same_output("1.0", "inf") and same_output("0.34", "0.333", tolerance=0.1)


@pytest.mark.parametrize("form", ROWS)
def test_each_form_of_rows_says_the_same(form):
    row, expected = ROWS[form]
    checks = read_tests(row).checks
    assert [check if isinstance(check, Printed) else list(check.expressions) for check in checks] == expected
    if not isinstance(checks[0], Printed):
        assert checks[0].judge(9) and checks[1].judge(16) and not checks[0].judge(16)
        assert checks[0].judge(9.0) and not checks[0].judge("9")


@pytest.mark.parametrize(
    ("expected", "right", "wrong"), [([], [[], ()], [0, None, [[]]]), ([7], [7, [7], (7,)], [[], [7, 7], 8])]
)
def test_only_a_list_of_one_item_is_a_wrapped_value(expected, right, wrong):
    (check,) = read_tests({"input_output": json.dumps({"fn_name": "f", "inputs": [[3]], "outputs": [expected]})}).checks
    assert [check.judge(value) for value in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)


def test_a_functional_test_is_not_taken_for_one_that_reads_stdin():
    with pytest.raises(UserError, match="func_name"):
        read_tests({"public_test_cases": json.dumps(LCB)})
    bomb = base64.b64encode(zlib.compress(b"cos\nsystem\n(S'true'\ntR.")).decode()
    with pytest.raises(UserError, match=r"os\.system"):
        read_tests({"private_test_cases": bomb})


def test_the_program_of_a_completion():
    assert program_of("So:\n```python\nx = 1\n```\nDone") == "x = 1\n"
    assert program_of("So:\n```python\nx = 1\n") == "x = 1\n", "a fence that was never closed"
    assert program_of("```python\nx = 1\n```\nor\n```\n$ ls\n```") == "x = 1\n"
    assert program_of("x = 1") == "x = 1"
    begin = time.process_time()
    assert program_of("~" * 100_000) == "~" * 100_000 and time.process_time() - begin < 1.0
    prompt = "import math\ndef helper(x):\n    return x\n\ndef f(x):\n    '''Square.'''\n"
    assert whole_program("    return x * x", prompt, "f") == prompt + "    return x * x"
    assert whole_program("```python\ndef f(x): return x\n```", prompt, "f") == f"{prompt}\n\ndef f(x): return x\n"
    assert whole_program("def f(x): return x", "Write f.", "f") == "def f(x): return x"


@pytest.mark.needs("bubblewrap")
def test_right_programs_pass_and_mutated_ones_do_not():
    programs, tests, right = [], [], []
    for test, program, mutants in TASKS:
        name = program[program.index("def f(") :].split("\n")[0].partition(")")[0] + ")"
        sources = [program, *(f"{program}\n{name}: return {mutant}" for mutant in mutants)]
        programs += sources
        tests += [test] * len(sources)
        right += [1.0] + [0.0] * len(mutants)
    found = Code(seconds=20.0)(programs, tests=tests)
    assert [(p, f) for p, f, r in zip(programs, found, right, strict=True) if f != r] == []
    assert sum(right) == len(TASKS) and len(right) > 60


@pytest.mark.needs("bubblewrap")
def test_no_cheat_passes_in_any_form_of_assert():
    """Each fake against several forms, and each form against several fakes."""
    pairs = [(fake, FAKED[(i * 2 + k) % len(FAKED)]) for i, fake in enumerate(FAKES) for k in range(2)]
    found = Code(seconds=2.0)([fake for fake, _ in pairs], tests=[test for _, test in pairs])
    assert [(*pair, value) for pair, value in zip(pairs, found, strict=True) if value] == []
    assert len(pairs) >= 30 and {test for _, test in pairs} == set(FAKED)
    assert not any("77" in value.reason for value in found)


@pytest.mark.needs("bubblewrap")
def test_a_program_that_loops_is_wrong_however_many_tests_it_has_and_the_rewards_time_follows_from_them():
    tests = [{"input": str(i), "output": str(i)} for i in range(12)]
    slow = "import time\nx = input()\ntime.sleep(0.4)\nprint(x)"  # by the clock, and not by the processor
    with RewardPool([RewardSpec("code", Code(seconds=0.5))], timeout=0.5) as pool:
        scoring = pool.begin()
        texts = ["while True: pass", slow]
        scoring.add(Samples(["p"] * 2, texts, [[1]] * 2, {"tests": [tests, tests[:3]]}))
        late = Failed(0.0, "code: test 1 of 12: the program ran out of time", {"code": 0.0})
        assert scoring.results() == [late, Scored(1.0, {"code": 1.0})]


@pytest.mark.needs("bubblewrap")
def test_packages_of_the_own_environment_are_there_on_request(tmp_path, monkeypatch):
    mine = tmp_path / "site-packages"
    mine.mkdir()
    (mine / "only_here.py").write_text("n = 2")
    monkeypatch.setattr(sys, "path", [*sys.path, str(mine)])
    program = (
        "import only_here\nimport numpy as np\n"
        "def f(): return np.arange(only_here.n), np.float64(0.5), np.int64(2), np.bool_(True)"
    )
    test = "assert f() == ([0, 1], 0.5, 2, True)"
    without, with_them = (Code(packages=packages, seconds=20.0)([program], tests=[test])[0] for packages in (False, True))
    assert with_them == 1.0 and without == 0.0 and "only_here" in without.reason


@pytest.mark.needs("bubblewrap")
def test_what_may_be_printed_is_a_setting_and_follows_from_what_is_expected():
    program, tests = "print('x' * 5000)", [{"input": "", "output": "x" * 5000}]
    endless = "while True: print('y')"
    assert Code(output_kb=1, seconds=20.0)([program, endless], tests=[tests] * 2) == [1.0, 0.0]
    assert Code(output_kb=1, seconds=20.0)([program], tests=[[{"input": "", "output": "x"}]])[0].reason.endswith(
        "printed too much"
    )


def test_a_row_can_be_asked_whether_it_can_be_judged():
    Code().check_row({"tests": "assert f(3) == 9", "other": 1})
    with pytest.raises(UserError, match="and a value that may be the expected one"):
        Code().check_row({"tests": "assert differs(f(3), 9)"})
