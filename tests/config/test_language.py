"""Settings of language models: what a class takes and reads."""

from __future__ import annotations

import pytest

from psigrad.config import EvalConfig, OnlineConfig, PreferenceConfig, RewardConfig, SFTConfig
from psigrad.config.load import load
from psigrad.errors import UserError


@pytest.mark.parametrize(
    ("cls", "given", "said"),
    [
        (EvalConfig, ["model.lora_rank=8"], "has no effect on this command"),
        (SFTConfig, ["placement.samplers=2"], "has no effect on this command"),
        (RewardConfig, ["label_smoothing=0.5"], "expected below 0.5"),
        (OnlineConfig, ["algorithm=3"], "expected a preset's name"),
        (PreferenceConfig, ["loss=[dpo]"], "expected a preset's name"),
    ],
)
def test_what_a_class_does_not_read_or_take_is_refused(cls, given, said):
    with pytest.raises(UserError, match=said):
        load(cls, overrides=given)


def test_who_plays_and_who_asks():
    found = [(c.plays, c.asks) for c in (OnlineConfig(), OnlineConfig(tools=("m:f",)), OnlineConfig(agent_command="a"))]
    assert found == [(False, False), (True, False), (True, True)]
    assert load(EvalConfig, overrides=["sampling.temperature=0.5"]).evaluation.eval_temperature == 0.5
