"""The runs page in Chromium: live while a run writes, by mouse and by keyboard alone, its speed, its accessibility."""

from __future__ import annotations

import re

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import Visits
from live_studio import live_studio
from playwright.sync_api import CDPSession, Page, expect
from run_folders import CURATED, GIF, append, figures, make_run, rollout, words
from timing import until

from psigrad.records.rows import rollout_figures
from psigrad.records.run_folder import RunFolder
from psigrad_studio.runs.rollout_index import RolloutIndex

EVIL = '<img src=x onerror="document.title=1"><script>document.title=2</script>'


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("studio") / "runs"
    for seed in range(3):
        make_run(root / "compare" / f"grpo-{seed}", seed=seed)
    bad = make_run(root / "rloo", 12, algorithm="rloo")
    append(bad / "metrics.jsonl", *(figures(s, **{"completions/clipped_ratio": 0.6}) for s in range(13, 19)))
    append(
        bad / "rollouts.jsonl",
        *(rollout(13, 13, k, reward=0.5, advantage=0.0, finish_reason="length", completion=EVIL) for k in range(4)),
    )
    pieces = [["prompt", f"<|im_start|>user\n{EVIL}"], ["trained", "Hello."], ["masked", "\n" + "wide" * 200]]
    append(bad / "events.jsonl", {"time": 1.0, "kind": "first_rows", "rows": [["my.jsonl:1", pieces]]})
    control = make_run(root / "cartpole", rollouts=0, recipe="control", algorithm="ppo", env="CartPole-v1")
    (control / "episode.gif").write_bytes(GIF)
    append(
        control / "rollouts.jsonl",
        *({"step": 20, "kind": "episode", "episode": i, "reward": 9.0 + i, "length": 9} for i in range(3)),
    )
    return root


@pytest.fixture(scope="module")
def studio(root):
    with live_studio(runs=root, work_seconds=20.0, requests_per_second=1e6, burst=10**6) as running:
        yield running


@pytest.fixture(scope="module")
def ids(studio):
    return {run["name"]: run["id"] for run in studio.ask("GET", "/api/runs").json["runs"]}


@pytest.fixture
def opened(studio, browser):
    """opened(fragment, …) -> a page that is ready; what it logged and asked for is looked at in the end."""
    visits = Visits(browser)

    def visit(
        fragment: str = "", size: str = "laptop", scheme: str = "light", at=studio, touch: bool = False, script: str = ""
    ) -> Page:
        page = visits.page(size, scheme, touch=touch)
        page.add_init_script(script)
        page.goto(f"{at.base}/enter?key={at.settings.key}")
        page.goto("about:blank")
        page.goto(f"{at.base}/runs#{fragment}")
        page.wait_for_selector("html[data-ready]")
        return page

    yield visit
    visits.close(["willReadFrequently"])  # it is these tests that read pixels


def shown(page: Page) -> list[str]:
    return page.locator("#charts .chart").evaluate_all("nodes => nodes.map(n => n.dataset.name)")


def readout(page: Page, name: str) -> str:
    return page.locator(f'.chart[data-name="{name}"] .readout').inner_text().replace("\n", " ")


def painted(page: Page, name: str) -> int:
    """Pixels of a chart that aren't empty; none while the chart isn't there yet."""
    script = """name => {
      const canvas = document.querySelector(`.chart[data-name="${name}"] canvas`);
      if (!canvas) return 0;
      const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      let n = 0; for (let i = 3; i < pixels.length; i += 4) n += pixels[i] > 0; return n; }"""
    return page.evaluate(script, name)


# ---- the list and the curves


def test_seeds_are_a_band_and_runs_lie_over_one_another(opened, ids):
    page = opened(f"runs={ids['compare/grpo-0']}")
    expect(page.locator('.chart[data-name="reward"] .readout')).to_contain_text("0.4")
    page.get_by_role("checkbox", name="Overlay all seeds of compare/grpo").check()
    expect(page.locator("#legend")).to_contain_text("compare/grpo, 3 seeds mean and range")
    # seeds end at 0.4, 0.5 and 0.6
    expect(page.locator('.chart[data-name="reward"] .readout')).to_contain_text("0.5 (0.4 to 0.6)")
    page.get_by_label("seeds as bands").uncheck()
    expect(page.locator("#legend li")).to_have_count(3)
    page.get_by_role("checkbox", name="Overlay rloo").check()
    expect(page.locator("#legend li")).to_have_count(4)
    until(lambda: {"reward", "dead_groups", "length", "truncated", "entropy", "grad_norm"} <= set(shown(page)))
    until(lambda: painted(page, "reward") > 2000)
    address = page.url
    again = opened(address.partition("#")[2])
    expect(again.locator("#legend li")).to_have_count(4)


