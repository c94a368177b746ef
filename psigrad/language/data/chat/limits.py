"""Limits on the work of a chat template, a program that comes with a model and could loop forever or fill the memory.

A template that runs for too long or makes too much data raises `TemplateLimit`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jinja2 import Environment, Template, TemplateSyntaxError, nodes, pass_context
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

from psigrad.errors import UserError

SECONDS = 10.0
"""The maximum processor time of one rendering in its thread, in seconds."""
LENGTH = 1 << 27
"""The maximum total length, in characters, of all large values that one rendering makes. A list's element counts as eight."""
LARGEST = 10**6
"""The largest integer that is allowed in a template and in the arguments of its calls."""
_FOLDED = 10**8  # the largest product of integers in a constant expression, which Jinja computes when it compiles
_BITS = 4096
_WIDE = re.compile(r"%[^\d%]{0,4}(?:\d{7}|\*)|\{[^{}]*\d{7}")  # a width in a format
_SIZED, _SMALL = (str, list, tuple, dict), 4096  # values of at most this length are not counted
_TRIES = 3
_EVERY = 16  # iterations between two looks at the clock


class TemplateLimit(UserError):
    """An error for a template that has exceeded a limit."""

    def __init__(self, what: str) -> None:
        super().__init__(f"The chat template {what}; set chat_template_path to another template.")
        self.what = what


class _Spent(threading.local):
    """The state of a thread's rendering: its deadline in processor time, and the total length of its large values so far."""

    until, made = math.inf, -math.inf


_spent, _ticks = _Spent(), itertools.count()
_exceeded: dict[str, list[str]] = {}


@contextlib.contextmanager
def limit_rendering(template: str) -> Iterator[None]:
    """Raise `TemplateLimit` in the `with` block if a rendering of this template exceeds a limit of this module."""
    # otherwise a slow template would take `SECONDS` for each of the dozens of conversations that find its features
    if len(before := _exceeded.get(template, [])) == _TRIES:
        raise TemplateLimit(before[0])
    compile_template(template)
    _spent.until, _spent.made = time.thread_time() + SECONDS, 0
    try:
        yield
    except TemplateLimit as error:
        _exceeded.setdefault(template, []).append(error.what)
        raise
    finally:
        _spent.until, _spent.made = math.inf, -math.inf


def compile_template(template: str) -> Template:
    """Return transformers' compiled template, changed to count its work. Raise `TemplateLimit` if a constant is too large."""
    _check_constants(template)
    found: Template = _compile_jinja_template(template)
    if found.environment.filters.get("psigrad_tick") is not _tick:
        _make_count(found, template)
    return found


@functools.lru_cache(maxsize=64)
def _check_constants(template: str) -> None:
    environment: Environment = _compile_jinja_template("").environment
    try:
        tree = environment.parse(template)
    except (TemplateSyntaxError, RecursionError):  # raised again where the template is compiled
        return
    if large := [one.value for one in tree.find_all(nodes.Const) if isinstance(one.value, int) and abs(one.value) > LARGEST]:
        raise TemplateLimit(f"contains the number {str(large[0])[:40]}, which is too large")
    for node in tree.find_all((nodes.Mod, nodes.Filter)):
        if getattr(node, "name", "format") == "format":
            _check(math.inf if any(_WIDE.search(str(one.value)) for one in node.find_all(nodes.Const)) else 0)
    for kinds, most in (((nodes.Mul, nodes.Filter, nodes.Test), _FOLDED), (nodes.Pow, 64)):
        for node in tree.find_all(kinds):
            values = [abs(one.value) for one in node.find_all(nodes.Const) if isinstance(one.value, int)]
            if math.prod(value for value in values if value > 1) > most:
                raise TemplateLimit(f"computes a value that is too large from the constants in line {node.lineno}")


