"""Formulas of the documentation, typeset: the markup of each was written by hand."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import scripts

import psigrad.objective

ROOT = Path(__file__).parents[2]


typeset = scripts.load("docs/make/typeset.py")


def bare(formula):
    """The markup without what only moves it."""
    found = typeset.mathml(formula).partition("<semantics><mrow>")[2].partition("</mrow><annotation")[0]
    return re.sub(r' stretchy="false"| mathvariant="normal"|<mspace[^>]*/>', "", found)


@pytest.mark.parametrize(
    ("formula", "markup"),
    [
        ("A_t", "<msub><mi>A</mi><mrow><mi>t</mi></mrow></msub>"),
        ("w_it", "<msub><mi>w</mi><mrow><mi>i</mi><mi>t</mi></mrow></msub>"),
        ("(a + b) / 2", "<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mrow><mn>2</mn></mrow></mfrac>"),
        ("1 / |y|", "<mfrac><mrow><mn>1</mn></mrow><mrow><mrow><mo>|</mo><mi>y</mi><mo>|</mo></mrow></mrow></mfrac>"),
        ("log p / n", "<mfrac><mrow><mi>log</mi><mi>p</mi></mrow><mrow><mi>n</mi></mrow></mfrac>"),
        ("log p/q", "<mi>log</mi><mfrac><mrow><mi>p</mi></mrow><mrow><mi>q</mi></mrow></mfrac>"),
        ("a·b/c", "<mi>a</mi><mo>·</mo><mfrac><mrow><mi>b</mi></mrow><mrow><mi>c</mi></mrow></mfrac>"),
        ("e^−z", "<msup><mi>e</mi><mrow><mo>−</mo><mi>z</mi></mrow></msup>"),
        ("Σ_i x²", "<munder><mo>∑</mo><mrow><mi>i</mi></mrow></munder><msup><mi>x</mi><mrow><mn>2</mn></mrow></msup>"),
        ("V*(x)", "<mrow><msup><mi>V</mi><mrow><mo>*</mo></mrow></msup><mrow><mo>(</mo><mi>x</mi><mo>)</mo></mrow></mrow>"),
    ],
)  # fmt: skip
def test_a_formula_is_the_markup_that_a_person_would_write(formula, markup):
    assert bare(formula) == markup


@pytest.mark.parametrize("broken", ["(a + b", "a)", "A_", "x^"])
def test_a_broken_formula_is_refused(broken):
    with pytest.raises(typeset.NotAFormula):
        typeset.mathml(broken)


def test_programs_and_outputs_are_no_formulas():
    assert typeset.is_formula(["    A_t = R_i − mean(R)"])
    assert typeset.is_formula(["    w_t = 1 / (number of steps)"])
    for program in ('return ["x"]', "import math  # Σ", "psigrad grpo --beta 0.04", "a == b·c", "value = estimates"):
        assert not typeset.is_formula([f"    {program}"])
    text = "Before\n\n    E[ x ] = 1·2\n\nafter\n\n```\n    E[ x ] = 1·2\n```\n"
    assert typeset.typeset(text).count("<math") == 1
    assert "```\n    E[ x ] = 1·2\n```" in typeset.typeset(text)


def test_every_formula_of_the_parts_can_be_typeset():
    count = 0
    for found in pkgutil.walk_packages(psigrad.objective.__path__, "psigrad.objective."):
        module = __import__(found.name, fromlist=["_"])
        for value in vars(module).values():
            if not (inspect.isclass(value) or inspect.isfunction(value)) or value.__module__ != found.name:
                continue
            for paragraph in (inspect.getdoc(value) or "").split("\n\n"):
                if paragraph.startswith("Formula:"):
                    for line in paragraph.removeprefix("Formula:").strip().splitlines():
                        ElementTree.fromstring(typeset.mathml(line))
                        count += 1
    assert count > 50