def test_axes_smoothing_and_a_logarithmic_scale(opened, ids):
    page = opened(f"runs={ids['compare/grpo-0']}")
    page.select_option("#axis", "time")
    until(lambda: "axis=time" in page.url)
    expect(page.locator("#charts")).to_have_attribute("data-axis", "time")
    page.locator('.chart[data-name="reward"] .frame').focus()
    page.keyboard.press("Home")
    expect(page.locator('.chart[data-name="reward"] .readout')).to_contain_text("step 1")
    before = until(lambda: painted(page, "grad_norm"))
    page.locator("#smooth").fill("0.9")
    until(lambda: painted(page, "grad_norm") not in (0, before))
    page.check("#log")
    until(lambda: "log=1" in page.url)
    until(lambda: painted(page, "reward") > 1000)


def test_a_logarithmic_scale_of_a_figure_that_hardly_moves(opened, tmp_path):
    run = make_run(tmp_path / "runs" / "still", 1)
    append(run / "metrics.jsonl", *(figures(s, reward=0.3 + 1e-16 * (s % 2), grad_norm=1e3 + 1e-9 * s) for s in range(2, 30)))
    with live_studio(runs=tmp_path / "runs") as studio:
        page = opened("log=1&smooth=0.5", at=studio)
        expect(page.locator('.chart[data-name="reward"] .readout')).to_contain_text("0.3")
        until(lambda: painted(page, "grad_norm") > 100)
        page.goto("about:blank")


def test_figures_that_are_always_zero_take_little_room(opened, ids):
    page = opened(f"runs={ids['compare/grpo-0']}")
    expect(page.locator('.flats .chart[data-name="unscored"] .readout')).to_have_text("0 at every step")
    expect(page.locator('.flats .chart[data-name="unscored"] .frame')).to_be_hidden()


def x_ends(page: Page, name: str) -> list[float]:
    """Where the x axis of a chart begins and ends: what the cross-hair says at its ends. A chart that is drawn anew meanwhile
    says nothing, or what was there before: so this is asked `until` it is as expected.
    """
    page.locator(f'.chart[data-name="{name}"]').scroll_into_view_if_needed()
    box = page.locator(f'.chart[data-name="{name}"] .u-over').bounding_box()
    found = []
    for share in (0.001, 0.999) if box else ():
        page.mouse.move(box["x"] + box["width"] * share, box["y"] + 60)
        page.evaluate(TWO_FRAMES)
        found += [float(step) for step in re.findall(r"step (\d+)", readout(page, name))]
    page.mouse.move(0, 0)
    return found


TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def reaches(page: Page, name: str, ends: list[float]) -> None:
    until(lambda: x_ends(page, name) == ends)


def test_the_axis_of_a_run_with_a_single_step_begins_at_it(opened, tmp_path):
    make_run(tmp_path / "young", 1)
    with live_studio(runs=tmp_path) as studio:
        page = opened(at=studio)
        page.locator('.chart[data-name="reward"]').scroll_into_view_if_needed()
        box = page.locator('.chart[data-name="reward"] .u-over').bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
        point = page.locator('.chart[data-name="reward"] .hover-point')
        until(lambda: point.is_visible() and abs(point.bounding_box()["x"] - box["x"]) < 10)


def test_zooming_by_mouse_and_by_keyboard(opened, ids):
    page = opened(f"runs={ids['compare/grpo-0']}")
    reaches(page, "reward", [1, 20])
    box = page.locator('.chart[data-name="reward"] .u-over').bounding_box()
    page.mouse.move(box["x"] + box["width"] * 5 / 19, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 9 / 19, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page.locator("#unzoom")).to_be_visible()
    expect(page.locator("#curves")).to_be_visible()  # the end of a drag is no click, which would open the completions
    reaches(page, "reward", [6, 10])
    reaches(page, "grad_norm", [6, 10])
    again = opened(page.url.partition("#")[2])
    reaches(again, "reward", [6, 10])
    page.click("#unzoom")
    expect(page.locator("#unzoom")).to_be_hidden()
    reaches(page, "reward", [1, 20])
    page.locator('.chart[data-name="reward"] .frame').focus()
    page.keyboard.press("Home")
    page.keyboard.press("+")
    expect(page.locator("#unzoom")).to_be_visible()
    until(lambda: len(ends := x_ends(page, "reward")) == 2 and ends[1] < 10)
    page.locator('.chart[data-name="reward"] .frame').focus()
    page.keyboard.press("Escape")
    reaches(page, "reward", [1, 20])


