"""Tests written in Python, split in two: calls of the program run in the sandbox, and all else is evaluated outside.

For `assert abs(f(3) - 0.5) < 1e-6`, only `f(3)` runs inside, and returns a plain value. A name belongs to the program if neither
Python nor the test defines it. Outside the sandbox, an expression is evaluated only if its syntax and its names are in the lists
below. A test is rejected if it cannot be split without sending an expected value into the sandbox.
"""

from __future__ import annotations

import ast
import builtins
import copy
import itertools
import math
import random
import re
import string
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from psigrad.language.rewards import code_values as values

_MOST = 10_000  # tests of a row, and rounds of its loops
_SIGNS = {"Add": "+", "Sub": "-", "Mult": "*", "Div": "/", "FloorDiv": "//", "Mod": "%", "Pow": "**"}
_SIGNS |= {"Eq": "==", "NotEq": "!=", "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">="}
_SIGNS |= {"Is": "is", "IsNot": "is not", "In": "in", "NotIn": "not in"}
# Names of the program in a test that imports from it.
_THE_PROGRAM = ("solution", "main", "program", "your_module")
_WORD = re.compile(r"[^\W\d]\w*")
# Names that the repr of a constant can contain, and the modules from which the sandbox imports them.
_HOMES = dict.fromkeys(("inf", "nan"), "math") | {"Counter": "collections", "deque": "collections", "Fraction": "fractions"}
# Functions of one argument that only read an object: they run inside with the call, and contain no expected value.
_INSIDE = ("str", "repr", "len", "bool")
_PYTHONS = """abs all any bin bool chr complex dict divmod enumerate float frozenset hex int isinstance len list max min ord
    reversed round set sorted str sum tuple zip"""
_OURS = (Counter, OrderedDict, defaultdict, deque, values.Fraction, values.Decimal, values.isclose, values.allclose)
# The parts of an expression outside the sandbox.
_PARTS = """Constant Name Load Store Tuple List Set Dict BoolOp And Or UnaryOp Not USub UAdd Call keyword Starred Subscript Slice
    IfExp ListComp GeneratorExp SetComp DictComp comprehension"""


def _names() -> dict[str, Any]:
    """Return the names that a test may use outside the sandbox, with their values. Random numbers are the same in every run."""
    dice = random.Random(0)
    drawn = {"randint": dice.randint, "choice": dice.choice, "random": dice.random, "uniform": dice.uniform}
    arrays = {"allclose": values.allclose, "isclose": values.allclose, "inf": math.inf, "nan": math.nan, "array": list}
    slow = dict.fromkeys(("factorial", "comb", "perm"))  # removes these names, whose functions can be slow
    modules = {
        "math": SimpleNamespace(**{**vars(math), **slow, "isclose": values.isclose, "pow": values.power}),
        "string": SimpleNamespace(**vars(string)),
        "random": SimpleNamespace(**drawn),
        "copy": SimpleNamespace(deepcopy=copy.deepcopy, copy=copy.copy),
        "collections": SimpleNamespace(Counter=Counter, OrderedDict=OrderedDict, defaultdict=defaultdict, deque=deque),
        **dict.fromkeys(("np", "numpy"), SimpleNamespace(**arrays)),
    }
    plain = dict.fromkeys(dir(builtins)) | {name: getattr(builtins, name) for name in _PYTHONS.split()}
    plain |= {one.__name__: one for one in _OURS} | {"range": values.short_range, "type": lambda value: type(value)}
    own = {"_arithmetic": values.arithmetic, "_compare": values.compare}
    return {**plain, **own, **drawn, **modules, "deepcopy": copy.deepcopy, "pi": math.pi, "inf": math.inf, "nan": math.nan}


@dataclass(frozen=True)
class Evaluated:
    """A check: expressions that call the program, and the function that judges their values outside the sandbox."""

    expressions: tuple[str, ...]
    judge: Callable[..., Any]
    """A function of the values that returns True if they are right. It may raise, such as `TypeError` for a wrong type."""


def take_apart(source: str, entry: str = "") -> tuple[list[Evaluated], str]:
    """Return the checks of a test, and the lines of imports that its calls need in the sandbox.

    `entry` is the function that HumanEval's `check` tests. Raise `ValueError`, with the line, for a test that cannot be split.
    """
    tree = ast.parse(source)
    reader = _Reader({entry, *_own_names(tree)})
    reader.read(tree.body)
    if "check" in reader.functions and not reader.checked:
        if not entry:
            raise ValueError("check(candidate) needs the column entry_point, the name of the function that it checks")
        reader.call_check(_name(entry))
    for name, function in reader.functions.items():
        if name.startswith("test") and not function.args.args:  # pytest finds them in the same way
            reader.read(function.body)
    used = {word for check in reader.checks for one in check.expressions for word in _WORD.findall(one)}
    needed = [ast.unparse(i) for i in reader.imports if used & _bound_by(i)]
    needed += [f"from {module} import {name}" for name, module in _HOMES.items() if name in used]
    return reader.checks, "\n".join(needed)


def _bound_by(statement: ast.Import | ast.ImportFrom) -> set[str]:
    return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}


