"""The search of the documentation site, in a browser: it finds the setting, the error, the method by its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from psigrad.config.fields import settings_of
from psigrad.config.methods import list_declarations

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
# The pages that the search page lists for some words, best first, without drawing them.
FOUND = """words => {
    history.replaceState(null, "", "?q=" + encodeURIComponent(words));
    return Search._performSearch(...Search._parseQuery(words)).reverse().map(found => found[0]);
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    built = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "sphinx", "--builder", "html", "--quiet", "docs", str(built)], cwd=ROOT, check=True)
    return built


@pytest.fixture(scope="module")
def page(site, browser):
    opened = browser.new_page()
    opened.goto((site / "search.html").as_uri())
    opened.wait_for_function("Search.hasIndex()")
    return opened


def test_every_setting_leads_to_the_page_of_settings(page):
    names = {dotted.rpartition(".")[2] for method in list_declarations().values() for dotted in settings_of(method.settings)}
    guides = {"agent", "callbacks", "environment", "resume", "reward", "tools"}  # words with pages or headings of their own
    found = {name: page.evaluate(FOUND, name) for name in names - guides}
    assert {name: pages[:2] for name, pages in found.items() if pages[:1] != ["settings"]} == {}


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("--max-steps", "settings"),
        ("optim.learning_rate", "settings"),
        ("learning rate", "settings"),
        ("GRPO", "methods/grpo"),
        ("dr. grpo", "methods/dr_grpo"),
        ("PPO", "methods/ppo"),
        ("TRL", "porting"),
        ("chat template", "chat_templates"),
        ("verifiable rewards", "rewards"),
        ("export", "adapters"),
        ("own advantage", "own_part"),
        ("out of memory", "plan"),
        ("no GPU", "install"),
        ("studio", "studio"),
        ("value iteration", "api/tabular"),
    ],
)
def test_words_lead_to_their_page(page, words, first):
    assert page.evaluate(FOUND, words)[0] == first


def test_a_word_that_is_a_setting_too_has_its_guide_among_the_first(page):
    assert "runs" in page.evaluate(FOUND, "resume")[:4]


def test_a_setting_that_is_typed_is_listed_and_its_row_opened(site, browser):
    page = browser.new_page()
    page.goto((site / "search.html").as_uri() + "?q=max_completion_length")
    first = page.locator("#search-results li a").first
    expect(first).to_have_attribute("href", "settings.html")
    first.click()
    expect(page.locator("td:first-child", has_text="max_completion_length").first).to_be_in_viewport()
