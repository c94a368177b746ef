"""The grid page in Chromium: by mouse, by keyboard alone, by touch; its numbers, its accessibility, and what it refuses."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import (
    SMALL_WINDOWS,
    Visits,
    cells_outside_the_window,
    everything_is_reached_by_tab,
    make_the_player_sticky,
    under_the_player,
)
from live_studio import live_studio
from playwright.sync_api import Page, expect
from timing import until

from psigrad import tabular
from psigrad.tabular import GridWorld
from psigrad_studio.studio_settings import StudioSettings

SLIPPERY = "#slip=0.1"
WORLD = GridWorld(slip=0.1)


@pytest.fixture(scope="module")
def studio():
    with live_studio(work_seconds=20.0, requests_per_second=1e6, burst=10**6) as running:
        yield running


@pytest.fixture
def opened(studio, browser):
    """opened(fragment, ...) -> a page that is ready; what it logged and asked for is looked at in the end."""
    visits = Visits(browser)

    def visit(
        fragment: str = SLIPPERY, size: str = "laptop", scheme: str = "light", still: bool = True, touch: bool = False
    ) -> Page:
        page = visits.page(size, scheme, still=still, touch=touch)
        page.goto(f"{studio.base}/enter?key={studio.settings.key}")
        page.goto("about:blank")
        page.goto(f"{studio.base}/grid{fragment}")
        page.wait_for_selector("html[data-ready]")
        page.wait_for_selector(".cell[data-value]")
        return page

    visit.expected = []
    yield visit
    visits.close(visit.expected, [studio.base])


def values(page: Page, panel: int = 0) -> np.ndarray:
    """What is on the grid, in full precision, once it is there: the step is shown a moment earlier."""
    page.locator(".board").nth(panel).locator(".cell[data-value]").first.wait_for()
    script = "n => [...document.querySelectorAll('.board')[n].querySelectorAll('.cell')].map(c => Number(c.dataset.value))"
    return np.array(page.evaluate(script, panel))


def cell(page: Page, row: int, column: int, panel: int = 0):
    return page.locator(".board").nth(panel).locator(f'.cell[data-row="{row}"][data-column="{column}"]')


def at_step(page: Page, step: int | str) -> None:
    expect(page.locator("#step")).to_have_text(re.compile(rf"^{step} / \d+$"))


def shows(page: Page, expected: np.ndarray, panel: int = 0, within: float = 1e-9) -> None:
    """Wait until the grid shows these values: as long as their frames are on their way it shows what was there before."""
    until(lambda: (found := values(page, panel)).shape == expected.shape and np.abs(found - expected).max() <= within)


def solved(page: Page, world: GridWorld, panel: int = 0) -> None:
    """Wait until the grid shows the exact values of a world."""
    shows(page, tabular.solve(world.mdp()).value, panel, 1e-6)
    expect(page.locator(".panel").nth(panel)).to_have_class(re.compile("done"))


def watch_the_button(page: Page) -> Callable[[], set[str]]:
    """The names that the button Play has had since, however briefly."""
    page.evaluate(
        """() => { const play = document.getElementById("play");
            window.named = [];
            new MutationObserver(() => named.push(play.getAttribute("aria-label"))).observe(play, { attributes: true }); }"""
    )
    return lambda: set(page.evaluate("named"))


def eventually(page: Page, script: str) -> None:
    """Playwright's own wait_for_function evaluates strings in the page, which the page's policy forbids."""
    until(lambda: page.evaluate(script))


def settle(page: Page) -> None:
    page.wait_for_load_state("networkidle")


# ---- numbers


@pytest.mark.parametrize("name", ["value_iteration", "policy_iteration", "modified_policy_iteration"])
def test_every_step_shows_the_numbers_of_the_library(opened, name):
    page = opened(f"{SLIPPERY}&run={name}")
    mdp = WORLD.mdp()
    solver = {
        "value_iteration": tabular.value_iteration(mdp),
        "policy_iteration": tabular.policy_iteration(mdp),
        "modified_policy_iteration": tabular.modified_policy_iteration(mdp, sweeps=5),
    }[name]
    at_step(page, 0)
    shows(page, np.zeros(WORLD.rows * WORLD.columns), within=0)
    for step, sweep in enumerate(itertools.islice(solver, 8), 1):
        page.click("#forward")
        at_step(page, step)
        shows(page, sweep.value)
        texts = page.locator(".board .cell:not(.treasure):not(.trap) .number").all_text_contents()
        shown = [float(text.replace("−", "-")) for text in texts]
        alive = [v for v, end in zip(sweep.value, mdp.is_terminal, strict=True) if not end]
        assert np.abs(np.subtract(shown, alive)).max() <= 0.005 + 1e-9


def test_learners_show_the_numbers_of_the_library(opened):
    page = opened(f"{SLIPPERY}&run=q_learning,td&episodes=5&seed=3")
    mdp = WORLD.mdp()
    learned = list(tabular.q_learning(mdp, 20, epsilon=0.2, alpha=0.2, seed=3, max_steps=500))
    episodes = tabular.rollouts(mdp, tabular.uniform_policy(mdp), 20, seed=3, max_steps=500)
    estimates = list(tabular.td(episodes, 64, mdp.gamma, alpha=0.2))
    for step in range(1, 5):
        page.click("#forward")
        at_step(page, step)
        shows(page, learned[5 * step - 1].q.max(axis=1))
        shows(page, estimates[5 * step - 1], 1)


def test_the_backup_of_a_cell_adds_up_on_the_page(opened):
    page = opened(f"{SLIPPERY}&at=6")
    at_step(page, 6)
    cell(page, 3, 2).click()
    table = page.locator("#cell table")
    expect(table.locator("tbody tr")).to_have_count(4)
    q = tabular.q_values(WORLD.mdp(), values(page))[26]
    for row, exact in zip(table.locator("tbody tr").all(), q, strict=True):
        assert float(row.locator("td.q").inner_text().replace("−", "-")) == pytest.approx(exact, abs=5.1e-5)
        total = 0.0
        for line in row.locator("td div").all_text_contents():
            probability, reward, *ahead = re.findall(r"-?\d+(?:\.\d+)?", line.replace("−", "-").replace("+ 0.9", " 0.9"))
            total += float(probability) * (float(reward) + (float(ahead[0]) * float(ahead[1]) if len(ahead) > 1 else 0.0))
        assert total == pytest.approx(exact, abs=2e-4)
    page.click("#forward")
    at_step(page, 7)
    until(lambda: values(page)[26] == pytest.approx(q.max(), abs=1e-12))


def test_the_updates_of_a_learner_are_shown(opened):
    page = opened(f"{SLIPPERY}&run=q_learning&at=30")
    at_step(page, 30)
    states = page.locator(".path").get_attribute("points").split()
    column, row = (int(float(x)) for x in states[0].split(","))
    cell(page, row, column).click()
    expect(page.locator("#cell .updates li").first).to_contain_text("Q(s,")


# ---- steps


def test_step_back_play_pause_end_and_reset(opened):
    page = opened(f"{SLIPPERY}", still=False)
    sweeps = [sweep.value for sweep in itertools.islice(tabular.value_iteration(WORLD.mdp()), 3)]
    for step in (1, 2, 3):
        page.click("#forward")
        at_step(page, step)
    shows(page, sweeps[2])
    page.click("#back")
    at_step(page, 2)
    shows(page, sweeps[1])
    assert np.abs(sweeps[1] - sweeps[2]).max() > 1e-6
    page.click("#forward")
    at_step(page, 3)
    shows(page, sweeps[2])
    page.select_option("#speed", "2")  # slow enough that a busy machine does not come to the end before it pauses
    page.click("#play")
    expect(page.locator("#play")).to_have_attribute("aria-label", "Pause")
    eventually(page, "parseInt(document.getElementById('step').textContent) > 5")
    page.click("#play")
    expect(page.locator("#play")).to_have_attribute("aria-label", "Play")
    paused = page.locator("#step").inner_text()
    page.wait_for_timeout(300)
    assert page.locator("#step").inner_text() == paused
    page.click("#end")
    solved(page, WORLD)
    expect(page.locator("#forward")).to_be_disabled()
    page.click("#reset")
    at_step(page, 0)
    until(lambda: np.abs(values(page)).max() == 0)


def test_playing_reaches_the_end_by_itself(opened):
    page = opened(SLIPPERY, still=False)
    page.select_option("#speed", "60")
    page.click("#play")
    solved(page, WORLD)
    expect(page.locator("#play")).to_have_attribute("aria-label", "Play")


def test_side_by_side_with_one_chart(opened):
    page = opened(f"{SLIPPERY}&run=value_iteration")
    for count in (2, 3, 4):
        page.click("#compare")
        expect(page.locator(".panel")).to_have_count(count)
    expect(page.locator("#compare")).to_be_disabled()
    page.click("#forward")
    at_step(page, 1)
    expect(page.locator(".legend li")).to_have_count(4)
    expect(page.locator(".chart .hover-point")).to_have_count(4)  # a dot on each curve
    page.locator(".panel select").nth(1).select_option("monte_carlo")
    expect(page.locator(".panel").nth(1)).to_have_attribute("aria-label", "Monte Carlo control")
    page.locator(".panel button", has_text="Remove").nth(2).click()
    expect(page.locator(".panel")).to_have_count(3)
    page.select_option("#measure", "residual")
    expect(page.locator(".chart")).to_have_attribute("aria-label", re.compile("^Largest change in a step"))


# ---- changing the world


def test_dragging_the_trap_solves_again_from_the_old_values(opened):
    page = opened(f"{SLIPPERY}&at=10000")
    solved(page, WORLD)
    before = page.locator("#step").inner_text()
    start, goal = cell(page, 3, 4).bounding_box(), cell(page, 5, 6).bounding_box()
    page.mouse.move(start["x"] + 20, start["y"] + 20)
    page.mouse.down()
    page.mouse.move(goal["x"] + 20, goal["y"] + 20, steps=12)
    page.mouse.up()
    expect(cell(page, 5, 6)).to_have_class(re.compile("trap"))
    expect(cell(page, 3, 4)).not_to_have_class(re.compile("trap"))
    moved = WORLD.moved((3, 4), (5, 6))
    solved(page, moved)
    until(lambda: "6T1" in page.url)
    page.click("#reset")
    at_step(page, 0)
    page.click("#end")
    solved(page, moved)
    assert before.startswith("34")


def test_a_drag_is_one_step_of_undo_and_comes_back_by_redo(opened):
    page = opened(f"{SLIPPERY}&at=10000")
    solved(page, WORLD)
    start, goal = cell(page, 1, 6).bounding_box(), cell(page, 6, 1).bounding_box()
    page.mouse.move(start["x"] + 20, start["y"] + 20)
    page.mouse.down()
    page.mouse.move(goal["x"] + 20, goal["y"] + 20, steps=15)
    page.mouse.up()
    moved = WORLD.moved((1, 6), (6, 1))
    solved(page, moved)
    page.click("#undo")
    solved(page, WORLD)
    expect(page.locator("#undo")).to_be_disabled()
    page.keyboard.press("Control+Shift+Z")
    expect(cell(page, 6, 1)).to_have_class(re.compile("treasure"))
    page.keyboard.press("Control+Z")
    solved(page, WORLD)


def test_click_to_pick_up_and_click_to_put_down(opened):
    page = opened(f"{SLIPPERY}&at=10000")
    cell(page, 3, 4).click()
    expect(cell(page, 3, 4)).to_have_class(re.compile("carried"))
    expect(page.locator("#cell .hint")).to_be_visible()
    cell(page, 1, 6).click()
    expect(page.locator("#notice")).to_contain_text("taken")
    cell(page, 6, 6).click()
    solved(page, WORLD.moved((3, 4), (6, 6)))
    cell(page, 6, 6).click()
    page.keyboard.press("Escape")
    expect(page.locator(".carried")).to_have_count(0)


def test_pieces_worth_layout_and_size(opened):
    page = opened(f"{SLIPPERY}&at=10000")
    cell(page, 0, 0).click()
    page.click("[data-piece=treasure]")
    page.fill("#worth", "2.5")
    page.press("#worth", "Enter")
    world = replace(WORLD, prizes={**WORLD.prizes, (0, 0): 2.5})
    expect(cell(page, 0, 0)).to_have_attribute("aria-label", re.compile(r"treasure \+2.5"))
    solved(page, world)
    cell(page, 4, 4).click()
    page.click("[data-piece=wall]")
    solved(page, replace(world, walls=frozenset({(4, 4)})))
    page.select_option("#layout", label="Cliff")
    expect(page.locator(".board .cell")).to_have_count(32)
    page.fill("#rows", "3")
    page.press("#rows", "Enter")
    expect(page.locator(".board .cell")).to_have_count(24)
    page.fill("#columns", "999")
    page.press("#columns", "Enter")
    expect(page.locator(".board .cell")).to_have_count(60)


@pytest.mark.parametrize(("slider", "keys", "world"), [
    ("discount", ["ArrowLeft"] * 5, replace(WORLD, gamma=0.85)),
    ("slip", ["ArrowRight"] * 10, replace(WORLD, slip=0.2)),
    ("cost", ["ArrowRight"] * 2, replace(WORLD, step_reward=-0.02)),
])  # fmt: skip
def test_sliders_solve_again(opened, slider, keys, world):
    page = opened(f"{SLIPPERY}&at=10000")
    solved(page, WORLD)
    page.focus(f"#{slider}")
    for key in keys:
        page.keyboard.press(key)
    solved(page, world)
    until(lambda: f"{slider}=" in page.url)


def test_a_change_is_played_where_motion_is_welcome(opened):
    page = opened(f"{SLIPPERY}&at=10000", still=False)
    page.select_option("#speed", "20")
    solved(page, WORLD)
    named = watch_the_button(page)
    cell(page, 3, 4).click()
    cell(page, 5, 5).click()
    until(lambda: "Pause" in named())
    solved(page, WORLD.moved((3, 4), (5, 5)))


@pytest.mark.parametrize("still", [True, False])
def test_beside_a_learner_a_change_plays_until_the_solver_has_arrived(opened, still):
    page = opened(f"{SLIPPERY}&run=value_iteration,q_learning&at=34", still=still)
    page.select_option("#speed", "60")
    solved(page, WORLD)
    q = page.locator(".panel").nth(1)
    expect(q.locator(".caption")).to_contain_text("340 episodes")
    before = values(page, 1)
    cell(page, 3, 4).click()
    cell(page, 5, 5).click()
    expect(page.locator(".panel").first).to_have_class(re.compile("done"))
    solved(page, WORLD.moved((3, 4), (5, 5)))
    expect(page.locator("#play")).to_have_attribute("aria-label", "Play")
    step = int(page.locator("#step").inner_text().split(" ")[0])
    assert 10 < step < 60
    expect(q.locator(".caption")).to_contain_text(f"{10 * step} episodes")
    assert values(page, 1).mean() > before.mean() - 0.1  # it goes on from what it knew


# ---- the address


def test_the_address_holds_the_state(opened):
    page = opened("#map=3G/1W1T/S3&discount=0.95&slip=0.2&cost=0.04&run=policy_iteration,sarsa&epsilon=0.3&at=2&cell=2,1")
    expect(page.locator(".panel")).to_have_count(2)
    at_step(page, 2)
    grid = GridWorld.from_text("...+\n.#.-\nS...", slip=0.2, step_reward=-0.04, gamma=0.95)
    sweeps = list(itertools.islice(tabular.policy_iteration(grid.mdp()), 2))
    shows(page, sweeps[1].value)
    expect(page.locator("#cell .place")).to_contain_text("Row 3, column 2")
    page.click("#forward")
    at_step(page, 3)
    until(lambda: "at=3" in page.url)
    again = opened(page.url.partition("/grid")[2])
    at_step(again, 3)
    until(lambda: (values(again) == values(page)).all())
    again.evaluate("location.hash = 'map=4/3G&at=1'")
    expect(again.locator(".board .cell")).to_have_count(8)


HOSTILE = [
    "#map=<img src=x onerror=alert(1)>",
    "#map=%3Cscript%3Ealert(1)%3C/script%3E",
    "#map=(1e9)",
    "#map=99/99",
    "#map=" + "8/" * 500,
    "#map=",
    "#run=<svg/onload=alert(1)>",
    "#run=__proto__,constructor",
    "#discount=NaN&slip=Infinity&cost=-1e308",
    "#at=1e400&cell=-1,99999",
    "#__proto__=1&constructor=2&toString=3",
    "#%E0%A4%A=1&%00=%00",
    "#policy=javascript:alert(1)",
    "#cell=<b>,<i>",
    "#seed=99999999999999999999",
    "#discount=<img src=x onerror=alert(1)>",
    "#" + "a" * 5000,
    "#map=8/8&map=(<b>1</b>)",
]


@pytest.mark.parametrize("fragment", HOSTILE)
def test_hostile_addresses_are_read_as_text_or_not_at_all(opened, fragment):
    page = opened(fragment)
    page.keyboard.press(".")  # a step forward, where the end is not there yet
    assert page.evaluate("document.querySelectorAll('main img, main script, main b:not(#cell b), main iframe').length") == 0
    assert page.evaluate("document.querySelectorAll('.cell').length") > 0


def test_trusted_types_hold_even_where_a_script_is_careless(opened):
    page = opened()
    page_context = (
        "() => { try { document.body.innerHTML = '<img src=x onerror=alert(1)>'; return 'set'; } catch (e) { return e.name; } }"
    )
    opened.expected.append("TrustedHTML|Trusted Type")
    assert page.evaluate(page_context) == "TypeError"


def test_what_the_server_says_is_shown_as_text(opened):
    opened.expected.append("422")
    page = opened()
    page.evaluate("location.hash = 'map=8/8&discount=1&cost=0.1'")
    expect(page.locator(".failure").first).to_contain_text("gamma")


def test_another_site_gets_nothing_out_of_the_studio(studio, opened):
    """A page on another port, in the browser that holds the session: forms, fetches, scripts, pictures and frames."""
    opened.expected.append(".")
    page = opened()
    evil = b"""<!doctype html><form id=f method=post enctype=text/plain target=_self><input name='{"a":"' value='"}'></form>"""

    class Evil(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(evil)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    other = page.context.new_page()
    other.goto(f"http://localhost:{server.server_port}/")
    seen = []
    other.on(
        "response",
        lambda response: seen.append((response.url, response.status)) if str(studio.settings.port) in response.url else None,
    )
    script = """async (base) => {
      const tries = [
        () => fetch(base + '/api/grid/algorithms', {credentials: 'include'}),
        () => fetch(base + '/api/grid/algorithms', {credentials: 'include', mode: 'no-cors'}),
        () => fetch(base + '/api/grid/frames', {method: 'POST', credentials: 'include', mode: 'no-cors', body: '{}'}),
        () => fetch(base + '/api/grid/frames', {method: 'PUT', credentials: 'include', body: '{}'}),
        () => new Promise((ok, no) => Object.assign(document.head.appendChild(document.createElement('script')), {onload: ok, onerror: no, src: base + '/static/grid/main.js'})),
        () => new Promise((ok, no) => Object.assign(document.body.appendChild(document.createElement('img')), {onload: ok, onerror: no, src: base + '/static/mark.svg'})),
        () => import(base + '/static/api.js'),
      ];
      const got = [];
      for (const one of tries) { try { const r = await one(); got.push(r && r.type !== 'opaque' ? 'something' : 'nothing'); } catch { got.push('nothing'); } }
      const frame = document.body.appendChild(document.createElement('iframe'));
      frame.src = base + '/grid';
      await new Promise((done) => { frame.onload = done; setTimeout(done, 2000); });
      try { got.push(frame.contentDocument ? frame.contentDocument.body.innerText : 'nothing'); } catch { got.push('nothing'); }
      return got;
    }"""  # noqa: E501
    got = other.evaluate(script, studio.base)
    assert set(got) <= {"nothing", ""}, got
    other.evaluate(
        "base => { const f = document.getElementById('f'); f.action = base + '/api/grid/frames'; f.submit(); }", studio.base
    )
    other.wait_for_load_state()
    server.shutdown()
    assert seen and all(status in (401, 403, 405) for _, status in seen), seen


# ---- people


@pytest.mark.quick
def test_the_whole_flow_by_keyboard_alone(opened):
    page = opened(f"{SLIPPERY}&at=10000")
    press = page.keyboard.press
    eventually(page, "document.querySelector('.panel').classList.contains('done')")
    press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    press("Enter")
    for _ in range(12):
        press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "gridcell":
            break
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("row 1, column 1")
    for key in ["ArrowDown"] * 3 + ["ArrowRight"] * 4:
        press(key)
    assert "trap −1" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    press("Enter")
    expect(page.locator("#status")).to_contain_text("picked up")
    for key in ["ArrowDown", "ArrowRight", "ArrowRight"]:
        press(key)
    press("Enter")
    world = WORLD.moved((3, 4), (4, 6))
    solved(page, world)
    assert page.evaluate("document.activeElement.dataset.row") == "4"
    press("ArrowLeft")
    press("w")
    world = replace(world, walls=frozenset({(4, 5)}))
    solved(page, world)
    press("ArrowLeft")
    press("t")
    world = replace(world, prizes={**world.prizes, (4, 4): 1.0})
    solved(page, world)
    press("Delete")
    world = replace(world, prizes={c: r for c, r in world.prizes.items() if c != (4, 4)})
    solved(page, world)
    press("r")
    at_step(page, 0)
    press(".")
    at_step(page, 1)
    press(".")
    at_step(page, 2)
    press(",")
    at_step(page, 1)
    press("p")
    eventually(page, "parseInt(document.getElementById('step').textContent) > 3")
    press("p")
    press("Control+z")
    expect(cell(page, 4, 4)).to_have_class(re.compile("treasure"))
    expect(page.locator("#cell .place")).to_contain_text("Row 5, column 5")
    for _ in range(20):
        press("Tab")
        if page.evaluate("document.activeElement.id") == "discount":
            break
    press("ArrowLeft")
    expect(page.locator("output[for=discount]")).to_have_text("0.89")


def test_every_control_can_be_reached_by_tab_and_the_focus_is_seen(opened):
    page = opened(f"{SLIPPERY}&run=value_iteration,q_learning,modified_policy_iteration&cell=3,4&at=3")
    at_step(page, 3)
    everything_is_reached_by_tab(page, 12)


OTHERS = [pytest.param(*each, marks=pytest.mark.long) for each in (("laptop", "dark"), ("phone", "light"))]


@pytest.mark.parametrize("size, scheme", [("laptop", "light"), ("phone", "dark"), *OTHERS])
@pytest.mark.parametrize(
    "fragment", [f"{SLIPPERY}&at=30&cell=2,4", f"{SLIPPERY}&run=policy_iteration,q_learning,td,sarsa&at=20&cell=3,4"]
)
def test_axe_finds_nothing(opened, size, scheme, fragment):
    page = opened(fragment, size, scheme)
    at_step(page, r"\d+")
    page.locator("details.keys summary").click()
    settle(page)
    page.wait_for_timeout(200)
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    assert found.violations_count == 0, found.generate_report()


def test_negative_control_axe_notices(opened):
    page = opened()
    page.evaluate("document.getElementById('scrub').removeAttribute('aria-label')")
    page.evaluate("document.querySelector('.caption').style.color = '#bbbbbb'")
    assert {v["id"] for v in Axe().run(page).response["violations"]} >= {"label", "color-contrast"}


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1440])
def test_nothing_is_wider_than_the_window_and_targets_are_large_enough(opened, width):
    page = opened(f"{SLIPPERY}&run=value_iteration,q_learning&cell=2,4&at=9")
    page.set_viewport_size({"width": width, "height": 800})
    settle(page)
    eventually(page, "document.documentElement.scrollWidth <= innerWidth")
    small = page.evaluate(
        """() => [...document.querySelectorAll('button, select, input, .cell')].filter(e => e.checkVisibility())
            .filter(e => { const b = e.getBoundingClientRect(); return b.width < 24 || b.height < 24; }).map(e => e.outerHTML)"""
    )
    assert not small


@pytest.mark.parametrize("run", ["value_iteration", "value_iteration,q_learning", "value_iteration,q_learning,sarsa"])
@pytest.mark.parametrize(("width", "height"), SMALL_WINDOWS)
def test_the_player_covers_nothing(opened, width, height, run):
    page = opened(f"{SLIPPERY}&run={run}")
    page.set_viewport_size({"width": width, "height": height})
    settle(page)
    until(lambda: not under_the_player(page))
    assert (width, height) != SMALL_WINDOWS[0] or "sarsa" in run or not cells_outside_the_window(page)


def test_negative_control_a_player_that_sticks_covers_cells(opened):
    page = opened(f"{SLIPPERY}&run=value_iteration,q_learning,sarsa")
    page.set_viewport_size({"width": 1366, "height": 768})
    make_the_player_sticky(page)
    assert under_the_player(page)


def test_by_touch(opened):
    page = opened(f"{SLIPPERY}&at=10000", "phone", touch=True)
    cell(page, 3, 4).tap()
    expect(cell(page, 3, 4)).to_have_class(re.compile("carried"))
    cell(page, 6, 2).tap()
    solved(page, WORLD.moved((3, 4), (6, 2)))


def test_dragging_by_touch(opened):
    page = opened(f"{SLIPPERY}&at=10000", "phone", touch=True)
    solved(page, WORLD)
    touch = page.context.new_cdp_session(page)
    start, goal = (cell(page, *at).bounding_box() for at in ((3, 4), (6, 6)))
    ways = np.linspace([start["x"] + 15, start["y"] + 15], [goal["x"] + 15, goal["y"] + 15], 15)
    for number, (x, y) in enumerate(ways):
        kind = "touchMove" if number else "touchStart"
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    solved(page, WORLD.moved((3, 4), (6, 6)))
    assert page.evaluate("scrollY") == 0


def test_the_wildest_slider_stays_within_the_limits_of_the_studio(browser):
    # half of the burst for half of the seconds that it would take to use the whole
    with live_studio(burst=StudioSettings.burst // 2) as strict:
        page = browser.new_page(reduced_motion="reduce")
        refused = []
        page.on("response", lambda response: refused.append(response.url) if response.status == 429 else None)
        page.goto(f"{strict.base}/enter?key={strict.settings.key}")
        page.goto(f"{strict.base}/grid#slip=0.1&run=value_iteration,policy_iteration,q_learning,sarsa&at=40&cell=2,2")
        page.reload()
        page.wait_for_selector(".cell[data-value]")
        page.evaluate(
            """async () => { const s = document.getElementById('discount');
                for (let n = 0; n < 150; n++) {
                    s.value = 0.5 + 0.4 * Math.abs(Math.sin(n / 9));
                    s.dispatchEvent(new Event('input'));
                    await new Promise(requestAnimationFrame);
                }
                s.value = 0.85; s.dispatchEvent(new Event('input')); s.dispatchEvent(new Event('change')); }"""
        )
        solved(page, replace(WORLD, gamma=0.85))
        assert not refused
        page.close()


def test_the_theme_can_be_changed_and_stays(opened):
    page = opened()
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 24)"
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 24)"


def test_a_studio_that_was_stopped_is_said_so(browser):
    with live_studio() as gone:
        page = browser.new_page()
        page.goto(f"{gone.base}/enter?key={gone.settings.key}")
        page.wait_for_selector(".cell[data-value]")
    page.click("#compare")
    expect(page.locator(".failure").nth(1)).to_contain_text("does not answer")
    page.close()