def _own_names(tree: ast.Module) -> set[str]:
    """Return the names of Python's functions that the program defines itself, such as its own `sum`.

    If all functions that the test calls have Python's names, the program defines those that an assert calls directly.
    """
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    if called - _names().keys():
        return set()
    own = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assert(ast.Compare(ast.Call(ast.Name(name), given))) | ast.Assert(ast.Call(ast.Name(name), given)):
                own |= {name} if not any(isinstance(n, ast.Call) for part in given for n in ast.walk(part)) else set()
    return own


class _Reader:
    """A reader of the statements of a test: assignments, loops over known values, functions such as `check`, and asserts."""

    def __init__(self, own: set[str]) -> None:
        self.names = {name: value for name, value in _names().items() if name not in own}
        self.known = dict[str, ast.expr]()
        self.checks, self.imports = list[Evaluated](), list[ast.Import | ast.ImportFrom]()
        self.functions, self.foreign = dict[str, ast.FunctionDef](), set[str]()
        self.checked, self._rounds = False, 0

    def read(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            try:
                self._one(statement)
            except (TypeError, LookupError, ArithmeticError, AttributeError, NameError, SyntaxError, RecursionError) as error:
                raise ValueError(f"line {statement.lineno}: {error}: {ast.unparse(statement)[:200]}") from error

    def _one(self, statement: ast.stmt) -> None:
        match statement:
            case ast.ImportFrom() if statement.module in _THE_PROGRAM:
                pass
            case ast.Import() | ast.ImportFrom():
                self.imports.append(statement)
                self.foreign |= _bound_by(statement)
            case ast.Pass() | ast.Expr(ast.Constant() | ast.Name() | ast.Call(ast.Name("print"))):
                pass
            case ast.FunctionDef():
                self.functions[statement.name] = statement
            case ast.Assign([target], value):
                self._bind(target, self._substitute(value))
            case ast.For(target, iterable, body, []):
                for item in self._constant(self._substitute(iterable)):
                    self._rounds += 1
                    if self._rounds > _MOST:
                        raise ValueError(f"line {statement.lineno}: the loops of the test have more than {_MOST} rounds")
                    self._bind(target, _literal(item))
                    self.read(body)
            case ast.Assert():
                self._check(self._substitute(statement.test), statement.lineno)
            case ast.Expr(ast.Call(ast.Name("check"), [candidate], [])) if "check" in self.functions:
                self.call_check(candidate)
            case ast.Expr(ast.Call(ast.Name("assertion"), [found, wanted, tolerance], [])) if "assertion" in self.functions:
                # in MBPP+ and its like: equal, or close if the expected value has floats
                call = ast.Call(_name("_agree"), [self._substitute(part) for part in (found, wanted, tolerance)], [])
                self.names["_agree"] = values.agree
                self._check(call, statement.lineno)
            case _:
                raise ValueError(
                    f"line {statement.lineno} is not a statement that a test may have (import, assignment, for loop, function, "
                    f"assert): {ast.unparse(statement)[:200]}"
                )

    def call_check(self, candidate: ast.expr) -> None:
        """Read the body of `check`, with `candidate` in place of its parameter."""
        self.checked, function = True, self.functions["check"]
        self.known[function.args.args[0].arg] = candidate
        self.read(function.body)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [_literal(v) for v in self._constant(value)]
            for name, part in zip(target.elts, parts, strict=True):
                self._bind(name, part)
        elif isinstance(target, ast.Name):
            self.known[target.id] = value if self._calls(value) else _literal(self._constant(value))
        else:
            raise ValueError(f"line {target.lineno} assigns to {ast.unparse(target)}; a test may assign only to names")

    def _substitute(self, node: ast.expr) -> ast.expr:
        """Return the expression with known values in place of names."""
        used = _names_in(node)
        known = {name: self.known[name] for name in used - _bound_in(node) if name in self.known}
        if not known:
            return node

        class Substitute(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> ast.expr:
                return copy.deepcopy(known[name.id]) if name.id in known else name

        result: ast.expr = Substitute().visit(copy.deepcopy(node))
        return result

    def _calls(self, node: ast.AST) -> bool:
        """Return True if the node uses a name of the program."""
        theirs = _names_in(node) - self.names.keys()
        return bool(theirs and theirs - _bound_in(node))

    def _constant(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except (TypeError, ValueError):
            return _Outside(self.names).code(node, ())()

    def _check(self, test: ast.expr, line: int) -> None:
        if len(self.checks) >= _MOST:
            raise ValueError(f"line {line}: the test has more than {_MOST} asserts")
        if helper := next((n.id for n in ast.walk(test) if isinstance(n, ast.Name) and n.id in self.functions), ""):
            raise ValueError(f"line {line} calls {helper}, a function of the test; an assert may call only the tested program")
        apart = _Apart(self)
        outer = apart.truth(test)
        if not apart.inside:
            if not self._constant(test):
                raise ValueError(
                    f"line {line} can never pass, since it is false and does not call the program: {ast.unparse(test)[:200]}"
                )
            return
        judged = _Outside(self.names).code(outer, [f"_{i}" for i in range(len(apart.inside))])
        self.checks.append(Evaluated(tuple(apart.inside), judged))


class _Apart:
    """A splitter of expressions: `inside` collects the parts for the sandbox. Outside, a name replaces each of them."""

    def __init__(self, reader: _Reader) -> None:
        self._reader, self.inside = reader, list[str]()
        self._yes_or_no = False

    def truth(self, node: ast.expr) -> ast.expr:
        """Return the outer part of an expression of which only the truth value matters.

        The sandbox then returns `bool(value)`, since the value need not be plain: it can be an object of the program.
        """
        match node:
            case ast.BoolOp(op, parts):
                return ast.BoolOp(op, [self.truth(part) for part in parts])
            case ast.UnaryOp(ast.Not(), part):
                return ast.UnaryOp(ast.Not(), self.truth(part))
        if self._is_the_programs(node):
            self._yes_or_no = True
            sent = self._send(ast.Call(_name("bool"), [node], []))
            self._yes_or_no = False
            return sent
        return self.visit(node)

    def visit(self, node: ast.expr) -> ast.expr:
        """Return the outer part of an expression, in which names replace the parts for the sandbox."""
        calls = self._reader._calls
        if not calls(node):
            if not isinstance(node, ast.Starred):
                self._reader._constant(node)  # an error here is the row's fault, not the program's
            return node
        if self._is_the_programs(node):
            return self._send(node)
        match node:
            case ast.BoolOp() | ast.UnaryOp(ast.Not()):
                return self.truth(node)
            case ast.Starred(part):
                return ast.Starred(self.visit(part), ast.Load())
            case ast.Call(ast.Name(name), [part], []) if name in _INSIDE and self._is_the_programs(part):
                return self._send(node)
            case ast.Call(function, arguments, keywords) if not any(calls(k) for k in keywords):
                return ast.Call(function, [self.visit(part) for part in arguments], keywords)
            case ast.Compare(left, kinds, others):
                if any(isinstance(kind, ast.In | ast.NotIn) and calls(part) for kind, part in zip(kinds, others, strict=True)):
                    raise ValueError(
                        "`in` would search a container that the program returns, which could claim to contain anything: "
                        f"{ast.unparse(node)[:200]}"
                    )
                theirs = [side for side in (left, *others) if calls(side)]
                made_of = (side for side in theirs if self._is_the_programs(side) and not self._result(side, self._yes_or_no))
                if len(theirs) > 1 and any(made_of):
                    raise ValueError(
                        "two values of the program are compared, and the program could call them equal: "
                        f"{ast.unparse(node)[:200]}"
                    )
                self._yes_or_no = any(isinstance(p, ast.Constant) and p.value in (True, False, None) for p in (left, *others))
                made: ast.expr = ast.Compare(self.visit(left), kinds, [self.visit(part) for part in others])
                self._yes_or_no = False
                return made
            case ast.BinOp(left, kind, right):
                return ast.BinOp(self.visit(left), kind, self.visit(right))
            case ast.UnaryOp(kind, part):
                return ast.UnaryOp(kind, self.visit(part))
            case ast.Subscript(value, index) if not calls(index):
                return ast.Subscript(self.visit(value), index, ast.Load())
            case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts):
                return type(node)([self.visit(part) for part in parts])
            case ast.ListComp(element, [loop]) | ast.GeneratorExp(element, [loop]) | ast.SetComp(element, [loop]):
                return self._unroll(element, loop)
        raise ValueError(f"the calls of the program cannot be split from this; write `call == value`: {ast.unparse(node)[:200]}")

    def _unroll(self, element: ast.expr, loop: ast.comprehension) -> ast.expr:
        reader, parts = self._reader, list[ast.expr]()
        if reader._calls(loop.iter) or loop.ifs:
            raise ValueError(f"the loop has a condition, or reads values that only the program knows: {ast.unparse(loop)[:200]}")
        before = dict(reader.known)
        items = list(itertools.islice(reader._constant(loop.iter), _MOST + 1))
        if len(items) > _MOST:
            raise ValueError(f"the loop has more than {_MOST} rounds: {ast.unparse(loop)[:200]}")
        for item in items:
            reader._bind(loop.target, _literal(item))
            parts.append(self.visit(reader._substitute(element)))
            reader.known = dict(before)
        return ast.List(parts, ast.Load())

    def _is_the_programs(self, node: ast.expr) -> bool:
        """Return True if the node is a call of the program, or of a method of an object that the program made."""
        while isinstance(node, ast.Call | ast.Attribute):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id not in self._reader.names and node.id not in self._reader.foreign

    def _send(self, node: ast.expr) -> ast.expr:
        """Add an expression to `inside`, and return the name that replaces it.

        Raise `ValueError` if a call combines the program's result with any other value, which could be the expected one.
        """
        for part, every_call in itertools.product(ast.walk(node), {False, self._yes_or_no}):
            children = [c for c in ast.iter_child_nodes(part) if isinstance(c, ast.expr | ast.keyword)]
            beside = [c for c in children if not any(self._result(inner, every_call) for inner in ast.walk(c))]
            # the called function is not a second operand, unless it was made from arguments
            made = isinstance(part, ast.Call) and beside == [part.func] and not _is_given(part.func)
            # If only yes or no comes back, the program itself compares two objects that are made from arguments.
            compared = every_call and len(children) > len(beside) and sum(map(_is_given, children)) > 1
            if (len(children) > len(beside) > 0 and not made) or compared:
                raise ValueError(
                    "one call takes a result of the program and a value that may be the expected one; write `call == value`: "
                    f"{ast.unparse(part)[:200]}"
                )
        self.inside.append(ast.unparse(node))
        return _name(f"_{len(self.inside) - 1}")

    def _result(self, node: ast.AST, every_call: bool = False) -> bool:
        """Return True if the node is a call of the program that returns a result, not just a new object.

        A name with a capital is taken for a class, whose call makes an object. With `every_call`, for tests of a truth value,
        every call is a result.
        """
        if not (isinstance(node, ast.Call) and self._is_the_programs(node)):
            return False
        if every_call:
            return True
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        return not name[:1].isupper()


class _Outside(ast.NodeTransformer):
    """A compiler of the expressions outside the sandbox.

    It accepts only listed syntax. Arithmetic gets bounds, and equality gets a tolerance.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def code(self, node: ast.expr, given: Sequence[str]) -> Callable[..., Any]:
        """Compile an expression into a function of positional arguments, one for each of the names `given`."""
        for name in sorted(_names_in(node) - _bound_in(node) - {*given}):
            if self._names.get(name) is None:
                raise ValueError(f"{name} is unknown outside the sandbox; write a value instead: {ast.unparse(node)[:200]}")
        body = self.visit(copy.deepcopy(node))
        arguments = ast.arguments([], [ast.arg(name) for name in given], None, [], [], None, [])
        tree = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, body)))
        made: Callable[..., Any] = eval(compile(tree, "test", "eval", dont_inherit=True), {**self._names, "__builtins__": {}})
        return made

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Visit a node whose type is in `_PARTS`. Raise `ValueError` for others."""
        if type(node).__name__ not in _PARTS.split():
            raise ValueError(f"this cannot run outside the sandbox; write a value instead: {ast.unparse(node)[:200]}")
        return super().generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Allow only names of the listed modules, and `"…".join`. Raise `ValueError` for others."""
        match node:
            case ast.Attribute(ast.Constant(str()), "join"):
                return node
            case ast.Attribute(ast.Name(module), name) if isinstance(self._names.get(module), SimpleNamespace):
                if name[:1] != "_" and vars(self._names[module]).get(name) is not None:
                    return node
        raise ValueError(f"this cannot run outside the sandbox; write a value instead: {ast.unparse(node)[:200]}")

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Replace an operator by a call of `values.arithmetic`, which is bounded."""
        sign = ast.Constant(_SIGNS[type(node.op).__name__])
        return ast.Call(_name("_arithmetic"), [sign, self.visit(node.left), self.visit(node.right)], [])

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Replace each pair of a chain such as `a < b < c` by a call of `values.compare`."""
        sides = [self.visit(side) for side in (node.left, *node.comparators)]
        signs = [ast.Constant(_SIGNS[type(kind).__name__]) for kind in node.ops]
        pairs = zip(signs, sides, sides[1:], strict=False)
        calls: list[ast.expr] = [ast.Call(_name("_compare"), list(pair), []) for pair in pairs]
        return calls[0] if len(calls) == 1 else ast.BoolOp(ast.And(), calls)


def _is_given(node: ast.AST) -> bool:
    """Return True if the test itself puts a value into the node: a constant, or a call with arguments."""
    return any(isinstance(n, ast.Constant) or (isinstance(n, ast.Call) and bool(n.args or n.keywords)) for n in ast.walk(node))


def _names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _bound_in(node: ast.AST) -> set[str]:
    """Return the names that the node binds itself, such as the parameters of a lambda or the variable of a comprehension."""
    stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}


def _name(text: str) -> ast.Name:
    return ast.Name(text, ast.Load())


def _literal(value: Any) -> ast.expr:
    """Return a constant as an expression. Raise `ValueError` if its repr is not an expression."""
    return ast.parse(repr(value), mode="eval").body