def test_a_chart_reaches_as_far_as_its_own_runs(opened, tmp_path):
    make_run(tmp_path / "runs" / "short", 20)
    longer = make_run(tmp_path / "runs" / "longer", 20, algorithm="rloo")
    append(longer / "metrics.jsonl", *({"step": s, "reward": 0.5} for s in range(21, 61)))
    with live_studio(runs=tmp_path / "runs") as studio:
        ids = [run["id"] for run in studio.ask("GET", "/api/runs").json["runs"]]
        page = opened(f"runs={'.'.join(ids)}", at=studio)
        reaches(page, "reward", [1, 60])
        reaches(page, "grad_norm", [1, 20])
        page.goto("about:blank")


def test_a_failed_run_says_why(opened, tmp_path):
    run = tmp_path / "runs" / "broken"
    with RunFolder.open(run, {"algorithm": "grpo", "run": {"seed": 3}}) as folder:
        folder.event("started", step=0)
        folder.event("failed", reason="ZeroDivisionError: division by zero")
    with live_studio(runs=tmp_path / "runs") as studio:
        page = opened(at=studio)
        expect(page.locator("#alerts")).to_contain_text("ZeroDivisionError: division by zero")
        expect(page.locator("#no-figures")).to_have_text("No figures have been written yet.")
        page.get_by_role("button", name="What happened").click()
        expect(page.get_by_role("tab", name="About")).to_have_attribute("aria-selected", "true")
        page.goto("about:blank")


def test_all_other_figures_stand_under_more(opened, ids):
    page = opened(f"runs={ids['compare/grpo-0']}")
    expect(page.locator("#more-count")).to_have_text(re.compile(r"\(\d+\)"))
    assert "rewards/exact/mean" not in shown(page)
    page.locator("#more summary").click()
    expect(page.locator('#more-charts .chart[data-name="rewards/exact/mean"] .readout')).to_contain_text("0.5")


def test_searching_and_filtering_runs(opened):
    page = opened()
    page.fill("#search", "rloo")
    expect(page.locator(".run")).to_have_count(1)
    page.fill("#search", "")
    page.select_option("#state", "alerts")
    expect(page.locator(".run .name")).to_have_text(["rloo"])
    expect(page.locator(".run .alert")).to_contain_text("Cut completions, from step 13")


def test_the_cross_hair_stands_at_one_step_in_every_chart(opened, ids):
    page = opened(f"runs={ids['compare/grpo-0']}")
    box = page.locator('.chart[data-name="reward"] .u-over').bounding_box()
    page.mouse.move(box["x"] + box["width"] * 9 / 19, box["y"] + 60)
    expect(page.locator('.chart[data-name="reward"] .readout')).to_contain_text("step 10")
    until(lambda: {readout(page, name).split("  ")[0][:7] for name in shown(page) if name != "unscored"} == {"step 10"})
    page.mouse.click(box["x"] + box["width"] * 9 / 19, box["y"] + 60)
    expect(page.locator("#rollouts .prompt h2")).to_contain_text("Step 10")


def test_the_page_follows_a_run_that_is_being_written(opened, root, studio):
    with RunFolder.open(root / "growing", {"algorithm": "grpo", "run": {"seed": 9}}) as folder:
        folder.event("started", step=0)
        for step in range(1, 6):
            folder.metrics(figures(step))
        found = until(lambda: {r["name"]: r["id"] for r in studio.ask("GET", "/api/runs").json["runs"]}.get("growing"))
        page = opened(f"runs={found}")
        expect(page.locator("#live")).to_have_text("live")
        folder.metrics(figures(6, reward=0.875))
        expect(page.locator('.chart[data-name="reward"] .readout')).to_contain_text("0.875")
        expect(page.locator(f'.run[data-id="{found}"] .figure')).to_contain_text("step 6")
        folder.metrics(figures(7, loss="NaN"))
        expect(page.locator("#alerts")).to_contain_text("Not a number since step 7")
        folder.rewind(3)  # as a resumed run does
        folder.metrics(figures(4, reward=0.125))
        expect(page.locator('.chart[data-name="reward"] .readout')).to_contain_text("0.125")
        expect(page.locator("#alerts")).to_be_empty()
        folder.event("finished")
    expect(page.locator(f'.run[data-id="{found}"] .state')).to_have_text("finished")
    page.goto("about:blank")