def _make_count(template: Template, text: str) -> None:
    environment = template.environment
    environment.filters = {name: _count_calls(name, function) for name, function in environment.filters.items()}
    environment.filters |= {"psigrad_tick": _tick, **{f"psigrad_{name}": function for name, function in _OPERATORS.items()}}
    environment.globals.pop("lipsum", None)
    call = environment.call  # type: ignore[attr-defined]

    def counted(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # the text whose method is called
            _check_arguments(getattr(function, "__name__", ""), [owner, *args, *kwargs.values()])
        return _add_up(call(context, function, *args, **kwargs))

    environment.call = counted  # type: ignore[attr-defined]
    environment.concat = _concat  # type: ignore[method-assign]
    made = environment.from_string(_Counting().visit(environment.parse(text)))
    template.root_render_func, template.blocks = made.root_render_func, made.blocks


class _Counting(NodeTransformer):
    """Adds a check of the processor time to each loop and macro of a template, and counts the sizes of the operators' results."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.Filter(nodes.Const(0), "psigrad_tick", [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    visit_Macro: Callable[..., Any] = visit_For

    def visit_BinExpr(self, node: nodes.BinExpr) -> nodes.Node:
        self.generic_visit(node)
        name = f"psigrad_{type(node).__name__.lower()}"
        return nodes.Filter(node.left, name, [node.right], [], None, None, lineno=node.lineno)

    visit_Add = visit_Mul = visit_Mod = visit_Pow = visit_BinExpr

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "psigrad_concat", [], [], None, None, lineno=node.lineno)


@pass_context
def _tick(context: Any, value: int) -> int:
    if next(_ticks) % _EVERY == 0 and time.thread_time() > _spent.until:
        raise TemplateLimit(f"runs for more than {SECONDS:g} s")
    return value


def _add_up(value: Any) -> Any:
    if isinstance(value, _SIZED) and len(value) > _SMALL:
        _spent.made += len(value) * (1 if isinstance(value, str) else 8)
        if _spent.made > LENGTH:
            raise TemplateLimit(f"writes more than {LENGTH:,} characters")
    return value


def _check(size: float) -> None:
    if size > LENGTH:
        raise TemplateLimit(f"writes more than {LENGTH:,} characters")


def _multiply(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        _check(LENGTH * (a.bit_length() + b.bit_length()) / _BITS)
    else:
        for one, other in ((a, b), (b, a)):
            _check(len(one) * other if isinstance(one, str | list | tuple) and isinstance(other, int) else 0)
    return _add_up(a * b)


def _power(a: Any, b: Any) -> Any:
    _check(LENGTH * a.bit_length() * abs(b) / _BITS if isinstance(a, int) and isinstance(b, int) else 0)
    return a**b


def _modulo(a: Any, b: Any) -> Any:
    _check(math.inf if isinstance(a, str) and _WIDE.search(a) else 0)
    return _add_up(a % b)


def _concat(parts: Iterable[Any]) -> Any:
    texts, total = list[str](), 0
    for part in parts:
        texts.append(str(part))
        total += len(texts[-1])
        if total > LENGTH:
            _check(total)
    return _add_up("".join(texts))


_OPERATORS = {"add": lambda a, b: _add_up(a + b), "mul": _multiply, "pow": _power, "mod": _modulo, "concat": _concat}


def _count_calls(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 or kwargs:
            _check_arguments(name, [*args, *kwargs.values()])
        return _add_up(function(*args, **kwargs))

    return counted


_MULTIPLYING = ("replace", "indent", "expandtabs", "join", "format")


def _check_arguments(name: str, values: Sequence[Any]) -> None:
    """Raise `TemplateLimit` if a call `name(*values)` has an integer above `LARGEST`, or would return too long a text."""
    counts = [value for value in values if type(value) is int]
    if counts and max(map(abs, counts)) > LARGEST:
        raise TemplateLimit("calls a function with a number that is too large")
    if name not in _MULTIPLYING:
        return
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) > 2:
        _check(texts[0].count(texts[1]) * len(texts[2]))
    elif name in ("indent", "expandtabs") and texts:
        _check((texts[0].count("\n") + texts[0].count("\t") + 1) * max([0, *counts, *map(len, texts[1:])]))
    elif name == "join":
        listed = [one for value in values if isinstance(value, list | tuple) for one in value]
        _check(sum(len(one) for one in listed if isinstance(one, str)) + len(listed) * max([0, *map(len, texts)]))
    elif name == "format":
        _check(math.inf if any(map(_WIDE.search, texts)) else 0)
