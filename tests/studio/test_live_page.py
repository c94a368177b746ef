"""The live grid world of the documentation, built into a folder and opened from the disk: it plays, and its numbers are right."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import (
    SMALL_WINDOWS,
    Visits,
    cells_outside_the_window,
    everything_is_reached_by_tab,
    under_the_player,
)
from playwright.sync_api import expect
from timing import until

from psigrad import tabular

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "make"))
import live_grid


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "grid"
    live_grid.build(folder)
    return folder


@pytest.fixture
def opened(built, browser):
    visits = Visits(browser)

    def visit(size: str = "laptop", scheme: str = "light", *, still: bool = True):
        page = visits.page(size, scheme, still=still)
        page.goto((built / "index.html").as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield visit
    visits.close(bases=["file://"])


def values(page, panel: int) -> np.ndarray:
    script = "n => [...document.querySelectorAll('.board')[n].querySelectorAll('.cell')].map(c => Number(c.dataset.value))"
    return np.array(page.evaluate(script, panel))


def shows(page, panel: int, expected: np.ndarray, within: float) -> None:
    """Wait until a board shows these values."""
    until(lambda: (found := values(page, panel)).shape == expected.shape and np.abs(found - expected).max() < within)


def test_it_plays_by_itself_and_can_be_stopped_and_stepped(opened):
    page = opened(still=False)
    until(lambda: int(page.input_value("#scrub")) > 2)
    page.click("#play")
    expect(page.locator("#play")).to_have_attribute("aria-label", "Play")
    at = int(page.input_value("#scrub"))
    page.click("#forward")
    expect(page.locator("#step")).to_have_text(re.compile(f"^{at + 1} / "))
    page.click("#back")
    expect(page.locator("#step")).to_have_text(re.compile(f"^{at} / "))
    page.locator(".cell").first.focus()
    page.keyboard.press("r")
    expect(page.locator("#step")).to_have_text(re.compile("^0 / "))
    until(lambda: not values(page, 0).any())


@pytest.mark.quick
def test_at_the_end_every_world_shows_the_exact_values_and_a_policy(opened):
    page = opened()
    for world in live_grid.WORLDS:
        page.select_option("#world", world.name)
        expect(page.locator("#says")).to_have_text(world.says)
        expect(page.locator(".board").first.locator(".cell")).to_have_count(world.grid.rows * world.grid.columns)
        expect(page.locator("#end")).to_be_disabled()
        exact = tabular.solve(world.grid.mdp()).value
        shows(page, 0, exact, 1e-5 * max(1.0, np.abs(exact).max()))
        until(lambda: page.locator(".board").nth(1).locator(".arrow path.on").count() > 5)
        page.locator(".cell").first.click()
        expect(page.locator("#cell")).to_contain_text("exact")


def test_another_algorithm_can_be_chosen_and_its_frames_are_those_of_the_library(opened):
    page = opened()
    page.locator(".panel select").nth(1).select_option("sarsa")
    expect(page.locator(".panel select").nth(1)).to_be_focused()
    world = live_grid.WORLDS[0]
    page.locator("#scrub").fill("40")
    *_, learned = tabular.sarsa(world.grid.mdp(), 400, epsilon=0.2, alpha=0.2, seed=0, max_steps=500)
    shows(page, 1, learned.q.max(axis=1), 1e-5)


def test_it_says_in_how_many_cells_the_policies_agree(opened):
    page = opened()
    expect(page.locator("#agree")).to_have_text(re.compile("Of the 62 cells .* right one in 38[.]"))
    page.select_option("#world", "cliff")
    expect(page.locator("#agree")).to_have_text(re.compile("Of the 25 cells .* right one in 25[.]"))
    page.click("#reset")
    expect(page.locator("#agree")).to_have_text(re.compile("right one in 0[.]"))


def test_a_turned_phone_needs_no_sideways_scrolling(opened):
    page = opened("phone")
    for width, height in ((844, 390), (390, 844), (667, 375), (320, 568)):
        page.set_viewport_size({"width": width, "height": height})
        until(lambda width=width: page.evaluate("document.documentElement.scrollWidth") <= width)


@pytest.mark.parametrize(("size", "scheme"), [("laptop", "light"), ("phone", "dark")])
def test_axe_finds_nothing_and_nothing_is_too_wide(opened, size, scheme):
    page = opened(size, scheme)
    assert not Axe().run(page, options={"preload": False}).response["violations"]
    until(lambda: page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"])
    everything_is_reached_by_tab(page, 10)


@pytest.mark.parametrize(("width", "height"), SMALL_WINDOWS)
def test_the_player_covers_nothing(opened, width, height):
    page = opened()
    page.set_viewport_size({"width": width, "height": height})
    until(lambda: not under_the_player(page))
    assert (width, height) != SMALL_WINDOWS[0] or not cells_outside_the_window(page)


def test_modules_are_put_together_only_where_every_form_is_known():
    code, exported = live_grid.scoped(
        'import { a as b } from "../x.js";\nexport const c = 1;\nexport function d() {}', Path("grid")
    )
    assert code == 'const { a: b } = modules["x.js"];\nconst c = 1;\nfunction d() {}' and exported == ["c", "d"]
    with pytest.raises(ValueError, match="form that is not put together"):
        live_grid.scoped("export * from './x.js';", Path())


def test_maps_are_those_of_the_worlds():
    assert live_grid.compact(live_grid.WORLDS[3].grid) == "3G/1W1T/S3"
