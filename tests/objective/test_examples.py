"""The examples in the docstrings of the objective give what they print."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest

import psigrad.objective
from psigrad.objective import batch, small_batches
from psigrad.objective.parts import group_advantage

MODULES = [name for _, name, _ in pkgutil.walk_packages(psigrad.objective.__path__, "psigrad.objective.")]
# Parts of which an example would need more than four lines, or that wrap another part.
WITHOUT = {
    "bonus",
    "covariance_penalty",
    "off_policy_mask",
    "with_imitation",
    "KahnemanTversky",
    "OnlinePreference",
    "Preference",
}
WITHOUT |= {"mean_log_ratio", "log_ratio", "mean_logp", "nca_pair", "bco_pair", "kl_of_mismatched"}


def failures(text: str, name: str = "text") -> int:
    """How many examples of a docstring print something else."""
    globs = vars(importlib.import_module(name)) if name != "text" else {}
    shared = {key: getattr(small_batches, key) for key in ("outcomes", "row", "show")}
    test = doctest.DocTestParser().get_doctest(text, {**globs, **shared}, name, None, None)
    return doctest.DocTestRunner(verbose=False).run(test, out=lambda line: None).failed


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right_and_every_part_has_one(name: str) -> None:
    for key, part in vars(importlib.import_module(name)).items():
        if getattr(part, "__module__", "") == name and (text := inspect.getdoc(part)):
            assert failures(text, name) == 0, key
            is_part = name.startswith(("psigrad.objective.parts.", "psigrad.objective.preferences.preference_loss"))
            assert ">>> " in text or "Source:" not in text or not is_part or key in WITHOUT, f"{key} has no example"


def test_negative_control_a_wrong_example_is_noticed() -> None:
    assert failures(">>> show(row(1))\n[[1.0]]") == 0 and failures(">>> show(row(1))\n[[2.0]]") == 1


def test_the_advantage_that_contributing_adds_gives_its_numbers() -> None:
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text().partition("**A reward.**")[0]
    blocks = [textwrap.dedent(block) for block in re.findall(r"^   ```python\n(.*?)^   ```", page, re.MULTILINE | re.DOTALL)]
    (part,), (golden,) = (
        [block for block in blocks if f"def {name}(" in block] for name in ("group_median", "test_the_median_of_a_group")
    )
    names = {**vars(batch), **vars(group_advantage), **vars(small_batches)}
    exec(part, names)
    exec(golden, names)
    names["test_the_median_of_a_group"]()
    test = doctest.DocTestParser().get_doctest(names["group_median"].__doc__, names, "group_median", None, None)
    assert doctest.DocTestRunner(verbose=False).run(test) == (0, 1) and names["group_median"].needs == {"group"}
