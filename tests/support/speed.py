"""A fixture of tests whose commands say how long something will take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from psigrad_extras.preflight.plan import hardware


@pytest.fixture(scope="module")
def measured_once() -> Iterator[None]:
    """How fast this machine computes is measured once, and not again by each command, which takes up to half a second."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hardware, "_speed", cache(hardware._speed))
        yield
