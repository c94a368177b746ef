"""Rows of tests in the forms that datasets have them, programs that are right, and programs that only want to be taken for it."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

from psigrad.language.rewards.code_rows import Printed

# a test, what of it goes in, values that are right, and values that are wrong; 77 is nowhere but in what is expected
FORMS = [
    ("assert f(3) == 77", ["f(3)"], [77, 77.0], [76, "77", None, [77]]),
    ("assert 77 == f(3)", ["f(3)"], [77], [76]),
    ("assert abs(f(3.5) - 77) < 1e-6", ["f(3.5)"], [77, 77.0000001], [76, "x", float("nan"), []]),
    ("assert math.fabs(f(3) - 77) <= 0.5", ["f(3)"], [77.5], [78]),
    ("assert abs(77 - f(3)) < 1e-6", ["f(3)"], [77], [-77]),
    ("import math\nassert math.isclose(f(3), 77, rel_tol=1e-6)", ["f(3)"], [77.00001], [77.1, "77"]),
    ("import numpy as np\nassert np.isclose(f(3), 77)", ["f(3)"], [77.0001], [77.1, [77]]),
    ("from math import isclose\nassert isclose(f(3), 77, abs_tol=0.1)", ["f(3)"], [77.05], [77.2]),
    ("import numpy as np\nassert np.allclose(f(3), [77, 1])", ["f(3)"], [[77, 1], (77.0, 1)], [[], [77], 77, [[77, 1]], [77, 2]]),
    ("import numpy as np\nassert np.allclose(77, f(3))", ["f(3)"], [77.0001], [float("inf"), float("nan"), 78]),
    ("assert abs(f(3) - 77) <= 1e-6 * max(1, abs(f(3)))", ["f(3)", "f(3)"], [(77, 77)], [(float("inf"), float("inf")), (78, 78)]),
    ("assert is_sorted(f([3, 1]))", ["bool(is_sorted(f([3, 1])))"], [True], [False]),
    ("assert f(g(3), h(4)) == 77", ["f(g(3), h(4))"], [77], [1]),
    ("assert f(3) - 77 == 0", ["f(3)"], [77], [0, "x"]),
    ("assert f(3) in (77, 78)", ["f(3)"], [77, 78], [79, (77,)]),
    ("assert f(3) == 77 and f(4) != 77", ["f(3)", "f(4)"], [(77, 1)], [(77, 77), (1, 1)]),
    ("assert not f(3) != 77", ["f(3)"], [77], [76]),
    ("assert (f(3) == 77) == True", ["f(3)"], [77], [True, 76]),
    ("assert sorted(f(3)) == [1, 77]", ["f(3)"], [[77, 1], {77, 1}], [[1], 77, [1, 77, 77]]),
    ("assert set(f(3)) == set([1, 77])", ["f(3)"], [[77, 1, 1]], [[1], 77]),
    ("assert round(f(3), 2) == 77.12", ["f(3)"], [77.1234], [77.2, None]),
    ("assert f(3)[0] == 77 and len(f(3)) == 2", ["f(3)", "len(f(3))"], [([77, 1], 2)], [([1], 2), ([], 2), ([77], 1)]),
    ("assert all(f(x) == y for x, y in [(1, 77), (2, 78)])", ["f(1)", "f(2)"], [(77, 78)], [(77, 77)]),
    ("for x, y in zip([1, 2], [77, 78]):\n    assert f(x) == y", ["f(1)", "f(2)"], None, None),
    ("expected = 77\nfound = f(3)\nassert found == expected", ["f(3)"], [77], [3]),
    ("assert 76 < f(3) <= 77", ["f(3)"], [77], [76, "77", float("nan")]),
    ("assert f(3) is None", ["f(3)"], [None], [0, False]),
    ("assert isinstance(f(3), list)", ["f(3)"], [[]], [()]),
    ("assert f(3)", ["bool(f(3))"], [True], [False]),
    ("assert not f(3)", ["bool(f(3))"], [False], [True]),
    ("assert str(f(3)) == '77'", ["str(f(3))"], ["77"], [77]),
    ("assert sum(10, 15) == 77", ["sum(10, 15)"], [77], [25]),
    ("assert f(3)['a'] == {'b': [0.3, 77]}", ["f(3)"], [{"a": {"b": [0.1 + 0.2, 77]}}], [{}, {"a": {"b": [0.31, 77]}}]),
    ("assert Solution().f([1], k=2) == 77", ["Solution().f([1], k=2)"], [77], [1]),
    ("assert longest([Pair(5, 24), Pair(1, 2)], 4) == 77", ["longest([Pair(5, 24), Pair(1, 2)], 4)"], [77], [1]),
    ("assert Find_Max([1, 2]) == 77", ["Find_Max([1, 2])"], [77], [1]),
    ("assert decode(encode('abc')) == 'abc'", ["decode(encode('abc'))"], ["abc"], ["ab"]),
    ("from solution import f\ndef test_f():\n    wanted = 77\n    assert f(3) == wanted", ["f(3)"], [77], [1]),
    ("import torch\nassert f(torch.ones(2)) == 77", ["f(torch.ones(2))"], [77], [1]),
    ("import random\nassert f(random.randint(77, 77) - 76) == 77", ["f(77 - 76)"], [77], [1]),
]

REFUSED = [
    "assert all(f(i) == i for i in range(10_001))",
    "assert differs(f(7), 49)",
    "assert not differs(f(7), 49)",
    "assert differs(f(7), 49) == False",
    "assert differs([f(7), 49]) == 0",
    "assert f(7).equals(49)",
    "assert differs(Answer(7), 49)",
    "assert differs(other=49, found=f(7)) == 0",
    "assert poly(2, f(2)) < 1e-4",
    "x = f(7)\nassert differs(x, 49) == 0",
    "assert check_it(f'{f(7)} {49}') == 1",
    "assert 49 in f(7)",
    "assert 'yes' not in f(7)",
    "x = [3, 1]\nf(x)\nassert x == [1, 3]",
    "try:\n    f(7)\nexcept ValueError:\n    pass",
    "def near(a, b):\n    return abs(a - b) < 1\nassert near(f(7), 49)",
    "assert (lambda v: v == 49)(f(7))",
    "assert f(7).__eq__(49)",
    "assert Checker(49).matches(f(7))",
    "c = Checker(49)\nassert c.matches(f(7)) == True",
    "assert same(f(7), number(49))",
    "assert matcher(49)(f(7))",
    "assert functools.partial(differs, 49)(f(7)) == 0",
    "assert judge('{} 49'.format(f(7))) == 1",
    "assert ().__class__ == f(7)",
    "assert __import__('os').system('true') == f(7)",
    "assert eval('49') == f(7) and f(eval(1), f(2))",
    "while f(7):\n    pass",
    "assert f(7) == 9 ** 9 ** 9 ** 9",
    "assert list(range(10 ** 12)) == f(7)",
    "assert 1 == 2",
    "assert bytes([49]) == f(7)",
    "assert f(7) == Pair(4, 9)",
    "from torch import equal\nassert equal(f(7), [2])",
    "import torch\nassert torch.equal(f(7), torch.ones(2))",
    "assert f(7) == open('/etc/passwd').read()",
    "from os import system",
]

CALL, LINES = [["f(3)"], ["f(4)"]], [Printed("3\n", "9\n"), Printed("4\n", "16\n")]
LCB = [{"input": "3\n", "output": "9", "testtype": "functional"}, {"input": "4", "output": "16", "testtype": "functional"}]
PRIVATE = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(LCB[1:])))).decode()
LCB_CALLS = [["(Solution().f if 'f' not in globals() else f)(3)"], ["(Solution().f if 'f' not in globals() else f)(4)"]]
CHECK = "METADATA = {'author': 'me'}\n\ndef check(candidate):\n    assert candidate(3) == 9, 'three'\n    assert candidate(4) == 16\n    assert True\n"
PLUS = (
    "import numpy as np\nfrom math import inf\ndef is_floats(x):\n    return isinstance(x, float)\n"
    "def assertion(out, exp, atol):\n    exact_match = out == exp\n    assert exact_match\n"
    "inputs = [[3], [4]]\nresults = [9, 16]\n"
    "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(f(*inp), exp, 0)\n"
)
ROWS = {
    "MBPP": ({"test_list": ["assert f(3) == 9", "assert f(4) == 16"], "test_setup_code": ""}, CALL),
    "HumanEval": ({"test": CHECK, "entry_point": "f"}, CALL),
    "HumanEval with its call": ({"test": CHECK + "check(f)"}, CALL),
    "MBPP+": ({"test": PLUS, "test_list": ["assert f(1) == 1"]}, [["f(*[3])"], ["f(*[4])"]]),
    "stdin": ({"tests": [{"input": "3\n", "output": "9\n"}, {"input": "4\n", "output": "16\n"}]}, LINES),
    "APPS": ({"input_output": json.dumps({"inputs": ["3\n", "4\n"], "outputs": ["9\n", "16\n"]})}, LINES),
    "APPS with a function": ({"input_output": json.dumps({"fn_name": "f", "inputs": [[3], [4]], "outputs": [[9], [16]]})}, LCB_CALLS),
    "TACO": ({"input_output": {"inputs": [["3", ""], ["4", ""]], "outputs": [["9", ""], ["16", ""]]}}, LINES),
    "LiveCodeBench": (
        {"public_test_cases": json.dumps(LCB[:1]), "private_test_cases": PRIVATE, "metadata": json.dumps({"func_name": "f"})},
        LCB_CALLS,
    ),
    "LiveCodeBench with stdin": (
        {"public_test_cases": json.dumps([{"input": a, "output": b, "testtype": "stdin"} for a, b in (("3\n", "9\n"), ("4\n", "16\n"))])},
        LINES,
    ),
    "verl": ({"reward_model": {"style": "rule", "ground_truth": json.dumps({"inputs": ["3\n", "4\n"], "outputs": ["9\n", "16\n"]})}}, LINES),
    "verl with asserts": ({"reward_model": {"ground_truth": json.dumps({"functional": "assert f(3) == 9\nassert f(4) == 16"})}}, CALL),
    "open-r1": (
        {"verification_info": {"language": "python", "test_cases": [
            {"fn_name": "f", "input": "[3]", "output": "9", "type": "function_call"},
            {"fn_name": "f", "input": "[4]", "output": "16", "type": "function_call"},
        ]}},
        LCB_CALLS,
    ),
    "open-r1 with stdin": (
        {"verification_info": {"test_cases": [{"input": i.stdin, "output": i.expected, "type": "stdin_stdout"} for i in LINES]}},
        LINES,
    ),
}  # fmt: skip

# By right and mutated solutions of our own to tasks as MBPP and HumanEval have them: a call, its value, the solution, mutants.
TASKS = [
    ("assert f([1, 2, 3, 4]) == 2.5\nassert f([0.1, 0.2]) == 0.15", "def f(x): return sum(x) / len(x)", ["sum(x)", "x[0]", "2.5"]),
    ("assert f(3) == 0.3", "def f(x): return 0.1 + 0.2", ["0.31", "'0.3'", "[0.3]"]),
    ("assert set(f((3, 4, 5), (5, 7, 4))) == {4, 5}", "def f(a, b): return tuple(set(a) & set(b))", ["a", "()", "set(a) | set(b)"]),
    ("assert f('aab') == {'a': 2, 'b': 1}", "from collections import Counter\ndef f(x): return Counter(x)", ["{}", "dict(a=2)", "3"]),
    ("assert f('aab') == {'a': [0, 1], 'b': [2]}",
     "from collections import defaultdict\ndef f(x):\n  d = defaultdict(list)\n  for i, c in enumerate(x): d[c].append(i)\n  return d",
     ["{}", "{'a': [0], 'b': [2]}"]),
    ("assert f(1, 2) == (1, 2)", "from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(a, b): return P(a, b)", ["[a, b]"]),
    ("from fractions import Fraction\nassert f(1, 3) == Fraction(1, 3)", "from fractions import Fraction\ndef f(a, b): return Fraction(a, b)", ["0.33", "a"]),
    ("assert f('ab') == b'ab'", "def f(x): return x.encode()", ["x", "b'a'"]),
    ("assert f(1, 2) == (1+2j)", "def f(a, b): return complex(a, b)", ["a", "complex(b, a)"]),
    ("from decimal import Decimal\nassert f('0.1') == Decimal('0.1')", "from decimal import Decimal\ndef f(x): return Decimal(x)", ["x", "0.2"]),
    ("assert f([3, 1]) == [1, 3]", "import dataclasses\n@dataclasses.dataclass\nclass D:\n  x: 'int'\ndef f(x): return sorted(D(v).x for v in x)", ["x", "[3]"]),
    ("assert f([3, 1])", "def f(x): return x", ["[]", "None"]),
    ("assert f(2) is True", "def f(x: int) -> bool:\n  assert f.__annotations__['x'] is int\n  return x % 2 == 0", ["False", "1"]),
    ("assert f(3) == 9", "def f(x): return x * x\nif __name__ == '__main__':\n  print(f(int(input())))", ["x", "x + 7"]),
    ("assert f(3) == 9", "import sys\ndef f(x):\n  print('x' * 100_000)\n  return x * x", ["x", "-9"]),
    ("assert f(3) == 9", "class Solution:\n  pass\nimport __main__, pickle, enum\nclass E(enum.IntEnum):\n  N = 9\ndef f(x): return pickle.loads(pickle.dumps(E.N))", ["1"]),
    ("assert list(f([1, 2])) == [2, 4]", "def f(x): return map(lambda v: 2 * v, x)", ["x", "map(str, x)"]),
    ("assert f([1, 2]) == [2, 4]", "def f(x): return [2 * v for v in x]", ["map(lambda v: 2 * v, x)", "(2, 4)", "iter([2, 4])"]),
    ("assert abs(f(4.5) - 0.5) < 1e-6", "def f(x): return x % 1", ["0", "x", "float('nan')", "'0.5'"]),
    ("assert f(date(2020, 1, 2)) == '2020'", "from datetime import date\ndef f(d): return str(d.year)", ["'2'", "2020"]),
    ("assert f(4) == range(4)", "def f(x): return range(x)", ["range(5)", "[0, 1, 2, 3]"]),
]  # fmt: skip

FAKES = [
    "def f(x): return 42\nabs = lambda x: 0",
    "class E:\n  def __eq__(self, o): return True\n  def __ne__(self, o): return False\n  def __sub__(self, o): return 0\ndef f(x): return E()",
    "class E(float):\n  def __eq__(self, o): return True\n  def __sub__(self, o): return 0.0\n  def __abs__(self): return 0.0\n  def __lt__(self, o): return True\n  __rsub__ = __sub__\ndef f(x): return E(1)",
    "class E(list):\n  def __eq__(self, o): return True\n  def __contains__(self, o): return True\ndef f(x): return E()",
    "def f(x): return []",
    "def f(x): return float('nan')",
    "def f(x): return float('inf')",
    "def f(x): return True",
    "def f(x): return range(10 ** 6)",
    "import builtins\nbuiltins.abs = builtins.round = lambda *a: 0\nbuiltins.sorted = builtins.set = lambda *a: 0\ndef f(x): return 0",
    "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 1",
    "import sys\ndef f(x):\n  t = sys._getframe()\n  while t:\n    if 'task' in t.f_locals: return t.f_locals['task']\n    t = t.f_back",
    "import gc\ndef f(x):\n  return [o for o in gc.get_objects() if type(o) is int][:100]",
    "import os; os._exit(0)",
    "import sys; sys.exit(0)",
    "import os\nfor i in range(3, 60):\n  try: os.write(i, b'{\"value\": true}\\n' * 9)\n  except OSError: pass\nos._exit(0)",
    "import os\nfor i in range(3, 60):\n  try: os.write(i, b'started\\n{\"value\": {\"pass\": []}}\\n')\n  except OSError: pass\ndef f(x): return 1",
    "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(x): return 1",
    "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "print('1.0 passed OK True')\ndef f(x): return None",
]  # fmt: skip
FAKED = ["assert f(3) == 77", "assert abs(f(3) - 77.5) < 1e-6", "assert f(3) in (77, 78)", "assert not f(3) != 77", "assert sorted(f(3)) == [1, 77]",
         "import numpy as np\nassert np.allclose(f(3), [77.0])", "assert f(3) - 77 == 0", "assert (f(3) == 77) == True", "assert round(f(3), 2) == 77.5",
         "import math\nassert math.isclose(f(3), 77)", "assert f(3) == [77] and f(4) == [78]", "assert set(f(3)) == {77}", "assert f(3) == 'a77'",
         "def check(candidate):\n    assert candidate(3) == 77\ncheck(f)", "assert 76 < f(3) < 78"]  # fmt: skip
