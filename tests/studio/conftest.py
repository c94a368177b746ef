"""What the studio's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import chromium
from playwright.sync_api import Browser

from psigrad_studio.labels import passwords


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def cheap_hashes() -> Iterator[None]:
    """Passwords hashed at next to no cost: these tests log in often, and are about other things."""
    given, passwords.COST = passwords.COST, passwords.ScryptCost(log_n=4, r=1, p=1)
    yield
    passwords.COST = given
