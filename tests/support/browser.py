"""Chromium for tests: the one of the system or Playwright's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import machine
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

PATIENCE = 60_000
"""Milliseconds that a page has for whatever it does next: no claim, but what a machine with much else to do may need."""
expect.set_options(timeout=PATIENCE)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser."""
    path = machine.browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=machine.BROWSER_FLAGS, timeout=PATIENCE)
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
        page.set_default_timeout(PATIENCE)
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


# The most common window of a laptop, and the little that a browser's own bars leave of it.
SMALL_WINDOWS = [(1366, 768), (1366, 650), (390, 844)]
_UNDER = """() => {
  const box = (e) => e.getBoundingClientRect(), player = box(document.querySelector('.transport'));
  const meets = (b) => b.left < player.right && b.right > player.left && b.top < player.bottom && b.bottom > player.top;
  return [...document.querySelectorAll('.cell, .caption, .panel select')].filter((e) => meets(box(e))).map((e) => e.outerHTML);
}"""


def under_the_player(page: Page) -> list[str]:
    """What of the boards the player of the grid lies over, wherever the page is scrolled to."""
    found: list[str] = []
    for share in (0, 0.25, 0.5, 1):
        page.evaluate("share => scrollTo(0, share * (document.documentElement.scrollHeight - innerHeight))", share)
        found += page.evaluate(_UNDER)
    page.evaluate("scrollTo(0, 0)")
    return found


def cells_outside_the_window(page: Page) -> int:
    """Cells of the boards that are not wholly within the window."""
    script = "() => [...document.querySelectorAll('.cell')].filter(e => e.getBoundingClientRect().bottom > innerHeight).length"
    found: int = page.evaluate(script)
    return found


def make_the_player_sticky(page: Page) -> None:
    """Put the player behind the boards and let it stick to the window's edge, as a negative control."""
    page.evaluate(
        """() => { const player = document.querySelector('.transport');
            document.querySelector('.panels').after(player);
            Object.assign(player.style, { position: 'sticky', bottom: '10px' }); }"""
    )
