"""Check the names and types of the arguments for a chat template, since a template ignores arguments that it does not read."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from psigrad.errors import UserError, nearest
from psigrad.language.data.chat.limits import compile_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORDS = {bool: "true or false", str: "a string", int: "a number", float: "a number"}


def templates_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the source of each chat template of a tokenizer, which can have several under different names."""
    given = tokenizer.chat_template or {}
    return list(given.values()) if isinstance(given, dict) else [given]


def check_arguments(templates: Sequence[str], kwargs: Mapping[str, Any]) -> None:
    """Raise `UserError` for templates that are not valid Jinja, and for arguments that no template reads or whose type is wrong.

    For example, an argument that is used only in the condition `if name` must be a boolean.
    """
    read = [_kinds_read(text) for text in templates]
    names = {"chat_template"}.union(*read)
    for name, value in kwargs.items():
        if name not in names:
            near = nearest(name, sorted(names)) or "."
            raise UserError(
                f"chat_template_kwargs has {name!r}, which the chat template does not read; remove this argument{near}"
            )
        kinds = {kind for one in read for kind in one.get(name, ())}
        if kinds and kinds <= _WORDS.keys() and value is not None and type(value) not in kinds:
            wanted = " or ".join(sorted({_WORDS[kind] for kind in kinds}))
            raise UserError(f"chat_template_kwargs has {name} = {value!r}; the chat template expects {wanted}.")


@functools.lru_cache(maxsize=64)
def _kinds_read(template: str) -> dict[str, set[type]]:
    """Return the names that a template reads but never sets, each with the allowed types of its value (`object`: any type)."""
    try:
        environment: Environment = compile_template(template).environment
    except TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        raise UserError(
            f"The chat template is not valid Jinja ({where}); fix it, or set chat_template_path to another one."
        ) from None
    tree = environment.parse(template)
    found: dict[str, set[type]] = {name: set() for name in meta.find_undeclared_variables(tree)}
    above = {id(child): node for node in tree.find_all(nodes.Node) for child in node.iter_child_nodes()}
    for use in tree.find_all(nodes.Name):
        if use.name in found:
            found[use.name] |= set(_kinds(use, above))
    return found


def _kinds(use: nodes.Node, above: Mapping[int, nodes.Node]) -> Iterator[type]:
    """Yield the types that one `use` of a variable in a template expects. `above` maps the id of each node to its parent."""
    node = above[id(use)]
    beside = [child for child in node.iter_child_nodes() if child is not use]
    if isinstance(node, nodes.Test) and node.name in ("defined", "undefined", "none"):
        return
    if isinstance(node, nodes.Test):
        yield bool if node.name in ("true", "false", "boolean") else str if node.name == "string" else object
    elif isinstance(node, nodes.Compare) and use is node.expr:
        sides = [operand.expr for operand in node.ops]
        yield from (type(side.value) if isinstance(side, nodes.Const) else object for side in sides)
    elif isinstance(node, nodes.Filter) and node.name in ("default", "d") and node.args and isinstance(node.args[0], nodes.Const):
        yield type(node.args[0].value)
    elif isinstance(node, nodes.Assign) and use is node.target:
        yield from [type(node.node.value)] if isinstance(node.node, nodes.Const) else []
    elif isinstance(node, nodes.CondExpr) and use is not node.test:
        yield from {type(other.value) for other in beside if isinstance(other, nodes.Const)} or {object}
    elif isinstance(node, nodes.Not | nodes.And | nodes.Or | nodes.If | nodes.CondExpr):
        yield bool
    else:
        yield object
