"""A chat template that loops or fills the memory ends in a sentence, and every other one renders as transformers alone does."""

from __future__ import annotations

from datetime import date

import pytest
import scripts
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from psigrad.errors import UserError
from psigrad.language.data.chat import limits, rendering
from psigrad.language.data.chat.arguments import check_arguments

maker = scripts.load("docs/make/chat_templates.py")
GROW = "{{% set n = namespace(s={0}) %}}{{% for i in range(60) %}}{{% set n.s = {1} %}}{{% endfor %}}{{{{ n.s }}}}"
BIG = "{% set a = 'x' * 100000 %}"
TIME, SIZE, NUMBER, CONSTANTS = "runs for more than", "writes more than", "too large", "contains the number|constants in line 1"
HOSTILE = [
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", TIME),
    (GROW.format("'xy'", "n.s + n.s"), SIZE),
    (GROW.format("'xy'", "n.s ~ n.s"), SIZE),
    (GROW.format("[1, 2]", "n.s + n.s"), SIZE),
    (GROW.format("10", "n.s * 10") + "{{ 'x'.center(n.s) }}", NUMBER),
    (GROW.format("1", "n.s * 2 if i < 40 else n.s") + "{{ 'x' * n.s }}", SIZE),
    (GROW.format("10", "n.s ** 9"), SIZE),
    (BIG + "{% for a in range(99999) %}{{ a ~ 'x' * 100000 }}{% endfor %}", SIZE),
    (BIG + "{{ a.replace('x', a) }}", SIZE),
    (BIG + "{{ a|replace('x', a) }}", SIZE),
    (BIG + "{{ a.join(a|list) }}", SIZE),
    (BIG + "{{ a.replace('x', '\n')|indent(100000) }}", SIZE),
    ("{{ '{:1000000000}'.format(1) }}", SIZE),
    ("{{ '%1000000000d' % 1 }}", SIZE),
    ("{{ '%1000000000d'|format(1) }}", SIZE),
    ("{{ 'x' * 3000000000 }}", CONSTANTS),
    ("{{ 'x' * 1000000 * 1000000 }}", CONSTANTS),
    ("{{ 'x'|center(2000000000) }}", CONSTANTS),
    ("{{ 9 ** 9 ** 9 }}", CONSTANTS),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
]


@pytest.mark.parametrize(("template", "why"), HOSTILE)
def test_a_template_without_end_is_refused(template: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at once the next time: psigrad asks a template dozens of questions, and each would take as long."""
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    case = maker.Case(maker.tokenizer_of("qwen2_5"))
    case.tokenizer.chat_template = template
    with pytest.raises(UserError, match=f"can't render the row .*({why})"):
        case.turns(messages=[maker.user("a"), maker.bot("b")])
    if why == CONSTANTS:
        with pytest.raises(UserError, match=f"The chat template .*({why}).*; set chat_template_path to another"):
            check_arguments([template], {})
    elif why == TIME:
        monkeypatch.setattr(limits, "SECONDS", 1e9)
        with pytest.raises(limits.TemplateLimit), limits.limit_rendering(template):
            pass


@pytest.mark.parametrize(
    ("name", "fits", "exceeds"),
    [
        ("replace", ["a" * 5, "a", "b" * 20], ["a" * 5, "a", "b" * 21]),
        ("replace", ["a" * 200, "b"], ["ab" * 5, "ab", "b" * 21, 5]),
        ("indent", ["a\nb\nc\nd", 25], ["a\nb\nc\nd", 26]),
        ("indent", ["a\nb", "\t" * 50], ["a\tb\nc", "-" * 34]),
        ("expandtabs", ["a\tb\tc\td", 25], ["a\tb\tc\td", 26]),
        ("join", [",", ["ab"] * 33], [",", ["ab"] * 34]),
        ("join", ["," * 4, (1,) * 25], ["," * 4, (1,) * 26]),
        ("format", ["%100000d", 1], ["%1000000d", 1]),
        ("center", ["x", 10**6], ["x", -(10**6) - 1]),
    ],
)
def test_a_call_is_refused_before_it_writes_more_than_the_limit(name, fits, exceeds, monkeypatch) -> None:
    """By hand: five times 20 letters are 100, four lines indented by 25 too, and 33 words of two letters with commas are 99."""
    monkeypatch.setattr(limits, "LENGTH", 100)
    limits._check_arguments(name, fits)
    with pytest.raises(limits.TemplateLimit):
        limits._check_arguments(name, exceeds)


def test_a_filter_takes_a_large_number_as_its_value_and_not_as_its_argument() -> None:
    large = "{% set n = namespace(s=1000) %}{% set n.s = n.s * 10000 %}"
    assert limits.compile_template(large + "{{ n.s|string }}").render() == "10000000"
    for call in ("center(n.s)", "center(width=n.s)"):
        with pytest.raises(limits.TemplateLimit, match=NUMBER):
            limits.compile_template(f"{large}{{{{ 'x'|{call} }}}}").render()


@pytest.mark.parametrize("name", maker.names())
def test_every_template_renders_as_it_does_without_limits(name: str) -> None:
    """The oracle is the template that transformers compiles, which does not count."""
    tokenizer, day = maker.tokenizer_of(name), date(2026, 1, 2)
    rendering.set_render_settings(tokenizer, {}, day)
    bare = chat_template_utils._cached_compile_jinja_template(tokenizer.chat_template)
    bare.environment.globals["strftime_now"] = day.strftime
    texts = 0
    for talk, columns in maker._talks():
        talk = [
            {**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in talk
        ]  # as transformers does
        for number in range(1, len(talk) + 1):
            given = {**tokenizer.special_tokens_map, **columns, "messages": talk[:number], "add_generation_prompt": True}
            try:
                wanted = bare.render(**{"tools": None, "documents": None, **given})
            except (TemplateError, TypeError):
                continue
            texts += 1
            assert rendering.render(tokenizer, {"tools": None, **columns}, talk[:number], generation_prompt=True) == wanted
    assert texts > 2 and bare is not limits.compile_template(tokenizer.chat_template)
