"""The words that errors are made of, and how messages use them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from psigrad.errors import kind_of, reason_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("value", "said"), [(1, "an int"), ([], "a list"), (1j, "a complex"), (OSError(), "an OSError"), (set(), "a set")]
)
def test_a_type_has_its_article(value, said):
    assert kind_of(value) == said


def test_no_message_puts_an_article_before_the_name_of_a_type():
    wrong = re.compile(r"\ban? \{(type\(|kind\b)")
    assert wrong.search('f"gave a {type(made).__name__}"')
    sources = [
        path
        for package in ("psigrad", "psigrad_extras", "psigrad_studio", "psigrad_serve")
        for path in (ROOT / package).rglob("*.py")
    ]
    assert len(sources) > 100
    assert [str(path) for path in sources if wrong.search(path.read_text())] == []


def test_the_reason_of_a_group_is_what_happened_in_it():
    inner = ExceptionGroup("unhandled errors in a TaskGroup (1 sub-exception)", [ConnectionError("Connection closed")])
    assert reason_of(ExceptionGroup("outer (1 sub-exception)", [inner])) == "Connection closed"
