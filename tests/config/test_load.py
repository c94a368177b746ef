"""Settings from files, overrides and Python, and back to plain values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import datasets
import pytest

from psigrad.config import EvalConfig, OnlineConfig, PreferenceConfig, RewardConfig, SampleConfig, SFTConfig
from psigrad.config.load import load, to_dict

CONFIGS = [SFTConfig, OnlineConfig, EvalConfig, PreferenceConfig, RewardConfig, SampleConfig]


@pytest.mark.parametrize(
    "given",
    [
        "reward=exact",
        "reward=[exact]",
        "reward=[exact, {reward: soft_overlong, max_completion_length: 128}]",
        "reward={reward: length}",
    ],
)
def test_rewards_are_written_alone_as_a_list_and_with_parameters(given):
    from psigrad.language.rewards import resolve

    for reward in load(OnlineConfig, overrides=[given]).reward:
        assert callable(resolve(reward).function)


def test_a_path_is_as_good_as_its_name(tmp_path):
    config = load(OnlineConfig, flags={"model.path": tmp_path, "data.dataset": tmp_path, "run.output_dir": tmp_path})
    assert config == load(OnlineConfig, flags={n: str(tmp_path) for n in ("model.path", "data.dataset", "run.output_dir")})


def test_rows_from_python_are_kept_as_a_count_and_a_hash():
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}]
    written = to_dict(load(OnlineConfig, flags={"data.dataset": rows}))["data"]["dataset"]
    assert written == f"rows:2:{hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()}"
    assert to_dict(load(OnlineConfig, flags={"data.dataset": datasets.Dataset.from_list(rows)}))["data"]["dataset"] == written
    assert to_dict(load(OnlineConfig, flags={"data.dataset": rows[::-1]}))["data"]["dataset"] != written


@pytest.mark.parametrize("cls", [SFTConfig, OnlineConfig, EvalConfig])
def test_settings_survive_the_way_through_json(cls):
    config = load(
        cls, overrides=["model.path=x", "reward=[a,b]", "optim.learning_rate=1e-5" if cls is not EvalConfig else "run.seed=3"]
    )
    assert load(cls, flags=json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("cls", CONFIGS)
def test_a_section_that_is_given_in_part_keeps_the_recipes_own_defaults(cls):
    blank = cls()
    for name, hint in get_type_hints(cls).items():
        if not is_dataclass(hint):
            continue
        for given in fields(hint):
            value = getattr(getattr(blank, name), given.name)
            assert load(cls, flags={f"{name}.{given.name}": value}) == blank
    assert load(SFTConfig, flags={"optim.weight_decay": 0.1}).optim.learning_rate == 2e-5 != OnlineConfig().optim.learning_rate
