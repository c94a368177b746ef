"""The chat page in Chromium: by keyboard alone, on a phone, in both themes; and what a model writes stays text."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import Visits
from chat_runs import make_runs
from live_studio import live_studio
from playwright.sync_api import Page, expect

from psigrad_studio import chat_answers

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202e{{7*7}}"


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    runs: Path = make_runs(tmp_path_factory.mktemp("chat") / "runs")
    with live_studio(runs=runs) as running:
        yield running


@pytest.fixture
def opened(studio, browser):
    """opened(size, scheme) -> the page; what it logged is looked at in the end."""
    visits = Visits(browser)

    def visit(size: str = "laptop", scheme: str = "light", folder: str = "/chat") -> Page:
        page = visits.page(size, scheme, touch=size == "phone")
        page.goto(f"{studio.base}/enter?key={studio.settings.key}")
        page.goto(f"{studio.base}{folder}")
        page.wait_for_selector("html[data-ready]")
        return page

    visit.expected = []
    yield visit
    visits.close(visit.expected, [studio.base])


def choose(page: Page, first: str, second: str | None = None) -> None:
    page.select_option("#first", label=first)
    if second:
        page.check("#compare")
        page.select_option("#second", label=second)


def asked(page: Page, words: str) -> None:
    page.fill("#message", words)
    page.press("#message", "Enter")


def ended(page: Page, status: str = "The answer has ended.") -> None:
    """Wait for the end of what was asked last: until it is written there is a button that stops it, under the earlier words."""
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#status")).to_have_text(status)


def test_a_conversation_goes_on_and_a_new_one_begins(opened):
    page = opened()
    choose(page, "chat/talking, step 7")
    page.fill("#tokens", "12")
    expect(page.locator("#system-field")).to_be_visible()
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.url.endswith("/answer") else None)
    for words in ("say a:", "and b?"):
        asked(page, words)
        ended(page)
    first = page.locator(".exchange").first.locator(".words").text_content()
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "say a:"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and b?"},
    ]
    page.click("#fresh")
    expect(page.locator(".exchange")).to_have_count(0)
    asked(page, "again")
    ended(page)
    assert len(bodies[2]["messages"]) == 1


def test_the_seed_below_an_answer_repeats_it(opened):
    page = opened()
    choose(page, "chat/plain, final model")
    expect(page.locator("#manner")).to_contain_text("No chat template")
    page.fill("#tokens", "20")
    asked(page, "say b:")
    ended(page)
    seed = re.search(r"seed (\d+)", page.locator(".facts").first.text_content()).group(1)
    page.fill("#seed", seed)
    asked(page, "say b:")
    expect(page.locator(".facts").nth(1)).to_contain_text(f"seed {seed}")
    assert page.locator(".words").nth(0).text_content() == page.locator(".words").nth(1).text_content()


def test_two_answers_are_compared_by_keyboard_alone(opened):
    page = opened()
    page.evaluate("document.activeElement.blur()")

    def tab_to(selector: str, most: int = 40) -> None:
        for _ in range(most):
            page.keyboard.press("Tab")
            if page.evaluate("s => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"Tab never came to {selector}")

    tab_to("#first")
    page.keyboard.type("chat/talking")
    tab_to("#compare")
    page.keyboard.press("Space")
    tab_to("#second")
    page.keyboard.type("chat/silent")
    tab_to("#tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("8")
    tab_to("#seed")  # an answer that is drawn may be empty, which is not stored
    page.keyboard.type("5")
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.id") == "message":
            break
    page.keyboard.type("say c:")
    page.keyboard.press("Enter")
    ended(page, "Both answers are complete. Which one is better?")
    assert page.evaluate("document.activeElement.className") == "choices"
    page.keyboard.press("Enter")  # of somebody who types: no vote
    expect(page.locator(".verdict")).to_have_count(0)
    assert page.locator(".answer h2").all_text_contents() == ["A", "B"]
    page.keyboard.press("2")
    expect(page.locator(".verdict")).to_contain_text("was better")
    names = page.locator(".answer h2").all_text_contents()
    assert sorted(name.partition(": ")[2] for name in names) == ["chat/silent, final model", "chat/talking, step 7"]
    expect(page.locator(".answer").nth(1)).to_have_class(re.compile("better"))
    assert page.evaluate("document.activeElement.id") == "message"
    ended(page, "Stored.")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".verdict")).to_contain_text("Choice undone. It is not stored.")
    ended(page, "Undone.")


def test_the_better_answer_goes_on_and_two_bad_ones_do_not(opened):
    page = opened()
    choose(page, "chat/talking, step 7", "chat/silent, final model")
    page.fill("#tokens", "6")
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.url.endswith("/answer") else None)
    said = []
    for key in ("2", "4", None, "3"):
        asked(page, f"say {key}")
        ended(page, "Both answers are complete. Which one is better?")
        exchange = page.locator(".exchange").last
        if key == "2":
            said.append(exchange.locator(".words").nth(1).text_content())
        if key is None:
            exchange.get_by_role("button", name="Skip").click()
        else:
            page.keyboard.press(key)
        expect(exchange.locator(".verdict")).to_be_visible()
    kept = [message["content"] for message in bodies[-1]["messages"]]
    assert kept == ["say 2", said[0], "say 3"]


def test_a_skip_and_a_conversation_that_was_left_come_back(opened):
    page = opened()
    choose(page, "chat/talking, step 7", "chat/silent, final model")
    page.fill("#tokens", "6")
    page.fill("#seed", "5")
    asked(page, "say c:")
    ended(page, "Both answers are complete. Which one is better?")
    page.get_by_role("button", name="Skip").click()
    page.get_by_role("button", name="Undo").click()
    page.keyboard.press("2")
    ended(page, "Stored.")
    page.click("#fresh")
    expect(page.locator(".exchange")).to_have_count(0)
    page.locator("#nothing").get_by_role("button", name="Undo").click()
    expect(page.locator(".exchange")).to_have_count(1)
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.url.endswith("/answer") else None)
    asked(page, "and then?")
    ended(page, "Both answers are complete. Which one is better?")
    assert bodies[-1]["messages"][0]["content"] == "say c:", "the conversation goes on"


def test_escape_stops_a_long_answer(opened, monkeypatch):
    gate = chat_answers._Writer.step

    def slow(self):
        time.sleep(0.2)
        return gate(self)

    monkeypatch.setattr(chat_answers._Writer, "step", slow)
    page = opened()
    choose(page, "chat/talking, step 7")
    page.fill("#tokens", "200")
    page.fill("#temperature", "0")  # an answer that is drawn may end by itself before Escape comes
    asked(page, "say a:")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator(".words")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".facts")).to_contain_text("stopped")
    expect(page.locator("#stop")).to_be_hidden()


def test_what_a_model_writes_stays_text(opened, monkeypatch):
    monkeypatch.setattr(chat_answers, "decode", lambda tokenizer, ids: HOSTILE[: 8 * len(ids)])
    page = opened()
    choose(page, "chat/plain, final model")
    page.fill("#tokens", "12")
    asked(page, HOSTILE)
    ended(page)
    assert page.locator(".words").text_content() == HOSTILE and page.locator(".said").text_content() == HOSTILE
    assert page.locator("main img, main script").count() == 0


def test_a_refusal_is_shown_and_the_words_are_not_lost(opened):
    page = opened()
    choose(page, "chat/plain, final model")
    asked(page, "1" * 300)
    expect(page.locator(".failure")).to_contain_text("300 tokens")
    expect(page.locator("#message")).to_have_value("1" * 300)


@pytest.mark.parametrize(("size", "scheme"), [("laptop", "light"), ("phone", "dark")])
def test_accessible_in_every_state(opened, size, scheme):
    page = opened(size, scheme)
    choose(page, "chat/talking, step 7", "chat/silent, final model")
    page.fill("#tokens", "6")
    found = []
    found += Axe().run(page).response["violations"]
    asked(page, "say a:")
    ended(page, "Both answers are complete. Which one is better?")
    found += Axe().run(page).response["violations"]
    page.locator('[data-choice="both_bad"]').click()
    expect(page.locator(".verdict")).to_be_visible()
    found += Axe().run(page).response["violations"]
    assert not found, [(v["id"], [node["html"][:120] for node in v["nodes"]]) for v in found]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"


def test_without_models_the_page_says_what_to_do(browser, tmp_path):
    with live_studio(runs=tmp_path) as empty:
        page = browser.new_page()
        page.goto(f"{empty.base}/enter?key={empty.settings.key}")
        page.goto(f"{empty.base}/chat")
        expect(page.locator("#nothing")).to_contain_text("psigrad demo")
        expect(page.locator("#send")).to_be_disabled()
        page.close()