# What a page would do after seconds it does after a tenth of them.
IMPATIENT = "{ const later = window.setTimeout; window.setTimeout = (what, ms, ...rest) => later(what, ms / 10, ...rest); }"


def test_the_first_run_appears_by_itself(opened, tmp_path):
    (tmp_path / "runs").mkdir()
    with live_studio(runs=tmp_path / "runs") as studio:
        page = opened(at=studio, script=IMPATIENT)
        expect(page.locator("#empty")).to_contain_text("no runs here yet")
        make_run(tmp_path / "runs" / "first", 5)
        expect(page.locator('.chart[data-name="reward"] .readout')).to_contain_text("0.25")
        page.goto("about:blank")
        make_run(tmp_path / "runs" / "refused", 0, learning_rate=7.0)
        page = opened(at=studio)
        expect(page.locator("#runs .run")).to_have_count(2)
        expect(page.locator('.chart[data-name="reward"] .readout')).to_contain_text("0.25")
        page.goto("about:blank")


# ---- speed


def drawn(page: Page, tools: CDPSession, smooth: str) -> float:
    """Milliseconds that the page's thread computes for a drawing with another smoothing, however long it waits for a core."""

    def computed() -> float:
        return next(m["value"] for m in tools.send("Performance.getMetrics")["metrics"] if m["name"] == "ThreadTime")

    page.evaluate("document.getElementById('charts').dataset.milliseconds = ''")
    begun = computed()
    page.locator("#smooth").fill(smooth)
    until(lambda: page.locator("#charts").get_attribute("data-milliseconds"))
    page.evaluate(TWO_FRAMES)
    return 1000 * (computed() - begun)


def test_50_000_points_in_12_charts_are_drawn_within_300_ms(opened, tmp_path):
    run = make_run(tmp_path / "runs" / "long", 1, rollouts=0)
    values = np.random.default_rng(0).normal(size=(50_000, len(CURATED))).cumsum(0).round(3)
    with (run / "metrics.jsonl").open("w") as stream:
        names = [f'"{name}": ' for name in CURATED]
        for step, row in enumerate(values.tolist(), 1):
            stream.write(f'{{"step": {step}, ' + ", ".join(n + repr(v) for n, v in zip(names, row, strict=True)) + "}\n")
    with live_studio(runs=tmp_path / "runs", work_seconds=20.0) as studio:
        page = opened(at=studio)
        expect(page.locator("#charts")).to_have_attribute("data-drawn", re.compile("1[2-9]"))
        until(lambda: page.evaluate("document.querySelector('.run .figure').textContent").endswith("50\u202f000"))
        page.wait_for_timeout(500)
        tools = page.context.new_cdp_session(page)
        tools.send("Performance.enable", {"timeDomain": "threadTicks"})
        times = [drawn(page, tools, smooth) for smooth in ("0.5", "0.7", "0.3", "0.6", "0.9")]
        page.locator("#smooth").fill("0")
        # a drawing with more smoothing may still be on its way, so the value is waited for
        shown = lambda: float(readout(page, "grad_norm").replace("last", "").replace("−", "-").replace("\u202f", ""))  # noqa: E731
        until(lambda: shown() == pytest.approx(values[-1][10], rel=1e-3))
        print(f"\n12 charts of 50,000 points: {', '.join(f'{t:.0f}' for t in times)} ms")
        assert sorted(times)[2] < 300
        page.goto("about:blank")


# ---- completions


