"""The documentation's page that trains a language model: its arithmetic is psigrad's, in a real browser, and it plays."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import Visits, everything_is_reached_by_tab
from live_learner import Learner, fresh_weights
from playwright.sync_api import expect
from timing import until

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
    page.add_script_tag(
        content=live_grid.bundle(live_grpo.LEARNER).replace("const modules = {}", "const modules = window.lab = {}")
    )
    yield page
    page.close()


def begin(page, seed: int) -> None:
    page.evaluate("seed => { window.learner = new lab['learner.js'].Learner(seed); }", seed)


def tune(page, steps: int) -> list[dict[str, float]]:
    return page.evaluate("steps => Array.from({ length: steps }, () => learner.fineTune())", steps)


def weights_of(page) -> np.ndarray:
    script = """() => { const { f, weights, size } = learner.model;
        const bytes = new Uint8Array(f.slice(weights, weights + size).buffer);
        return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")); }"""
    return np.frombuffer(base64.b64decode(page.evaluate(script)), np.float32).copy()


def agree_on_tuning(page, steps: int) -> None:
    begin(page, 5)
    here = Learner(5, fresh_weights(5))
    for theirs in tune(page, steps):
        assert theirs == pytest.approx(here.fine_tune(), abs=WITHIN)


def agree_on_grpo(page, settings, steps: int) -> int:
    """Every figure of every completion and update; the number of tokens that were clipped.

    Tokens are compared by their probabilities and ratios. One whose ratio lies at the clip's edge may fall on either side of it,
    and so may one whose reward is the mean of its group: what is left of its advantage is rounding.
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
        assert (flat(rows, "clipped") == hit)[clear].all() and clear.mean() > 0.8
        for one, other in zip(theirs["figures"]["updates"], ours["updates"], strict=True):
            assert one.pop("clipped") == pytest.approx(other.pop("clipped"), abs=WITHIN + (~clear).mean())
            assert one == pytest.approx(other, abs=WITHIN, rel=WITHIN)  # a gradient's norm may be 20
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


def test_vectors_and_plain_javascript_give_the_same_bits(computing):
    script = """([m, n, k]) => {
        const memory = new WebAssembly.Memory({ initial: 4 }), f = new Float32Array(memory.buffer), c = m * k + k * n;
        const both = ["plainGemm", "vectorGemm"].map((name) => {
          for (let i = 0; i < c + m * n; i++) f[i] = Math.fround(Math.sin(i));
          lab["gemm.js"][name](memory)(0, m * k, c, m, n, k);
          return Array.from(f.slice(c, c + m * n));
        });
        return [...both, Array.from(f.slice(0, c))]; }"""
    for m, n, k in [(4, 8, 1), (12, 16, 5), (64, 24, 33)]:
        plain, vectors, given = computing.evaluate(script, [m, n, k])
        a, b = np.array(given[: m * k]).reshape(m, k), np.array(given[m * k :]).reshape(k, n)
        before = np.sin(np.arange(len(given), len(given) + m * n)).reshape(m, n)
        assert plain == vectors and np.array(plain) == pytest.approx((before + a @ b).ravel(), abs=1e-5)


def test_a_number_that_is_held_out_is_never_trained_on(computing):
    asked = computing.evaluate(
        """() => { const { prompt, written } = lab["task.js"], indices = Array.from({ length: 200 }, (_, i) => i);
            return [indices.map((i) => written(prompt(0, 3, i))), indices.map((i) => written(prompt(0, 5, i, true)))]; }"""
    )
    is_held_out = [[int(text[:6]) * 2654435761 % 2**32 < 2**32 / 20 for text in texts] for texts in asked]
    assert not any(is_held_out[0]) and all(is_held_out[1])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "grpo"
    live_grpo.build(folder)
    return folder


@pytest.fixture
def opened(built, browser):
    visits = Visits(browser)

    def visit(size: str = "laptop", scheme: str = "light", *, short: bool = True):
        page = visits.page(size, scheme)
        if short:  # a few steps of imitation, so that what follows comes soon
            source = (built / "page.js").read_text()
            page.route("**/page.js", lambda route: route.fulfill(body=source.replace("TUNING = 220", "TUNING = 3")))
        page.goto((built / "index.html").as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield visit
    visits.close(bases=["file://"])


def test_it_goes_from_imitation_to_grpo_and_back(opened):
    page = opened()
    for step in range(1, 4):
        page.click("#step")
        until(lambda step=step: page.evaluate("document.getElementById('tuned').value") == pytest.approx(step / 3))
    expect(page.locator("#status")).to_contain_text("It imitates")
    page.select_option("#group", "16")
    page.select_option("#reward", "rising")
    expect(page.locator("#reward-says")).to_contain_text("Nobody looks at the question")
    page.click("#step")
    expect(page.locator("#completions tr")).to_have_count(16)
    expect(page.locator("#which")).to_have_text(re.compile("of 8$"))
    advantages = [float(text.replace("−", "-")) for text in page.locator("#completions td:last-child").all_text_contents()]
    assert abs(sum(advantages)) < 0.2
    page.locator("#completions .tokens").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#token")).to_contain_text("ratio")
    page.click("#again")
    expect(page.locator(".groups")).to_be_hidden()
    page.click("#play")
    expect(page.locator("#play")).to_have_text("Pause")
    until(lambda: "step 2" in page.text_content("#status"))
    page.click("#play")
    page.click("#over")
    expect(page.locator("#status")).to_have_text("Press Train.")


@pytest.mark.parametrize(("size", "scheme"), [("laptop", "light"), ("phone", "dark")])
def test_axe_finds_nothing_and_nothing_is_too_wide(opened, size, scheme):
    page = opened(size, scheme)
    for _ in range(4):
        page.click("#step")
        until(lambda: page.is_enabled("#step"))
    page.wait_for_selector("#completions tr")
    assert not Axe().run(page, options={"preload": False}).response["violations"]
    everything_is_reached_by_tab(page, 20)
    for width, height in ((390, 844), (844, 390), (320, 640)):
        page.set_viewport_size({"width": width, "height": height})
        until(lambda width=width: page.evaluate("document.documentElement.scrollWidth") <= width)


def test_it_goes_past_its_teacher(opened):
    page = opened(short=False)
    page.click("#play")
    share = r"Reinforcement, step \d+ of 200: (\d+) %"
    until(lambda: (m := re.search(share, page.text_content("#status"))) is not None and int(m[1]) >= 90, seconds=400)
