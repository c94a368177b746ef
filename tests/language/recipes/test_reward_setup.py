"""The rewards of a run: their names and their weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from psigrad.config import OnlineConfig
from psigrad.errors import UserError
from psigrad.language.recipes.scorers import RewardSetup


def test_reward_models_have_names_of_their_own_and_finite_weights():
    config = OnlineConfig(reward=("exact",), reward_model=("a/model", "b/model", "a/model"), reward_weights=(1.0, 2.0, 3.0, 4.0))
    assert RewardSetup.of(config).weights == {"exact": 1.0, "a": 2.0, "b": 3.0, "a_2": 4.0}
    with pytest.raises(UserError, match="finite"):
        RewardSetup.of(replace(config, reward_weights=(1.0, 2.0, 3.0, math.nan)))