def test_the_newest_step_leads_though_a_long_file_is_read_in_parts(opened, root, studio, monkeypatch):
    make_run(root / "parts", 40, rollouts=2)

    def read(index, seconds=2.0):
        before = len(index)
        for at, line in index._tail.lines(4000):
            if (found := rollout_figures(line)) is not None:
                index._add(at, found)
        index.whole = len(index) == before
        return index.whole

    monkeypatch.setattr(RolloutIndex, "read", read)
    runs = {run["name"]: run["id"] for run in studio.ask("GET", "/api/runs").json["runs"]}
    page = opened(f"runs={runs['parts']}&tab=rollouts")
    expect(page.locator(".results [role=status]")).to_contain_text("80 of 80")
    expect(page.locator(".results li .line .soft").first).to_contain_text("step 40")


def test_a_group_side_by_side_with_why_its_advantage_is_zero(opened, ids):
    page = opened(f"runs={ids['rloo']}&tab=rollouts&step=13")
    expect(page.locator(".member")).to_have_count(4)
    expect(page.locator(".prompt .why")).to_contain_text("All 4 rewards of its group are 0.5")
    expect(page.locator(".member .said").first).to_have_text(EVIL)
    expect(page.locator(".prompt .said")).to_contain_text("Prompt 13")
    assert page.title() == "Runs · psigrad" and page.locator("main img").count() == 0


def test_tokens_in_colours_and_in_words(opened, studio, root):
    words(root / "compare" / "grpo-2" / "model")
    ident = next(r["id"] for r in studio.ask("GET", "/api/runs").json["runs"] if r["name"] == "compare/grpo-2")
    page = opened(f"runs={ident}&tab=rollouts&step=7")
    tokens = page.locator(".tokens").first
    expect(tokens.locator(".token")).to_have_count(4)
    assert page.locator("#measure option").all_inner_texts() == ["log-prob", "ratio", "KL", "entropy", "nothing"]
    strengths = lambda: tokens.locator(".token").evaluate_all("all => all.map(t => Number(t.style.getPropertyValue('--s')))")  # noqa: E731
    assert int(np.argmax(strengths())) == 1
    page.select_option("#measure", "ratio")
    expect(tokens.locator(".token.down")).to_have_count(1)
    assert int(np.argmax(strengths())) == 2
    tokens.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    said = page.locator(".token-said")
    expect(said).to_contain_text("2 of 4")
    expect(said).to_contain_text("log-prob −2")
    expect(said).to_contain_text("ratio 1.105")
    expect(said).to_contain_text("entropy 1.2")


def test_searching_completions(opened, ids):
    page = opened(f"runs={ids['compare/grpo-0']}&tab=rollouts")
    page.get_by_label("Text").fill("answer 3 of step 9")
    page.keyboard.press("Enter")
    expect(page.locator(".found li")).to_have_count(1)
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Reward from").fill("0.5")
    page.keyboard.press("Tab")
    expect(page.locator(".results [role=status]")).to_contain_text("40 of 80")
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()


def test_episodes_of_a_control_run_and_their_picture(opened, ids):
    page = opened(f"runs={ids['cartpole']}&tab=rollouts")
    expect(page.locator(".member")).to_have_count(3)
    for place in ("#rollouts", "#about"):
        if place == "#about":
            page.get_by_role("tab", name="About").click()
        page.locator(f"{place} .episode summary").click()
        until(lambda place=place: page.evaluate(f"document.querySelector('{place} .episode img')?.naturalWidth") == 1)


def test_a_run_with_a_video_offers_it_where_one_looks_first(opened, ids):
    page = opened(f"runs={ids['rloo']}")
    expect(page.locator("#curves")).to_be_visible()
    expect(page.locator("#watch")).to_be_hidden()
    page = opened(f"runs={ids['rloo']}.{ids['cartpole']}")
    page.get_by_role("button", name="Watch an episode").click()
    until(lambda: page.evaluate("document.querySelector('#about .episode img')?.naturalWidth") == 1)
    expect(page.get_by_role("tab", name="About")).to_be_focused()
    expect(page.locator("#which option:checked")).to_have_text("cartpole")
    expect(page.locator("#watch")).to_be_hidden()
    page.get_by_role("tab", name="Rollouts").click()
    expect(page.locator(".results [role=status]")).to_contain_text("episodes")
    page.get_by_role("tab", name="About").click()
    expect(page.locator("#about .episode")).not_to_have_attribute("open", "")


