"""psigrad's own names of settings: dotted, short, in sections and flat in a file."""

from __future__ import annotations

import pytest

from psigrad.config import OnlineConfig
from psigrad.config.names import OWN
from psigrad.config.nested import GivenSetting
from psigrad.errors import UserError


def test_a_short_name_is_that_of_its_section_and_an_unknown_one_stays():
    names = [OWN.dotted_name(OnlineConfig, name) for name in ("learning_rate", "optim.learning_rate", "optim", "lr")]
    assert names == ["optim.learning_rate", "optim.learning_rate", "optim", "lr"]


def test_a_file_has_sections_and_names_of_its_own_level():
    nested, flat = OWN.of_file(OnlineConfig, {"optim": {"learning_rate": 1}, "model": "m", "seed": 2, "lag": 3}, {}, "f")
    assert nested == {"optim": {"learning_rate": 1}, "lag": 3}
    assert flat == [GivenSetting("model.path", "m", "f"), GivenSetting("seed", 2, "f")]


def test_a_shortcut_changes_its_part_and_one_without_its_part_is_refused():
    (found,) = OWN.translate(OnlineConfig, {"algorithm": "grpo"}, [GivenSetting("beta", 0.1, "--beta")])
    assert (found.name, found.value) == ("algorithm.kl.coefficient", 0.1)
    with pytest.raises(UserError, match="gae_lambda"):
        OWN.translate(OnlineConfig, {"algorithm": "grpo"}, [GivenSetting("gae_lambda", 0.9, "--gae-lambda")])
