"""The documentation's page that trains a language model: its arithmetic is psigrad's, in a real browser, and it plays."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import numpy as np
import pytest
from live_learner import Learner, fresh_weights

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "make"))
import live_grid
import live_grpo

WITHIN = 1e-4
SETTINGS = {"group": 8, "clip": 0.2, "kl": 0.0, "reward": "right", "passes": 2, "rate": 5e-4}
MORE = [
    SETTINGS,
    SETTINGS | {"group": 16, "clip": 0.1, "kl": 0.05, "reward": "places", "passes": 3},
    SETTINGS | {"group": 4, "reward": "rising", "kl": 0.02},
]


@pytest.fixture(scope="module")
def computing(browser):
    """A page with the worker's modules and nothing else."""
    page = browser.new_page()
    page.add_script_tag(content=live_grid.bundle(live_grpo.LEARNER).replace("const modules = {}", "const modules = window.lab = {}"))
    yield page
    page.close()


def begin(page, seed: int) -> None:
    page.evaluate("seed => { window.learner = new lab['learner.js'].Learner(seed); }", seed)


def tune(page, steps: int) -> list[dict[str, float]]:
    return page.evaluate("steps => Array.from({ length: steps }, () => learner.fineTune())", steps)


def weights_of(page) -> np.ndarray:
    script = """() => { const { f, weights, size } = learner.model, bytes = new Uint8Array(f.slice(weights, weights + size).buffer);
        return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")); }"""
    return np.frombuffer(base64.b64decode(page.evaluate(script)), np.float32).copy()


def agree_on_tuning(page, steps: int) -> None:
    begin(page, 5)
    here = Learner(5, fresh_weights(5))
    for theirs in tune(page, steps):
        assert theirs == pytest.approx(here.fine_tune(), abs=WITHIN)


def agree_on_grpo(page, settings, steps: int) -> int:
    """Every figure of every completion and update; the number of tokens that were clipped.

    Tokens are compared by their probabilities and ratios. One whose ratio lies at the clip's edge may fall on either side of it, and
    so may one whose reward is the mean of its group: what is left of its advantage is rounding.
    """
    page.evaluate("() => learner.beginReinforcement()")
    here, clipped = Learner(5, weights_of(page)), 0
    for _ in range(steps):
        theirs = page.evaluate("settings => learner.reinforce(settings)", settings)
        ours = here.reinforce(settings)
        rows = [row for group in theirs["groups"] for row in group["completions"]]
        assert [row["text"] for row in rows] == ours["texts"]
        assert [row["reward"] for row in rows] == pytest.approx(ours["rewards"], abs=WITHIN)
        assert [row["advantage"] for row in rows] == pytest.approx(ours["advantages"], abs=WITHIN)
        assert np.exp(flat(rows, "logp")) == pytest.approx(np.exp(np.concatenate(ours["logp"])), abs=WITHIN)
        ratio, hit = flat(rows, "ratio"), np.concatenate(ours["clipped"])
        assert ratio == pytest.approx(np.concatenate(ours["ratio"]), abs=5 * WITHIN)
        sizes = np.repeat(np.abs(ours["advantages"]), [len(row["logp"]) for row in rows])
        clear = (np.abs(np.abs(ratio - 1) - settings["clip"]) > 5 * WITHIN) & ((sizes == 0) | (sizes > 1e-6))
        assert (flat(rows, "clipped") == hit)[clear].all() and clear.mean() > 0.95
        for one, other in zip(theirs["figures"]["updates"], ours["updates"], strict=True):
            assert one.pop("clipped") == pytest.approx(other.pop("clipped"), abs=WITHIN + (~clear).mean())
            assert one == pytest.approx(other, abs=WITHIN)
        clipped += np.count_nonzero(hit)
    return clipped


def flat(rows, key: str) -> np.ndarray:
    return np.concatenate([row[key] for row in rows])


@pytest.mark.quick
def test_two_steps_of_fine_tuning_and_grpo_equal_psigrads(computing):
    agree_on_tuning(computing, 2)
    assert agree_on_grpo(computing, MORE[1], 2) > 0


def test_twenty_steps_of_fine_tuning_equal_psigrads(computing):
    agree_on_tuning(computing, 20)


@pytest.mark.parametrize("settings", MORE, ids=lambda own: own["reward"])
def test_twenty_steps_of_grpo_equal_psigrads(computing, settings):
    begin(computing, 5)
    tune(computing, 120)
    assert agree_on_grpo(computing, settings, 20) > 0
