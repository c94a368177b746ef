"""What a request, a completion and an episode are, by hand."""

from __future__ import annotations

import pytest

from psigrad.language.rollout.types import SamplingParams


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"max_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "0 \\(greedy\\) or more"),
        ({"top_p": 0.0}, "above 0"),
        ({"min_p": 2.0}, "between 0 and 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting, expected):
    with pytest.raises(ValueError, match=expected):
        SamplingParams(**{"max_tokens": 5, **setting})