def test_the_first_rows_stand_as_the_model_reads_them(opened, ids):
    page = opened(f"runs={ids['rloo']}&tab=about")
    card = page.locator("#about .card", has_text="First rows")
    expect(card.locator(".said .prompt")).to_have_text(f"<|im_start|>user\n{EVIL}")
    expect(card.locator(".said .trained")).to_have_text("Hello.")
    expect(card.locator(".row .piece")).to_have_text(["prompt", "trained", "masked", "sampled"])
    expect(page.locator("#about .card", has_text="What happened")).not_to_contain_text("first_rows")


def test_alerts_lead_to_their_completions(opened, ids):
    page = opened(f"runs={ids['rloo']}")
    page.get_by_role("button", name="Show completions").click()
    page.get_by_role("button", name=re.compile("of step 13")).first.click()
    expect(page.locator(".prompt h2")).to_contain_text("Step 13")
    expect(page.get_by_role("tab", name="Rollouts")).to_have_attribute("aria-selected", "true")


# ---- without a mouse


def test_the_whole_flow_by_keyboard_alone(opened):
    """Find a run, lay another over it, read a curve, open a step, read a token, send two completions to be labelled."""
    page = opened()
    press = page.keyboard.press

    def tab_to(selector: str, most: int = 60) -> None:
        for _ in range(most):
            if page.evaluate("s => document.activeElement.matches(s)", selector):
                return
            press("Tab")
        raise AssertionError(f"no way to {selector}")

    press("/")
    page.keyboard.type("compare")
    expect(page.locator(".run")).to_have_count(3)
    tab_to(".several .name")
    press("ArrowDown")
    press("Enter")
    expect(page.locator(".run.chosen .name")).to_have_text(["compare/grpo-0"])
    press("ArrowDown")
    press("Shift+Tab")
    press("Space")
    expect(page.locator(".run.chosen")).to_have_count(2)
    tab_to("[role=tab]")
    expect(page.locator('.chart[data-name="reward"] .frame')).to_be_visible()
    tab_to('.chart[data-name="reward"] .frame')
    press("End")
    for _ in range(4):
        press("ArrowLeft")
    expect(page.locator("#said")).to_contain_text("at step 16")
    press("Enter")
    expect(page.locator(".prompt h2")).to_contain_text("Step 16")
    expect(page.locator(".found button").first).to_be_visible()
    tab_to(".found button")
    press("ArrowDown")
    press("Enter")
    expect(page.locator(".member.asked h3")).to_have_text("#1")
    tab_to(".member input")
    press("Space")
    press("Tab")
    tab_to(".member input")
    press("Space")
    expect(page.locator(".sending button").last).to_be_visible()
    tab_to(".sending button:last-of-type")
    press("Enter")
    expect(page.locator(".sending")).to_contain_text("Sent to the project “Sent from runs”")


def test_two_completions_can_be_sent_once_the_projects_are_known(opened, ids):
    page = opened(f"runs={ids['rloo']}&tab=rollouts")
    waiting = []
    page.route("**/api/runs/projects", lambda route: waiting.append(route), times=1)
    page.locator(".found button").first.click()
    boxes, sending = page.locator(".member input"), page.locator(".sending")
    boxes.nth(0).check()
    boxes.nth(1).check()
    until(lambda: page.wait_for_timeout(5) or len(waiting) == 1)
    assert not sending.is_visible(), "a card with nothing in it"
    boxes.nth(1).uncheck()
    with page.expect_response("**/api/runs/projects") as came:
        waiting.pop().continue_()
    came.value.finished()
    page.wait_for_timeout(100)
    assert not sending.is_visible(), "one completion is no pair"
    boxes.nth(1).check()
    expect(sending.get_by_role("button")).to_have_text(["Difference", "Send"])
    page.get_by_role("checkbox", name="Markdown").click()
    expect(boxes.nth(1)).to_be_checked()
    expect(sending).to_be_visible()  # those who are chosen stay offered


TABS = {"curves": "#charts canvas", "table": ".compare td", "rollouts": ".member", "about": "#about table"}


@pytest.mark.parametrize(("scheme", "size"), [("light", "laptop"), ("dark", "laptop"), ("dark", "phone")])
def test_axe_finds_nothing(opened, ids, size, scheme):
    page = opened(f"runs={ids['rloo']}.{ids['compare/grpo-0']}", size, scheme)
    for tab, sign in TABS.items():
        page.click(f"#tab-{tab}")
        expect(page.locator(sign).first).to_be_visible()
        found = Axe().run(page).response["violations"]
        assert not found, (tab, [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in found])


