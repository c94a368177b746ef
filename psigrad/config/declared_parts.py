"""The parts that a method is declared with, read from the source of `psigrad/objective/`: help must be there before torch is."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

_OBJECTIVE = Path(__file__).parents[1] / "objective"
_PARTS = ("advantage", "group_advantage", "ratio", "surrogate", "aggregate", "kl", "keep")
_METHODS = ("policy_gradient", "catalog", "preference_loss", "preference_catalog", "online_preference")
# A mapping in these slots of a method without such a part makes this one.
_FILLS = {"kl": "KL", "entropy": "bonus", "critic": "value_loss"}
# Parameters that are parts themselves.
_INNER = ("psi", "returns", "surrogate")


@dataclass(frozen=True)
class DeclaredPart:
    """A part, or a method: its name, and what each of its parameters is, where that is a number, a word or another part."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


def method(spec: Any) -> DeclaredPart | None:
    """The parts of a setting `algorithm` or `loss`: a preset's name, or a mapping. None for an object, or a name unknown here."""
    if isinstance(spec, str):
        return _methods().get(spec)
    if not isinstance(spec, Mapping):
        return None
    start = _methods().get(str(spec.get("preset", "")), DeclaredPart("PolicyGradient"))
    changes = {name: value for name, value in spec.items() if name not in ("preset", "name")}
    return replace(start, parameters={**start.parameters, **{n: _changed(start, n, value) for n, value in changes.items()}})


def found(root: DeclaredPart, prefix: str = "") -> list[tuple[str, DeclaredPart]]:
    """(dotted place, part) of all parts below `root`."""
    listed = []
    for name, value in root.parameters.items():
        if isinstance(value, DeclaredPart):
            listed += [(prefix + name, value), *found(value, f"{prefix}{name}.")]
    return listed


def _changed(within: DeclaredPart, slot: str, value: Any) -> Any:
    before = within.parameters.get(slot)
    if isinstance(value, str):
        return _plain(value) if slot not in ("beta", "margin") else value
    if isinstance(value, list | tuple):
        return tuple(_changed(within, slot, item) for item in value)
    if not isinstance(value, Mapping):
        return value
    if "part" in value or not isinstance(before, DeclaredPart):
        before = _plain(str(value.get("part", _FILLS.get(slot, ""))))
    new = {name: _changed(before, name, v) if name in _INNER else v for name, v in value.items() if name != "part"}
    return replace(before, parameters={**before.parameters, **new})


def _plain(name: str) -> DeclaredPart:
    """A part with its usual parameters."""
    return DeclaredPart(name, dict(_classes().get(name, {})))


@cache
def _trees() -> dict[str, ast.Module]:
    names = (*_PARTS, "critic", "entropy", *_METHODS)
    return {name: ast.parse(next(_OBJECTIVE.rglob(f"{name}.py")).read_text(encoding="utf-8")) for name in names}


@cache
def _classes() -> dict[str, dict[str, Any]]:
    """DeclaredPart -> its parameters with their defaults, those of its base first."""
    made: dict[str, dict[str, Any]] = {}
    for tree in _trees().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                inherited = [made[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in made]
                made[node.name] = {name: value for fields in inherited for name, value in fields.items()}
                made[node.name] |= {
                    line.target.id: None if line.value is None else _value(line.value, made, {})
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and "ClassVar" not in ast.dump(line)
                }
    return made


@cache
def _methods() -> dict[str, DeclaredPart]:
    """Method -> its parts, out of the declarations X = METHODS.declare("x", "summary", PolicyGradient(…))."""
    constants: dict[str, DeclaredPart] = {}
    named: dict[str, DeclaredPart] = {}
    for module in _METHODS:
        for node in _trees()[module].body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            call = node.value
            if isinstance(call.func, ast.Attribute) and call.func.attr == "declare":
                made = _value(call.args[2], _classes(), constants)
                constants[ast.unparse(node.targets[0])] = named[ast.literal_eval(call.args[0])] = made
    if "DPO" in constants:
        named["online_dpo"] = DeclaredPart("OnlinePreference", {"loss": constants["DPO"]})
    return named


def _value(node: ast.expr, classes: Mapping[str, Mapping[str, Any]], constants: Mapping[str, DeclaredPart]) -> Any:
    """What an expression of a declaration stands for."""
    if isinstance(node, ast.Tuple):
        return tuple(
            item
            for each in node.elts
            for item in (
                _value(each.value, classes, constants) if isinstance(each, ast.Starred) else (_value(each, classes, constants),)
            )
        )
    if isinstance(node, ast.Name):
        return constants.get(node.id, DeclaredPart(node.id))
    if isinstance(node, ast.Attribute):
        owner = constants.get(ast.unparse(node.value))
        return DeclaredPart(node.attr) if owner is None else owner.parameters[node.attr]
    if isinstance(node, ast.Call):
        return _called(node, classes, constants)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _called(node: ast.Call, classes: Mapping[str, Mapping[str, Any]], constants: Mapping[str, DeclaredPart]) -> Any:
    words = {word.arg: word.value for word in node.keywords if word.arg}
    name = ast.unparse(node.func)
    if name == "field":
        factory = words.get("default_factory")
        return DeclaredPart(factory.id, dict(classes.get(factory.id, {}))) if isinstance(factory, ast.Name) else None
    given = {word: _value(value, classes, constants) for word, value in words.items()}
    if name == "replace":
        start = _value(node.args[0], classes, constants)
        return replace(start, parameters={**start.parameters, **given})
    usual = classes.get(name, {})
    positional = dict(zip(usual, (_value(value, classes, constants) for value in node.args), strict=False))
    return DeclaredPart(name, {**usual, **positional, **given})
