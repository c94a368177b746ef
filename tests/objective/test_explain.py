"""The text of `explain`: the formula of each part, and what differs between two methods."""

from __future__ import annotations

import inspect
from dataclasses import replace

from psigrad.config import algorithms
from psigrad.config.algorithms import SLOTS, explain, resolve_loss
from psigrad.objective.catalog import DR_GRPO, GRPO
from psigrad.objective.catalog import METHODS as PRESETS
from psigrad.objective.explain import _part_lines


def test_explain_states_the_formula_of_each_slot_with_its_source() -> None:
    text = explain("grpo")
    for piece in (
        "grpo minimises", "loss(θ) = Σ_i Σ_t w_t·[L_t + β·KL_t]", "clip(low=0.2, high=0.2)", "arXiv:2402.03300",
        "L_t = −min(ρ_t·A_t, clip(ρ_t, 1 − low, 1 + high)·A_t)", "A_t = (R_i − mean(R)) / (std(R) + 0.0001)",
        "0.04·(e^(−d_t) − 1 + d_t)",
    ):  # fmt: skip
        assert piece in text
    assert "β·KL" not in explain("dapo") and "A_t = R_i − mean(R)\n" in explain("dr_grpo")


def test_explain_of_two_methods_states_what_differs_and_only_that() -> None:
    text = explain("grpo", "dapo")
    differing = {line.removesuffix(" differs") for line in text.splitlines() if line.endswith(" differs")}
    assert differing == {"surrogate L", "aggregate w", "KL to the reference", "keep (filter)"}
    assert "clip(low=0.2, high=0.28)" in text and "Same in both: psi (group_mean" in text
    assert "They are the same method." in explain("grpo", {"preset": "grpo"})


def test_explain_fits_a_terminal_and_covers_every_part() -> None:
    texts = [explain(a) for a in PRESETS] + [explain(a, b) for a in PRESETS for b in PRESETS]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 100
    for slot in SLOTS:
        for name, part in algorithms.PARTS[slot].items():
            doc = inspect.getdoc(part)
            assert "\nFormula: " in doc and "\nSource: " in doc, name


def test_what_a_part_is_for_is_said_once():
    """The first paragraph is the purpose, whatever its first word."""

    def of_a_user(batch):
        """Formula: A = 1

        Source: nobody.
        """

    assert _part_lines(of_a_user, "") == ["Formula: A = 1", "Source: nobody."]


def test_two_methods_are_compared_slot_by_slot():
    text = explain(resolve_loss("dpo"), resolve_loss("simpo"))
    assert "\nbeta differs\n  dpo:\n    0.1\n  simpo:\n    2.0\n\nmargin differs\n  dpo:\n    0.0\n" in text
    assert text.endswith("\nSame in both: link (logistic(label_smoothing=0.0)), sft (0.0), preference (1.0)\n")
    text = explain(GRPO, DR_GRPO)
    assert "KL to the reference differs\n  grpo:\n    KL(where='loss', estimator='k3', coefficient=0.04" in text
    assert "\n  dr_grpo:\n    none: no reference policy is needed\n" in text
    same = "ratio (token), surrogate (clip(low=0.2, high=0.2)), keep (none), critic (none), entropy (none), correction (none)"
    assert " ".join(text.split("\n\n")[-1].split()) == f"Same in both: {same}"
    assert "They learn from different data and have no parts in common." in explain(GRPO, resolve_loss("dpo"))
    assert "dpo (1) minimises" in explain(resolve_loss("dpo"), replace(resolve_loss("dpo"), beta=0.5))


def test_two_methods_of_one_name_are_told_apart():
    other = replace(GRPO, kl=None)
    text = explain(GRPO, other)
    assert "grpo (1)" in text and "grpo (2)" in text
    apart = explain(GRPO, replace(other, name="mine"))
    assert "(1)" not in apart and "mine" in apart
