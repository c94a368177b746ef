"""Chromium for tests: the one of the system or Playwright's own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser. Fails, with what to install, where there is none."""
    with sync_playwright() as playwright:
        found = next((path for name in NAMES if (path := shutil.which(name))), None)
        found = found or (own if Path(own := playwright.chromium.executable_path).exists() else None)
        if found is None:
            pytest.fail("no Chromium: run `apt-get install -y chromium`, or `playwright install chromium`", pytrace=False)
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


SIZES = {"laptop": (1280, 860), "phone": (390, 844)}


class Visits:
    """The pages of one test, watched: what they log, what they raise, whom they ask."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.contexts: list[BrowserContext] = []
        self.troubles: list[str] = []
        self.asked: list[str] = []

    def page(self, size: str = "laptop", scheme: str = "light", *, still: bool = True, touch: bool = False) -> Page:
        """A page in a context of its own."""
        width, height = SIZES[size]
        context = self.browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce" if still else "no-preference",
            has_touch=touch,
        )
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda said: self.troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("dialog", lambda dialog: self.troubles.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))
        return page

    def close(self, expected: Sequence[str] = (), bases: Sequence[str] = ("http://127.0.0.1:",)) -> None:
        """Leave. Nothing may have gone wrong but what is `expected`, nobody been asked but these servers."""
        for context in self.contexts:
            context.close()
        unexpected = [t for t in self.troubles if not any(re.search(e, t) for e in expected)]
        assert not unexpected, unexpected
        assert all(url.startswith((*bases, "about:", "blob:")) for url in self.asked)


def everything_is_reached_by_tab(page: Page, spare: int, selector: str = "a[href], button, select, input, summary") -> None:
    """Every control that is shown and enabled comes into focus within `spare` more presses than there are, and shows it."""
    wanted = page.evaluate(
        """selector => [...document.querySelectorAll(selector)]
            .filter(e => !e.disabled && e.checkVisibility()).map((e, n) => e.dataset.test = String(n))""",
        selector,
    )
    reached = set()
    for _ in range(len(wanted) + spare):
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(
            """() => { const e = document.activeElement, s = getComputedStyle(e);
                return [e.dataset.test ?? '', e === document.body || s.outlineStyle !== 'none' || s.boxShadow !== 'none']; }"""
        )
        assert outlined
        reached.add(name)
    assert set(wanted) <= reached
