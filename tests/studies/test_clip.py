"""Where surrogates pass gradient: measured by autograd, held against the formulas on paper."""

from __future__ import annotations

import numpy as np
import pytest

from psigrad.objective.parts.surrogate import clip, dual_clip, truncated_weight
from studies import clip as clips
from studies.clip import FlatRange, flat_ranges, pushes, surrogates

NAMED = {one.name: one.surrogate for one in surrogates()}
DIFFERENTIABLE = [name for name in NAMED if name != "CISPO"]


@pytest.mark.parametrize(
    ("name", "positive", "negative"),
    [
        ("no clip", [], []),
        ("clip (PPO)", [FlatRange(1.2, None)], [FlatRange(0.0, 0.8)]),
        ("clip-higher (DAPO)", [FlatRange(1.28, None)], [FlatRange(0.0, 0.8)]),
        ("dual clip", [FlatRange(1.2, None)], [FlatRange(0.0, 0.8), FlatRange(3.0, None)]),
        ("CISPO", [], []),
    ],
)
def test_the_ranges_without_gradient_are_those_of_the_formulas(name, positive, negative):
    assert flat_ranges(NAMED[name], 1) == positive
    assert flat_ranges(NAMED[name], -1) == negative


def test_other_bounds_move_the_ranges():
    assert flat_ranges(clip(0.35, 0.5), 2.5) == [FlatRange(1.5, None)]
    assert flat_ranges(clip(0.35, 0.5), -0.1) == [FlatRange(0.0, 0.65)]
    assert flat_ranges(dual_clip(0.1, 0.1, 7.5), -1)[1] == FlatRange(7.5, None)


def test_negative_control_a_surrogate_without_gradient_is_silent_everywhere():
    assert flat_ranges(lambda logp, log_ratio, a: 0 * logp - (log_ratio.exp() * a).detach(), 1) == [FlatRange(0.0, None)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_push_is_the_slope_of_the_surrogate(name, sign):
    rho = np.array([0.1, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.3, 2.9, 3.1, 6.0])
    step = 1e-6
    up, down = (pushes(NAMED[name], rho * np.exp(s), sign)[0] for s in (step, -step))
    np.testing.assert_allclose(pushes(NAMED[name], rho, sign)[1], (up - down) / (2 * step), atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_cispo_pushes_by_its_truncated_weight(sign):
    rho = np.array([0.01, 0.5, 1.0, 4.9, 5.1, 15.0])
    np.testing.assert_allclose(pushes(truncated_weight(5.0), rho, sign)[1], np.minimum(rho, 5) * sign, rtol=1e-12)


# Document 000's table: which of sign × place pass gradient through PPO's clip.
SIX = [(1, 0.5, True), (1, 1.0, True), (1, 1.5, False), (-1, 0.5, False), (-1, 1.0, True), (-1, 1.5, True)]


@pytest.mark.parametrize(("sign", "rho", "passes"), SIX)
def test_the_six_cases_of_the_clip(sign, rho, passes):
    push = float(pushes(NAMED["clip (PPO)"], np.array([rho]), sign)[1][0])
    assert push == pytest.approx(rho * sign if passes else 0.0)


def test_what_runs_log_is_what_was_clipped_but_for_the_dual_bound():
    found = {(row.name, row.advantage): row.logged for row in clips.rows(surrogates())}
    assert {key for key, logged in found.items() if not logged} == {("dual clip", -1)}


def test_curves_are_the_pushes_on_a_grid():
    for curve in clips.curves(surrogates()):
        i = curve.ratio.index(2.0)
        assert curve.push[i] == pytest.approx(float(pushes(NAMED[curve.name], np.array([2.0]), curve.advantage)[1][0]))
        assert len(curve.ratio) == len(curve.value) == len(curve.push)
