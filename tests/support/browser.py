"""Chromium for tests: the one of the system or Playwright's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

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