def test_nothing_is_wider_than_the_window(opened, ids):
    page = opened(f"runs={ids['rloo']}.{ids['compare/grpo-0']}")
    for tab, sign in TABS.items():
        page.click(f"#tab-{tab}")
        expect(page.locator(sign).first).to_be_visible()
        for width in (320, 390, 768, 1024, 1440):
            page.set_viewport_size({"width": width, "height": 800})
            until(lambda width=width: page.evaluate("document.documentElement.scrollWidth") <= width)


def test_the_theme_changes_the_curves_too(opened, ids):
    page = opened(f"runs={ids['rloo']}")
    until(lambda: painted(page, "reward"))
    before = page.evaluate(MAIN_COLOURS)
    page.click("#theme")
    until(lambda: page.evaluate(MAIN_COLOURS) not in (None, before))


MAIN_COLOURS = """() => {
  const canvas = document.querySelector(".chart[data-name=reward] canvas");
  if (!canvas) return null; // a chart that is drawn anew
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const found = new Map();
  for (let i = 0; i < pixels.length; i += 4) {
    const colour = pixels.slice(i, i + 3).join();
    if (pixels[i + 3] === 255) found.set(colour, (found.get(colour) ?? 0) + 1);
  }
  return [...found].sort((a, b) => b[1] - a[1]).slice(0, 2).join(" ");
}"""


# ---- many runs


def test_any_number_of_runs_is_drawn(tmp_path, opened):
    for seed in range(45):
        make_run(tmp_path / "runs" / f"many-{seed}", 3, seed=seed, rollouts=0)
    with live_studio(runs=tmp_path / "runs", work_seconds=20.0, requests_per_second=1e6, burst=10**6) as many:
        found = [run["id"] for run in many.ask("GET", "/api/runs").json["runs"]]
        page = opened(f"runs={'.'.join(found)}&bands=0", at=many)
        expect(page.locator("#legend li")).to_have_count(45)
        until(lambda: page.locator('.chart[data-name="reward"] .u-over').count() == 1)
        labels = page.locator('.chart[data-name="reward"] .frame').get_attribute("aria-label")
        assert labels.count(": 0.") + labels.count(": 1") + labels.count(": 2") + labels.count(": 3") + labels.count(": 4") >= 45
        page.goto("about:blank")


def test_a_table_is_sorted_by_a_press_and_leads_to_a_run(opened, ids):
    page = opened(f"runs={'.'.join(ids[f'compare/grpo-{seed}'] for seed in (1, 0, 2))}&tab=table")
    names = page.locator(".compare tbody th")
    page.locator('.compare [data-column="reward"]').click()
    expect(page.locator('.compare th[aria-sort="ascending"]')).to_contain_text("Reward")
    expect(names).to_have_text(["compare/grpo-0", "compare/grpo-1", "compare/grpo-2"])
    page.keyboard.press("Enter")
    expect(names).to_have_text(["compare/grpo-2", "compare/grpo-1", "compare/grpo-0"])
    expect(page.locator('.compare [data-column="setting run.seed"]')).to_have_text(re.compile("seed"))
    assert not Axe().run(page).response["violations"]
    names.first.get_by_role("button").click()
    expect(page.locator(".run.chosen .name")).to_have_text("compare/grpo-2")


def test_tags_and_notes_are_kept_and_found(opened, ids):
    page = opened(f"runs={ids['cartpole']}&tab=about")
    page.get_by_label("Tags").fill("paper, baseline")
    page.get_by_label("Note").fill("the one with the low pole")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(f'.run[data-id="{ids["cartpole"]}"] .tags')).to_have_text("#baseline #paper")
    page.get_by_label("Note").fill("what was it again")
    page.get_by_role("button", name="Save").click()
    page.locator(".notes").get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Note")).to_have_value("the one with the low pole")
    page.fill("#search", "low pole")
    expect(page.locator(".run")).to_have_count(1)


def test_on_a_phone_the_first_chart_is_on_the_first_screen(opened, ids):
    page = opened(f"runs={ids['rloo']}", "phone")
    page.wait_for_selector(".chart .u-over")
    assert page.evaluate("document.querySelector('.chart').getBoundingClientRect().top") < 500
    expect(page.locator("#alerts")).to_contain_text("Cut completions")
    page.click("#choose")
    expect(page.locator("#search")).to_be_focused()
