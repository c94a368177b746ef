"""The labelling page in Chromium: by keyboard alone, by hand, by invite; what it shows, keeps, sends again and refuses."""

from __future__ import annotations

import json
import sys

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import SIZES, Visits, everything_is_reached_by_tab
from live_desk import PASSWORD, Guest, bring, guest, invite, project, told
from live_studio import live_studio
from playwright.sync_api import Page, expect
from timing import until

from psigrad_studio.label_api import sample_routes

NASTY = [
    "<img src=x onerror=\"document.title='broken'\">",
    "<script>document.title='broken'</script>",
    "\u202eright to left\u202c \u0000 \ud800 end",
]


pytestmark = pytest.mark.usefixtures("cheap_hashes")


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    runs = tmp_path_factory.mktemp("work") / "runs"
    (runs / "grpo" / "model").mkdir(parents=True)
    (runs / "grpo" / "model" / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    (runs / "grpo" / "model" / "model.safetensors").write_bytes(b"only listed")
    rows = [
        {"step": s, "kind": "train", "row": 0, "k": k, "prompt": "p", "completion": f"{s} {k}"} for s in (1, 2) for k in (0, 1)
    ]
    (runs / "grpo" / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    unlimited = {"requests_per_second": 1e6, "burst": 10**6, "strangers_per_second": 1e6, "strangers_burst": 10**6}
    with live_studio(**unlimited, runs=runs) as running:
        yield running


@pytest.fixture
def opened(studio, browser):
    """opened(path, who, ...) -> a page that is ready; what it logged and asked for is looked at in the end."""
    visits = Visits(browser)

    def visit(path: str, who: Guest | str = "owner", size: str = "laptop", scheme: str = "light") -> Page:
        page = visits.page(size, scheme)
        if who == "owner":
            page.goto(f"{studio.base}/enter?key={studio.settings.key}")
        elif isinstance(who, Guest):
            name, _, value = who.cookie.partition("=")
            page.context.add_cookies([{"name": name, "value": value, "url": studio.base, "httpOnly": True, "sameSite": "Lax"}])
            page.goto(f"{studio.base}/join")  # any page of this port
            page.evaluate("csrf => localStorage.setItem('psigrad-session', csrf)", who.csrf)
        page.goto("about:blank")
        page.goto(studio.base + path)
        page.wait_for_selector("html[data-ready]")
        return page

    visit.expected = []
    yield visit
    visits.close(visit.expected, [studio.base])


def at_work(opened, studio, number: int, who: Guest | str | None = None, **look) -> tuple[Page, Guest | str]:
    who = who or guest(studio, number)
    page = opened(f"/label#project={number}", who, **look)
    expect(page.locator(".asked, .done")).to_be_visible()
    return page, who


def votes(studio, number: int) -> list[dict]:
    """Everything that is stored of a project."""
    return [json.loads(line) for line in studio.ask("GET", f"/api/label/export?project={number}&form=votes").body.splitlines()]


def counted(page: Page, text: str) -> None:
    expect(page.locator(".how")).to_contain_text(text)


# ---- labelling by keyboard


def test_pairs_by_keyboard_alone(opened, studio):
    number = project(studio, 8)
    page, _ = at_work(opened, studio, number)
    counted(page, "0 answered · 8 left")
    shown = []
    for i, (key, choice) in enumerate([("a", "left"), ("ArrowRight", "right"), ("t", "tie"), ("X", "both_bad"), ("B", "right")]):
        shown.append(page.locator(".words").all_text_contents())
        page.keyboard.press(key)
        counted(page, f"{i + 1} answered")
        row = votes(studio, number)[-1]
        assert (row["side"] or row["choice"]) == choice
        by_place = {"a": 0, "b": 1}
        if choice in ("left", "right"):
            chosen = row["completions"][by_place[row["choice"]]]["text"]
            assert chosen == shown[-1][("left", "right").index(choice)]
    page.keyboard.press("s")
    counted(page, "5 answered, 1 skipped · 2 left")
    page.keyboard.press("u")
    counted(page, "5 answered · 3 left")
    page.keyboard.press("Control+z")
    counted(page, "4 answered · 4 left")
    expect(page.locator(".words").first).to_have_text(shown[-1][0])
    page.keyboard.press("r")
    page.keyboard.type("b says why, a, t and x are only letters here?")
    page.keyboard.press("Escape")
    page.keyboard.press("a")
    counted(page, "5 answered")
    assert votes(studio, number)[-1]["reason"] == "b says why, a, t and x are only letters here?"
    assert [row["action"] for row in votes(studio, number)] == ["vote"] * 5 + ["skip", "undo", "undo", "vote"]
    for _ in range(3):
        before = page.locator(".how").text_content()
        page.keyboard.press("b")
        expect(page.locator(".how")).not_to_have_text(before)
    expect(page.locator(".done")).to_contain_text("No tasks are left for you")
    assert all(0 <= row["client_ms"] < 60_000 for row in votes(studio, number) if row["action"] == "vote")


def test_keys_that_come_too_fast_answer_no_task_twice_and_none_unseen(opened, studio):
    number = project(studio, 6)
    page, _ = at_work(opened, studio, number)
    for key in "aaabtu":
        page.keyboard.press(key)
    rows = until(lambda: votes(studio, number))
    assert 1 <= len(rows) <= 6 and rows[0]["side"] == "left"
    # every further one was given to a task that was on the page by then; a 409 would be in the console


def test_enter_on_a_button_is_the_buttons_own(opened, studio):
    number = project(studio, 3, strengths=3)
    page, _ = at_work(opened, studio, number)
    page.keyboard.press("a")
    page.get_by_role("button", name="Skip").focus()
    page.keyboard.press("Enter")
    counted(page, "0 answered, 1 skipped")
    page.click("#theme")
    page.keyboard.press("t")
    counted(page, "1 answered, 1 skipped")


def test_when_the_next_task_cannot_be_had_that_is_said_and_can_be_tried_again(opened, studio):
    number = project(studio, 2)
    page, _ = at_work(opened, studio, number)
    opened.expected.append("Failed to load resource")
    page.route("**/api/label/next", lambda route: route.abort())
    page.keyboard.press("a")
    expect(page.locator(".done")).to_contain_text("could not be loaded")
    page.keyboard.press("a")
    page.unroute("**/api/label/next")
    page.get_by_role("button", name="Look again").click()
    counted(page, "1 answered · 1 left")
    assert len(votes(studio, number)) == 1


def test_strength_is_asked_after_a_side(opened, studio):
    number = project(studio, 3, strengths=3)
    page, _ = at_work(opened, studio, number)
    page.keyboard.press("3")  # no side yet
    page.keyboard.press("a")
    expect(page.locator(".grades")).to_contain_text("How much better is A?")
    page.keyboard.press("b")  # changed their mind
    expect(page.locator(".grades")).to_contain_text("How much better is B?")
    page.keyboard.press("3")
    counted(page, "1 answered")
    page.keyboard.press("a")
    page.keyboard.press("Enter")
    counted(page, "2 answered")
    page.keyboard.press("t")
    counted(page, "3 answered")
    assert [(row["side"], row["strength"]) for row in votes(studio, number)] == [("right", 3), ("left", None), (None, None)]


def test_ratings_by_keyboard(opened, studio):
    for kind, keys in (("rating-5", {"1": 1, "5": 5}), ("rating-10", {"7": 7, "0": 10})):
        number = project(studio, 1, kind=kind)
        page, _ = at_work(opened, studio, number)
        page.keyboard.press("6" if kind == "rating-5" else "x")  # means nothing here
        for i, key in enumerate(keys, 1):
            page.keyboard.press(key)
            counted(page, f"{i} answered")
        assert [row["rating"] for row in votes(studio, number)] == list(keys.values())


def test_a_ranking_by_keyboard(opened, studio):
    number = project(studio, 0, kind="ranking")
    bring(studio, number, [{"prompt": "q", "completions": [f"text {n}" for n in range(4)]}])
    page, _ = at_work(opened, studio, number)

    def order() -> list[str]:
        return page.locator(".order .words").all_text_contents()

    first = order()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.index") == "1"
    page.keyboard.press("Shift+ArrowUp")
    assert order() == [first[1], first[0], first[2], first[3]]
    page.keyboard.press("d")
    page.keyboard.press("=")
    expect(page.locator(".order li").nth(3)).to_contain_text("3 (as above)")
    page.keyboard.press("c")
    page.keyboard.press("Shift+ArrowUp")
    assert order() == [first[1], first[2], first[0], first[3]]
    expect(page.locator(".order li").nth(3)).not_to_contain_text("as above")  # it was equal to C, which left
    page.keyboard.press("d")
    page.keyboard.press("=")
    page.keyboard.press("Enter")
    expect(page.locator(".done")).to_be_visible()
    (row,) = votes(studio, number)
    by_text = dict(zip((c["text"] for c in row["completions"]), row["ranks"], strict=True))
    assert by_text == {first[1]: 1, first[2]: 2, first[0]: 3, first[3]: 3}


def test_a_ranking_by_hand(opened, studio):
    number = project(studio, 0, kind="ranking")
    bring(studio, number, [{"prompt": "q", "completions": [f"text {n}" for n in range(3)]}])
    page, _ = at_work(opened, studio, number, size="phone")
    first = page.locator(".order .words").all_text_contents()
    page.get_by_role("button", name="Move down A").click()
    page.get_by_role("button", name="As good as the one above: C").click()
    page.get_by_role("button", name="Submit this order").click()
    expect(page.locator(".done")).to_be_visible()
    (row,) = votes(studio, number)
    by_text = dict(zip((c["text"] for c in row["completions"]), row["ranks"], strict=True))
    assert by_text == {first[1]: 1, first[0]: 2, first[2]: 2}


def test_keys_are_listed_and_can_be_turned_off(opened, studio):
    number = project(studio, 3)
    page, _ = at_work(opened, studio, number)
    page.keyboard.press("?")
    expect(page.locator("dialog.keys")).to_contain_text("A is better")
    page.keyboard.press("a")  # behind the dialog nothing happens
    page.locator("dialog.keys input").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("a")
    page.keyboard.press("s")
    page.wait_for_timeout(200)
    assert votes(studio, number) == []
    page.get_by_role("button", name="B is better").click()
    counted(page, "1 answered")


def test_every_control_of_the_desk_can_be_reached_by_tab_and_the_focus_is_seen(opened, studio):
    page, _ = at_work(opened, studio, project(studio, 3, strengths=3))
    page.keyboard.press("a")
    everything_is_reached_by_tab(page, 6, "a[href], button, select, input")


# ---- what may go wrong


def test_an_answer_whose_acknowledgement_was_lost_is_sent_again_and_stored_once(opened, studio):
    number = project(studio, 2)
    page, _ = at_work(opened, studio, number)
    opened.expected.append("Failed to load resource")
    lost, heard = [], []

    def lose(route) -> None:
        if not heard:
            route.fetch()  # it arrives, and nobody hears of it
            lost.append(route.request.post_data_json["key"])
            route.abort()
        else:
            route.continue_()

    page.route("**/api/label/vote", lose)
    page.keyboard.press("a")
    expect(page.locator("#notice")).to_contain_text("Trying again")
    heard.append(True)  # not sooner: the words go when an answer comes
    counted(page, "1 answered")
    assert len(lost) >= 1 and len(set(lost)) == 1 and len(votes(studio, number)) == 1


def test_a_lease_that_ran_out_is_said_and_a_lost_task_gives_way_to_the_next(opened, studio):
    number = project(studio, 2, lease_s=10)
    ann, bob = guest(studio, number), guest(studio, number)
    page, _ = at_work(opened, studio, number, ann)
    opened.expected.append("409")
    mine = page.locator(".asked").text_content()
    db = studio.app.state.labels.db
    with db.session(write=True) as session:
        from sqlalchemy import text

        session.execute(text("UPDATE seats SET lease_until = 1 WHERE project_id = :n AND user_id IS NOT NULL"), {"n": number})
    task = bob.next(number)
    assert task["prompt"] == mine
    told(bob.vote(task, choice="left"))
    page.keyboard.press("a")
    expect(page.locator("#notice")).to_contain_text("somebody else has it now")
    expect(page.locator(".asked")).not_to_have_text(mine)
    assert [row["rater"] for row in votes(studio, number)] == [bob.name]


def test_the_time_that_is_left_is_shown_and_its_end_is_said(opened, studio):
    page, _ = at_work(opened, studio, project(studio, 1))
    expect(page.locator(".lease")).to_have_text("reserved for you for 10 min")
    page.clock.install()
    page.reload()
    expect(page.locator(".asked")).to_be_visible()
    page.clock.fast_forward("10:10")
    expect(page.locator(".lease")).to_have_text("no longer reserved for you")
    expect(page.locator("#notice")).to_contain_text("still counts unless somebody else")


def test_who_is_at_work_keeps_the_task(opened, studio):
    page, _ = at_work(opened, studio, project(studio, 1))
    page.clock.install()
    page.reload()
    expect(page.locator(".asked")).to_be_visible()
    renewed = []
    page.on("request", lambda request: renewed.append(request.url) if request.url.endswith("/renew") else None)
    page.clock.fast_forward("02:00")
    # a real wheel's turn is told with the next frame, which may come after the clock has been put on
    page.evaluate("document.dispatchEvent(new WheelEvent('wheel', { deltaY: 10 }))")
    page.clock.fast_forward("03:10")
    page.clock.run_for(6000)
    until(lambda: page.wait_for_timeout(20) or len(renewed) == 1)


def test_a_session_that_ended_asks_for_a_login(opened, studio):
    number = project(studio, 2)
    page, ann = at_work(opened, studio, number)
    opened.expected.append("401")
    told(ann.post("/api/join/logout", {}))
    page.keyboard.press("a")
    page.get_by_role("link", name="Log in again").click()
    page.fill("#name", ann.name)
    page.fill("#password", PASSWORD)
    page.keyboard.press("Enter")
    expect(page.locator(".projects a")).to_be_visible()


# ---- blindness and markup


def test_the_page_of_a_labeller_has_no_names_of_what_made_the_completions(opened, studio):
    number = project(studio, 3, strengths=2)
    page, _ = at_work(opened, studio, number)
    bodies: list[str] = []
    page.on("response", lambda response: bodies.append(response.text()) if "/api/" in response.url else None)
    page.reload()
    for _ in range(3):
        expect(page.locator(".asked, .done")).to_be_visible()
        assert "SAMPLER" not in page.content()
        before = page.locator(".how").text_content()
        page.keyboard.press("t")
        expect(page.locator(".how")).not_to_have_text(before)
    assert bodies and not any("SAMPLER" in body for body in bodies)
    owner = opened(f"/label#project={number}&part=results")
    expect(owner.locator(".intervals, .results")).to_contain_text(["SAMPLER"])


def test_what_models_and_people_wrote_stays_text(opened, studio):
    name = f"<b>bold</b> {NASTY[0]}"[:100]
    number = project(studio, 0, name=name, instructions=NASTY[1])
    bring(studio, number, [{"prompt": NASTY[1], "completions": NASTY[:2], "samplers": NASTY[:2]}])
    bring(
        studio,
        number,
        [
            {
                "prompt": [{"role": "user", "content": NASTY[2]}],
                "completions": [[{"role": "assistant", "content": t}] for t in (NASTY[2], NASTY[0])],
            }
        ],
    )
    ann = guest(studio, number, name="<i>Ann</i>")
    page, _ = at_work(opened, studio, number, ann)
    expect(page.locator(".asked")).to_contain_text("<script>")
    expect(page.locator("#title")).to_have_text(name)
    for i in range(2):
        page.keyboard.press("a")
        counted(page, f"{i + 1} answered")
    owner = opened(f"/label#project={number}&part=results")
    expect(owner.locator("table").last).to_contain_text("<i>Ann</i>")
    expect(owner.locator(".results")).to_contain_text("<img src=x")
    for each in (page, owner):
        assert each.title() != "broken" and "psigrad" in each.title()
        assert each.locator("main img, main script, main i, main b").count() == 0


# ---- questions of one's own

ASPECTS = [
    {"name": "helpful", "ask": "Which helps more?", "why": True},
    {"name": "true", "kind": "scale", "ask": "How true is it?", "top": 3},
    {"name": "kind", "kind": "choice", "options": ["an answer", "a refusal"]},
    {"name": "note", "kind": "text", "ask": "Anything else?", "required": False},
]


def marked(page: Page) -> str:
    return page.locator(".question.current .ask").inner_text()


def test_a_sheet_of_questions_by_keyboard_alone(opened, studio):
    number = project(studio, 2, strengths=2, questions=ASPECTS)
    page, _ = at_work(opened, studio, number)
    expect(page.locator(".question")).to_have_count(6)  # the main one, and a scale has a row for A and one for B
    expect(page.get_by_role("group", name="A: How true is it?").get_by_role("button")).to_have_text(["1", "2", "3"])
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_contain_text("“Overall, which is better?” isn't answered yet")
    for question, key in [
        ("Overall, which is better?", "1"),  # A clearly, of A clearly, A slightly, tie, B slightly, B clearly
        ("Which helps more?", "3"),  # B slightly: the tie has a letter
        ("A: How true is it?", "3"),
        ("B: How true is it?", "1"),
        ("kind", "2"),
    ]:
        assert marked(page) == question
        page.keyboard.press(key)
    page.keyboard.press("ArrowUp")
    page.keyboard.press("1")  # the same again changes nothing where an answer is required
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    page.keyboard.type("a 1 b 2 s u t x? are letters")
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+y")
    page.keyboard.press("Enter")
    page.keyboard.type("and Enter is a line")
    counted(page, "0 answered")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowUp")
    while marked(page) != "Which helps more?":
        page.keyboard.press("ArrowUp")
    page.keyboard.press("4")
    page.keyboard.press("w")
    page.keyboard.type("because s is a letter")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    counted(page, "1 answered")
    (row,) = votes(studio, number)
    left, right = row["display"]
    answers = row["answers"]
    assert (row["side"], row["strength"]) == ("left", 2)
    assert answers["helpful"] == {"kind": "better", "value": "ab"[right], "strength": 2, "reason": "because s is a letter"}
    assert [answers["true"]["value"][place] for place in (left, right)] == [3, 1]
    assert answers["kind"] == {"kind": "choice", "value": "a refusal"}
    assert answers["note"]["value"].endswith("are letters\nand Enter is a line")
    page.keyboard.press("u")
    counted(page, "0 answered")
    expect(page.locator(".question")).to_have_count(6)


def test_one_completion_with_questions_of_ones_own_by_hand_on_a_phone(opened, studio):
    asked = [{"name": "true", "kind": "scale", "top": 5}, {"name": "sound", "kind": "scale", "top": 3, "required": False}]
    number = project(studio, 1, kind="rating-5", overall=False, questions=asked)
    page, _ = at_work(opened, studio, number, size="phone")
    expect(page.locator(".completion")).to_have_count(1)
    page.get_by_role("group", name="true").get_by_role("button", name="4").click()
    for _ in range(2):  # what need not be answered is taken back by choosing it again
        page.get_by_role("group", name="sound").get_by_role("button", name="2").click()
    page.get_by_role("button", name="Submit").click()
    counted(page, "1 answered")
    (row,) = votes(studio, number)
    assert row["answers"] == {"true": {"kind": "scale", "value": [4]}} and row["rating"] is None


def test_questions_are_written_in_the_form_and_each_is_exported(opened, studio, tmp_path):
    owner = opened("/label#part=new")
    owner.get_by_label("Name").fill("Of my own")
    owner.get_by_label("How much better").select_option("2")
    for name, kind in (("kind", "better"), ("true", "scale"), ("tone", "choice")):
        owner.get_by_role("button", name="Add a question").click()
        last = owner.locator(".own > li").last
        last.get_by_label("Name").fill(name)
        last.get_by_label("Kind").select_option(kind)
        if kind == "choice":
            last.get_by_label("Options, one per line").fill("dry\n\n warm ")
    owner.get_by_role("button", name="Create the project").click()
    expect(owner.locator("#tabs")).to_contain_text("Material")
    number = int(owner.url.partition("project=")[2].partition("&")[0])
    (made,) = [each for each in told(studio.ask("GET", "/api/label/projects")) if each["id"] == number]
    assert [(q["name"], q["kind"]) for q in made["questions"]] == [("kind", "better"), ("true", "scale"), ("tone", "choice")]
    assert made["questions"][2]["options"] == ["dry", "warm"] and made["overall"] and made["checks"] == 10
    bring(studio, number, [{"prompt": "q", "completions": ["x", "y"]}])
    ann = guest(studio, number)
    assert "checks" not in told(ann.get("/api/label/projects"))[0], "nobody who labels is told"
    task = ann.next(number)
    at = task["completions"].index("x")
    answers = {"kind": {"value": ("left", "right")[at], "strength": 2}, "true": {"value": [1, 1]}, "tone": {"value": "dry"}}
    told(ann.vote(task, choice=("left", "right")[1 - at], strength=1, answers=answers))
    owner.get_by_role("link", name="Results").click()
    table = owner.get_by_role("group", name="Table: Question")
    expect(table.get_by_role("rowheader")).to_have_text(["overall", "kind", "true", "tone", "weighted"])
    owner.get_by_label("Question to export").select_option("kind")
    expect(owner.locator(".file").first).to_contain_text("1 rows")
    with owner.expect_download() as waiting:
        owner.get_by_role("button", name="Preferences").click()
    waiting.value.save_as(tmp_path / "out.jsonl")
    (row,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (row["chosen"], row["criterion"]) == (
        "x",
        "kind",
    ) and waiting.value.suggested_filename == "Of-my-own-kind-preference.jsonl"
    owner.get_by_role("link", name="Settings").click()
    owner.locator(".own > li").first.get_by_label("Text for labellers").fill("Which is kinder?")
    owner.get_by_role("button", name="Save").click()
    until(
        lambda: any(
            q["ask"] == "Which is kinder?" for each in told(studio.ask("GET", "/api/label/projects")) for q in each["questions"]
        )
    )


def test_grades_that_the_form_does_not_offer_stay_and_weights_of_0_are_not_weighed(opened, studio):
    asked = [{"name": name, "kind": "scale", "weight": 0} for name in ("clear", "true")]
    number = project(studio, 1, strengths=7, questions=asked)
    owner = opened(f"/label#project={number}&part=settings")
    expect(owner.get_by_label("How much better")).to_have_value("7")
    owner.get_by_label("Instructions").fill("Look twice.")
    owner.get_by_role("button", name="Save").click()

    def settings() -> dict:
        return next(each for each in told(studio.ask("GET", "/api/label/projects")) if each["id"] == number)

    until(lambda: settings()["instructions"] == "Look twice.")
    assert settings()["strengths"] == 7
    owner.get_by_role("link", name="Results").click()
    expect(owner.get_by_role("group", name="Table: Question").get_by_role("rowheader")).to_have_text(["overall", "clear", "true"])
    options = owner.get_by_label("Question to export").locator("option")
    expect(options).to_have_text(["overall", "clear", "true", "all questions, each in separate rows (column criterion)"])


def test_a_rate_that_guessing_may_give_is_named_as_that(opened, studio):
    """Six of eight known answers are right: 0.75, from 0.41 to 0.93."""
    number = project(studio, 0, checks=50)
    bring(studio, number, [{"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(8)], gold=True)
    ann, wrong = guest(studio, number, name="Ann of eight"), {"p0", "p1"}
    while (task := ann.next(number)) is not None:
        at = next(n for n, text in enumerate(task["completions"]) if text.startswith("good"))
        told(ann.vote(task, choice=("left", "right")[at if task["prompt"] not in wrong else 1 - at]))
    owner = opened(f"/label#project={number}&part=results")
    expect(owner.get_by_role("row", name="Ann of eight")).to_contain_text("75 % of 8 (41 % to 93 %): could be guessing")


def test_a_file_that_was_brought_in_is_taken_out_again(opened, studio, tmp_path):
    number = project(studio, 1)
    owner = opened(f"/label#project={number}&part=material")
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "p", "completions": ["x", "y"]}\n')
    owner.get_by_label("File").set_input_files(tmp_path / "wrong.jsonl")
    owner.get_by_role("button", name="Import the file").click()
    expect(owner.locator(".said")).to_contain_text("wrong.jsonl: 1 new task")
    owner.locator(".said").get_by_role("button", name="Undo").click()
    expect(owner.locator(".said")).to_have_text("1 task removed.")


# ---- the administrator's way, and invites


@pytest.mark.quick
def test_from_a_new_project_by_invite_to_the_export(opened, studio, tmp_path):
    owner = opened("/label")
    owner.get_by_role("link", name="New project").click()
    owner.get_by_label("Name").fill("From the page")
    owner.get_by_label("Instructions").fill("Be kind.")
    owner.get_by_role("button", name="Create the project").click()
    rows = [{"prompt": f"q{i}", "completions": ["short", "much longer"], "samplers": ["one", "two"]} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    owner.get_by_label("File").set_input_files(tmp_path / "rows.jsonl")
    owner.get_by_role("button", name="Import the file").click()
    expect(owner.locator(".said")).to_contain_text("rows.jsonl: 4 new tasks from 4 new prompts")
    owner.get_by_role("link", name="People").click()
    owner.get_by_role("button", name="Create a link").click()
    link = owner.locator(".once input").input_value()
    expect(owner.locator(".part")).to_contain_text("Open links")

    ann = opened(link.removeprefix(studio.base), who="stranger")
    expect(ann.locator("#said")).to_contain_text("invited to label in “From the page”")
    assert "#" not in ann.url
    ann.get_by_label("Name").fill("Ann from afar")
    ann.get_by_label("Password").fill(PASSWORD)
    ann.get_by_role("button", name="Join").click()
    ann.get_by_role("link", name="From the page").click()
    expect(ann.locator("#asked")).to_have_text("Be kind.")
    expect(ann.locator("#tabs a")).to_have_text(["All projects", "Label"])
    expect(ann.locator("nav[aria-label=Pages] a")).to_have_text(["Label"])
    for i in range(4):
        counted(ann, f"{i} answered")
        expect(ann.locator(".words")).to_have_count(2)
        texts = ann.locator(".words").all_text_contents()
        ann.keyboard.press("ab"[texts.index("short")])
        counted(ann, f"{i + 1} answered")

    owner.get_by_role("link", name="Results").click()
    expect(owner.locator(".results")).to_contain_text("4 of 4 answers received")
    expect(owner.locator(".intervals")).to_contain_text("one")
    with owner.expect_download() as waiting:
        owner.get_by_role("button", name="Preferences").click()
    waiting.value.save_as(tmp_path / "out.jsonl")
    made = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(made) == 4 and {row["chosen"] for row in made} == {"short"}
    assert waiting.value.suggested_filename == "From-the-page-preference.jsonl"


ANSWERS = """
import json, sys
rows = open(sys.argv[sys.argv.index("--dataset") + 1])
out = open(sys.argv[sys.argv.index("--output") + 1], "w")
for row in rows:
    for n in range(2):
        out.write(json.dumps({**json.loads(row), "completion": f"answer {n}"}) + chr(10))
"""


def test_a_run_and_a_model_are_brought_in(opened, studio, monkeypatch):
    number = project(studio, 0)
    page = opened(f"/label#project={number}&part=material")
    page.get_by_role("combobox", name="Run", exact=True).select_option("grpo")
    page.get_by_role("button", name="Import the run").click()
    expect(page.locator(".said")).to_contain_text("grpo: 2 new tasks from 1 new prompt and")
    page.get_by_label("Compare completions of different steps, too").check()
    page.get_by_role("button", name="Import the run").click()
    expect(page.locator(".said")).to_contain_text("grpo: 4 new tasks from 0 new prompts")
    monkeypatch.setattr(sample_routes, "_command", lambda form, chosen: [sys.executable, "-c", ANSWERS])
    page.get_by_role("textbox", name="Prompts", exact=True).fill("one\ntwo\nthree")
    page.get_by_role("button", name="Sample and import").click()
    expect(page.locator(".said")).to_contain_text("grpo, final model: 3 new tasks from 3 new prompts")
    monkeypatch.setattr(
        sample_routes, "_command", lambda form, chosen: [sys.executable, "-c", "import sys; sys.exit('psigrad: No.')"]
    )
    page.get_by_role("button", name="Sample and import").click()
    expect(page.locator(".failure:visible")).to_have_text("No.")


def test_a_used_link_and_a_wrong_password_are_said(opened, studio):
    number = project(studio, 1)
    token = invite(studio, number)
    opened.expected += ["404", "401", "400"]
    page = opened(f"/join#{token}", who="stranger")
    page.get_by_label("Name").fill("Someone New")
    page.evaluate("document.getElementById('password').minLength = 0")
    page.get_by_label("Password").fill("short")
    page.get_by_role("button", name="Join").click()
    expect(page.locator("#trouble")).to_contain_text("expected 10 to 1024")
    used = guest(studio, number)
    gone = opened(f"/join#{'psigrad_invite_' + 'A' * 43}", who="stranger")
    expect(gone.locator("#said")).to_contain_text("unknown, used or expired")
    gone.get_by_label("Name").fill(used.name)
    gone.get_by_label("Password").fill("not the password")
    gone.get_by_role("button", name="Log in").click()
    expect(gone.locator("#trouble")).to_have_text("Name or password is wrong.")


def test_who_is_here_already_joins_with_a_click(opened, studio):
    first, second = project(studio, 1), project(studio, 1, name="the second one")
    ann = guest(studio, first)
    page = opened(f"/join#{invite(studio, second)}", who=ann)
    page.get_by_role("button", name=f"Join as {ann.name}").click()
    expect(page.locator(".projects")).to_contain_text("the second one")


def test_roles_links_and_tokens_are_taken_back(opened, studio):
    number = project(studio, 1)
    ann = guest(studio, number, name="Ann of roles")
    page = opened(f"/label#project={number}&part=people")
    page.get_by_label("Role of Ann of roles").select_option("viewer")
    until(lambda: page.wait_for_timeout(20) or ann.post("/api/label/next", {"project": number}).status == 403)
    page.locator(".part").get_by_role("button", name="Undo").click()
    expect(page.locator(".part")).to_contain_text("Ann of roles is labeller again.")
    assert ann.post("/api/label/next", {"project": number}).status == 200
    page.get_by_role("button", name="Create a link").click()
    page.get_by_role("button", name="Revoke").click()
    expect(page.locator(".part")).to_contain_text("No open links")
    row = page.locator("tr", has_text="Ann of roles")
    row.get_by_role("button", name="Block").click()
    page.locator("dialog").get_by_role("button", name="Block").click()
    expect(row).to_contain_text("blocked")
    assert ann.get("/api/label/me").status == 401
    page.get_by_role("button", name="Account").click()
    page.get_by_label("Purpose").fill("a script")
    page.get_by_role("button", name="Create a token").click()
    value = page.locator(".once input").input_value()
    bearer = {"Host": studio.host, "Authorization": f"Bearer {value}"}
    assert studio.ask("GET", "/api/label/me", headers=bearer).status == 200
    page.get_by_role("button", name="Revoke").first.click()
    expect(page.locator("table")).to_contain_text("revoked")
    assert studio.ask("GET", "/api/label/me", headers=bearer).status == 401


# ---- how it looks to everybody


@pytest.fixture(scope="module")
def places(studio):
    """Every view there is, with something in it."""
    pairs = project(studio, 6, overlap=2, strengths=3, instructions="Which would you rather get?")
    for who in (guest(studio, pairs), guest(studio, pairs)):
        for choice in ("left", "right", "tie"):
            told(who.vote(who.next(pairs), choice=choice))
    invite(studio, pairs)
    ranking, rating = project(studio, 0, kind="ranking"), project(studio, 1, kind="rating-10")
    bring(studio, ranking, [{"prompt": "q", "completions": [f"text {n} " * 200 for n in range(4)]}])
    token = invite(studio, pairs)
    views = {part: f"/label#project={pairs}&part={part}" for part in ("work", "results", "material", "people", "settings")}
    views |= {"home": "/label", "new": "/label#part=new", "account": "/label#part=account", "join": f"/join#{token}"}
    aspects = project(studio, 2, strengths=2, questions=ASPECTS, instructions="Read **both**.")
    own = project(studio, 2, kind="rating-5", overall=False, questions=ASPECTS[1:])
    views |= {
        "aspects": f"/label#project={aspects}",
        "own": f"/label#project={own}",
        "asked": f"/label#project={aspects}&part=settings",
    }
    return views | {"ranking": f"/label#project={ranking}", "rating": f"/label#project={rating}"}


# what each view has once it is complete
VIEWS = {
    "work": ".completion",
    "results": ".file >> nth=2",
    "material": "form >> nth=2",
    "people": "td select",
    "settings": "form >> nth=1",
    "home": ".projects li",
    "new": "form",
    "account": "form",
    "ranking": ".order li",
    "rating": ".scale",
    "aspects": ".sheet",
    "own": ".sheet",
    "asked": ".own li",
    "join": "form:visible",
}
SMALL = """() => [...document.querySelectorAll('main :is(button, select, input:not([type=checkbox]))')]
    .filter(e => e.checkVisibility()).filter(e => { const b = e.getBoundingClientRect(); return b.width < 24 || b.height < 24; })
    .map(e => e.outerHTML)"""


def show(page: Page, studio, path: str, ready: str) -> None:
    """Open a view in a page that is in the studio already, and wait until it is complete."""
    page.goto("about:blank")
    page.goto(studio.base + path)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector(ready)
    if "part=work" in path:
        page.keyboard.press("a")
    if "part=results" in path:
        expect(page.locator(".file").first).to_contain_text("rows")


def blameless(page: Page, view: str) -> None:
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    assert found.violations_count == 0, (view, found.generate_report())


@pytest.mark.parametrize("scheme, size", [("light", "laptop"), ("dark", "phone")])
def test_axe_finds_nothing_and_nothing_is_too_wide_or_too_small(opened, studio, places, scheme, size):
    page = opened("/label", size=size, scheme=scheme)
    for view in VIEWS if scheme == "light" else ("work", "results", "material", "people", "ranking", "aspects", "asked", "join"):
        if view == "join":
            page = opened(places[view], who="stranger", size=size, scheme=scheme)
        else:
            show(page, studio, places[view], VIEWS[view])
        blameless(page, view)
        assert not page.evaluate(SMALL), view
        for width in (320, 768) if size == "phone" else (1440,):
            page.set_viewport_size({"width": width, "height": 800})
            until(lambda page=page: page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0)
        page.set_viewport_size(dict(zip(("width", "height"), SIZES[size], strict=True)))
        if view == "work" and scheme == "light":
            page.keyboard.press("?")
            blameless(page, "keys")


def test_instructions_are_rendered_like_prompts_and_the_bar_covers_nothing_on_a_phone(opened, studio):
    number = project(studio, 2, name="as a prompt is", strengths=3, instructions="Be **kind**:\n\n- first\n- second")
    page, _ = at_work(opened, studio, number, size="phone")
    expect(page.locator("#asked strong")).to_have_text("kind")
    expect(page.locator("#asked li")).to_have_count(2)
    page.locator(".choices .side").first.click()
    covered = """() => { const bar = document.querySelector('.dock').getBoundingClientRect();
        return [...document.querySelectorAll('.words')].filter((e) => { const b = e.getBoundingClientRect();
            return b.bottom > bar.top && b.top < bar.bottom; }).length; }"""
    for share in (0, 0.5, 1):
        page.evaluate("share => scrollTo(0, share * (document.documentElement.scrollHeight - innerHeight))", share)
        assert page.evaluate(covered) == 0
